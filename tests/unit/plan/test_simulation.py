"""Continuous batching by events equals a loop over every token; limits and costs are what arithmetic says."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rlrecipes.plan.simulation import PARTS, DecodeCosts, Request, simulate

COSTS = DecodeCosts(
    weights_s=3e-3,
    experts_s=2e-3,
    awake_fraction=0.9,
    context_s=1e-7,
    token_flops_s=1e-5,
    step_s=1e-3,
    request_s=2e-6,
    token_link_s=3e-6,
    prefill_token_s=1e-6,
    prefill_batch_s=4e-3,
)


def simulate_token_by_token(requests, costs, max_running, capacity):
    """The same rules, one decode step at a time; when each request ended."""
    waiting, running, now, ends = list(range(len(requests))), [], 0.0, {}
    while waiting or running:
        admitted = []
        while waiting and len(running) < max_running:
            request = requests[waiting[0]]
            held = sum(requests[i].held_tokens + requests[i].new_tokens for i, _ in running)
            if running and held + request.held_tokens + request.new_tokens > capacity:
                break
            admitted.append(request)
            running.append((waiting.pop(0), 0))
        if admitted:
            now += sum(r.prefill_tokens for r in admitted) * costs.prefill_token_s + costs.prefill_batch_s
        batch = len(running)
        context = sum(requests[i].prompt_tokens + done for i, done in running)
        reading = costs.weights_s + costs.experts_s * (1 - costs.awake_fraction**batch) + context * costs.context_s
        computing = batch * costs.token_flops_s
        now += max(reading, computing) + costs.step_s + batch * (costs.request_s + costs.token_link_s)
        running = [(i, done + 1) for i, done in running]
        ends |= {i: now for i, done in running if done == requests[i].new_tokens}
        running = [(i, done) for i, done in running if done < requests[i].new_tokens]
    return ends


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("token_flops_s", [1e-7, 1e-3])
def test_events_give_what_a_loop_over_tokens_gives(seed, token_flops_s):
    draw = random.Random(seed)
    requests = [
        Request(draw.randint(1, 50), draw.randint(1, 200), draw.choice([0, 20]), draw.choice([0, 20]))
        for _ in range(draw.randint(1, 40))
    ]
    costs = replace(COSTS, token_flops_s=token_flops_s)
    max_running, capacity = draw.randint(1, 12), draw.randint(100, 1500)
    run = simulate(requests, costs, max_running=max_running, capacity_tokens=capacity)
    ends = simulate_token_by_token(requests, costs, max_running, capacity)
    assert run.end_s == pytest.approx(max(ends.values()), rel=1e-9)
    assert run.most_done_s == pytest.approx(sorted(ends.values())[-(-len(requests) * 9 // 10) - 1], rel=1e-9)
    assert run.peak_batch <= max_running
    assert sum(run.parts.values()) == pytest.approx(run.end_s)
    assert set(run.parts) == set(PARTS)


def test_one_request_takes_its_bytes_over_the_bandwidth():
    costs = DecodeCosts(5e-3, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    run = simulate([Request(10, 100, 10, 10)], costs, max_running=8, capacity_tokens=1000)
    assert run.end_s == pytest.approx(100 * 5e-3)
    assert run.longest_tokens_per_s == pytest.approx(1 / 5e-3)


def test_a_small_cache_makes_requests_take_turns():
    requests = [Request(0, 100, 0, 0)] * 4
    wide = simulate(requests, COSTS, max_running=8, capacity_tokens=400)
    narrow = simulate(requests, COSTS, max_running=8, capacity_tokens=399)
    assert (wide.peak_batch, narrow.peak_batch) == (4, 3)
    assert narrow.end_s > wide.end_s


def test_a_request_larger_than_the_cache_runs_alone():
    run = simulate([Request(0, 100, 0, 0)] * 2, COSTS, max_running=8, capacity_tokens=10)
    assert run.peak_batch == 1


def test_an_engine_waits_for_what_is_not_ready():
    costs = replace(COSTS, prefill_batch_s=0.0)
    alone = simulate([Request(0, 50, 0, 0)], costs, max_running=8, capacity_tokens=1000)
    run = simulate([Request(0, 50, 0, 0), Request(0, 50, 0, 0, 100.0)], costs, max_running=8, capacity_tokens=1000)
    assert run.end_s == pytest.approx(100.0 + alone.end_s)
    assert run.parts["waiting"] == pytest.approx(100.0 - alone.end_s)
    assert run.peak_batch == 1


def test_a_request_that_becomes_ready_joins_those_that_run():
    costs = replace(COSTS, prefill_batch_s=0.0)
    first = simulate([Request(0, 100, 0, 0)], costs, max_running=8, capacity_tokens=1000)
    ready_s = first.end_s / 2
    requests = [Request(0, 100, 0, 0), Request(0, 100, 0, 0, ready_s)]
    run = simulate(requests, costs, max_running=8, capacity_tokens=1000)
    assert run.peak_batch == 2
    assert first.end_s < run.end_s < 2 * first.end_s


def test_speculation_takes_fewer_steps():
    plain = simulate([Request(0, 90, 0, 0)], COSTS, max_running=1, capacity_tokens=100)
    twice = replace(COSTS, tokens_per_step=3.0)
    fast = simulate([Request(0, 90, 0, 0)], twice, max_running=1, capacity_tokens=100)
    assert fast.end_s - COSTS.prefill_batch_s == pytest.approx((plain.end_s - COSTS.prefill_batch_s) / 3)


def test_a_batch_reads_the_experts_that_its_tokens_visit():
    """8 of 128 experts a token: two tokens visit 128 (1 - (120/128)^2) = 15.5 of them."""
    costs = replace(COSTS, weights_s=0.0, experts_s=128.0, awake_fraction=120 / 128)
    assert costs.weights_of(1) == pytest.approx(8.0)
    assert costs.weights_of(2) == pytest.approx(15.5)
    assert costs.weights_of(10_000) == pytest.approx(128.0)
