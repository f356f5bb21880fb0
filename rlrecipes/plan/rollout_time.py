"""How long the rollouts of a step take: the load of every engine, simulated. Owns who gets which prompt."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlrecipes.plan.engine_costs import (
    compute_decode_costs,
    compute_engine_kv_bytes,
    compute_engine_weight_bytes,
)
from rlrecipes.plan.engine_memory import compute_memory_fraction
from rlrecipes.plan.lengths import LengthDistribution, draw_lengths
from rlrecipes.plan.links import compute_link_bytes_per_s
from rlrecipes.plan.simulation import DecodeCosts, EngineRun, Request, simulate
from rlrecipes.plan.step_inputs import EngineGroup, StepInputs
from rlrecipes.plan.time_constants import TimeConstants

DEFAULT_MAX_RUNNING_REQUESTS = 2048
"""SGLang's own limit where a recipe gives none and the cache has room."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one engine may take at once.

    Attributes:
        max_running: requests.
        capacity_tokens: of its KV cache.
    """

    max_running: int
    capacity_tokens: int


@dataclass(frozen=True, slots=True)
class RolloutTime:
    """The rollouts of a step.

    Attributes:
        duration_s: from the first request to the last answer.
        tail_s: of it, after nine tenths of the slowest engine's answers.
        busy_fraction: of the engines' time, until each has answered its last request.
        longest_tokens_per_s: speed of the longest rollout.
        num_response_tokens: generated.
        parts: cause -> seconds, of the slowest engine.
    """

    duration_s: float
    tail_s: float
    busy_fraction: float
    longest_tokens_per_s: float
    num_response_tokens: int
    parts: dict[str, float]


def compute_distribution(inputs: StepInputs, constants: TimeConstants) -> LengthDistribution:
    """Lengths that the constants assume.

    Args:
        inputs: of the step.
        constants: of the model.
    """
    return LengthDistribution(
        median_tokens=constants.response_median_fraction * inputs.max_new_tokens,
        sigma=constants.response_sigma,
        max_tokens=inputs.max_new_tokens,
        prompt_tokens=max(1, round(constants.prompt_fraction * inputs.max_prompt_tokens)),
    )


def compute_rollout_time(inputs: StepInputs, constants: TimeConstants) -> RolloutTime:
    """Simulate the engines that answer.

    Siblings go to one engine and share its cache, prompts go to the engines in turn. Of each group of engines three
    are simulated: the one with most tokens, the one with the longest answer, and the median one. The others are taken
    to lie between.

    Args:
        inputs: with at least one group of engines.
        constants: of the model.
    """
    distribution = compute_distribution(inputs, constants)
    lengths = draw_lengths(distribution, inputs.num_samples, inputs.seed)
    answering = [group for group in inputs.engine_groups if group.worker_type != "prefill"]
    prefilling = [group for group in inputs.engine_groups if group.worker_type == "prefill"]
    num_engines = sum(group.num_engines for group in answering)
    ready_s = _compute_ready_times(inputs, prefilling, distribution, constants) if prefilling else ()
    runs: list[EngineRun] = []
    medians: list[tuple[float, int]] = []
    first = 0
    for group in answering:
        loads = _loads(inputs, lengths, range(first, first + group.num_engines), num_engines)
        costs = compute_decode_costs(inputs, group, distribution, constants)
        limits = compute_limits(inputs, group, num_engines)
        own = [
            _run_engine(costs, limits, load, distribution.prompt_tokens, inputs.group_size, ready_s) for load in loads
        ]
        runs += own
        medians.append((own[-1].end_s, group.num_engines))
        first += group.num_engines
    slowest = max(runs, key=lambda run: run.end_s)
    busy_s = sum(end_s * count for end_s, count in medians)
    return RolloutTime(
        duration_s=slowest.end_s,
        tail_s=slowest.end_s - slowest.most_done_s,
        busy_fraction=min(1.0, busy_s / (slowest.end_s * num_engines)),
        longest_tokens_per_s=max(runs, key=lambda run: run.longest_tokens).longest_tokens_per_s,
        num_response_tokens=sum(lengths),
        parts=slowest.parts,
    )


type Load = tuple[tuple[int, int], ...]
"""Of one engine: (position of the prompt among all, tokens of the answer)."""


def _loads(inputs: StepInputs, lengths: Sequence[int], engines: range, num_engines: int) -> tuple[Load, ...]:
    """The load with most tokens, the one with the longest answer, and last the median one."""
    size = inputs.group_size
    num_prompts = inputs.schedule.prompts_per_step
    sums = [sum(lengths[p * size : (p + 1) * size]) for p in range(num_prompts)]
    order = sorted((sum(sums[engine::num_engines]), engine) for engine in engines)
    longest = max(range(len(lengths)), key=lengths.__getitem__) // size % num_engines
    chosen = [order[-1][1], longest if longest in engines else order[-1][1], order[len(order) // 2][1]]
    loads = {
        engine: tuple(
            (prompt, tokens)
            for prompt in range(engine, num_prompts, num_engines)
            for tokens in lengths[prompt * size : (prompt + 1) * size]
        )
        for engine in set(chosen)
    }
    return tuple(loads[engine] for engine in chosen)


@functools.lru_cache(maxsize=4096)
def _run_engine(
    costs: DecodeCosts,
    limits: EngineLimits,
    load: Load,
    prompt_tokens: int,
    group_size: int,
    ready_s: tuple[float, ...],
) -> EngineRun:
    """One engine's requests, prompt by prompt; a prompt's first sibling brings it into the cache."""
    if not load:
        return EngineRun()
    is_prefilled = bool(ready_s)
    requests = [
        Request(
            prompt_tokens=prompt_tokens,
            new_tokens=tokens,
            held_tokens=prompt_tokens if is_prefilled or index % group_size == 0 else 0,
            prefill_tokens=prompt_tokens if not is_prefilled and index % group_size == 0 else 0,
            ready_s=ready_s[prompt] if is_prefilled else 0.0,
        )
        for index, (prompt, tokens) in enumerate(load)
    ]
    requests.sort(key=lambda request: request.ready_s)
    return simulate(requests, costs, max_running=limits.max_running, capacity_tokens=limits.capacity_tokens)


def compute_limits(inputs: StepInputs, group: EngineGroup, num_engines: int) -> EngineLimits:
    """How many requests, and how many tokens, an engine holds at once.

    Args:
        inputs: of the step.
        group: whose engine.
        num_engines: that share the requests in flight.
    """
    native = group.native
    running = native.get("max_running_requests") or DEFAULT_MAX_RUNNING_REQUESTS
    share = math.ceil(inputs.max_concurrent_requests / num_engines)
    fraction = native.get("mem_fraction_static") or compute_memory_fraction(inputs.gpu.memory_bytes, group)
    room = fraction * inputs.gpu.memory_bytes - compute_engine_weight_bytes(inputs, group)
    per_token = compute_engine_kv_bytes(inputs, group) / group.pipeline_parallel_size
    capacity = max(1, int(room / per_token)) * group.attention_data_parallel_size
    return EngineLimits(min(running, share), min(capacity, native.get("max_total_tokens") or capacity))


def _compute_ready_times(
    inputs: StepInputs, groups: Sequence[EngineGroup], distribution: LengthDistribution, constants: TimeConstants
) -> tuple[float, ...]:
    """When each prompt's KV cache has reached its decode engine; prompts go to the prefill engines in turn."""
    num_engines = sum(group.num_engines for group in groups)
    ready = [0.0] * inputs.schedule.prompts_per_step
    first = 0
    for group in groups:
        costs = compute_decode_costs(inputs, group, distribution, constants)
        own_s = distribution.prompt_tokens * costs.prefill_token_s + constants.prefill_batch_s
        sent = distribution.prompt_tokens * compute_engine_kv_bytes(inputs, group) / group.pipeline_parallel_size
        link = compute_link_bytes_per_s(inputs, constants, 1, is_spread=_is_apart(inputs))
        sent_s = sent * inputs.group_size / link  # every sibling's decode engine slot gets a copy
        for engine in range(first, first + group.num_engines):
            for position, prompt in enumerate(range(engine, len(ready), num_engines)):
                ready[prompt] = (position + 1) * max(own_s, sent_s) + min(own_s, sent_s)
        first += group.num_engines
    return tuple(ready)


def _is_apart(inputs: StepInputs) -> bool:
    """Whether prefill and decode engines lie on several nodes."""
    nodes = {device.node for group in inputs.engine_groups for engine in group.devices for device in engine}
    return len(nodes) > 1
