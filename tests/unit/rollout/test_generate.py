import asyncio
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_parts import NumberSource, ScriptedClient, fail_when, make_generator

from rlrecipes.rollout.generate import compute_rollout_seed
from rlrecipes.types import RolloutStatus


def run(client, index=7, sibling=1):
    return asyncio.run(make_generator(client).generate(NumberSource().prompt(index), sibling))


def test_a_rollout_can_be_traced_and_repeated():
    client = ScriptedClient()
    rollout = run(client)
    (request,) = client.requests
    assert (request["request_id"], request["routing_key"]) == ("run-7-1.", "run-7")
    assert request["sampling"].seed == compute_rollout_seed(5, 7, 1)
    assert request["sampling"].max_new_tokens == 4
    assert rollout == run(ScriptedClient(latency_seed=9))
    (turn,) = rollout.turns
    assert turn.observation_ids == (7,)
    assert rollout.text == f"7 {compute_rollout_seed(5, 7, 1)}"


def test_seeds_stay_what_they_are():
    assert [compute_rollout_seed(0, 0, 0), compute_rollout_seed(5, 7, 1)] == [151986117, 291269862]


@settings(deadline=None)
@given(seed=st.integers(0, 2**40), index=st.integers(0, 10**9), sibling=st.integers(0, 10**4))
def test_seeds_fit_31_bits_and_differ(seed, index, sibling):
    here = compute_rollout_seed(seed, index, sibling)
    assert 0 <= here < 2**31
    others = {(seed + 1, index, sibling), (seed, index + 1, sibling), (seed, index, sibling + 1)}
    assert all(compute_rollout_seed(*other) != here for other in others)


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        ({}, RolloutStatus.COMPLETED, ""),
        ({"finish_reason": "length"}, RolloutStatus.TRUNCATED, ""),
        ({"finish_reason": "abort"}, RolloutStatus.ABORTED, "the engine aborted it"),
        (
            {"finish_reason": "abort", "token_ids": (), "rollout_logprobs": ()},
            RolloutStatus.ABORTED,
            "the engine aborted it",
        ),
        ({"finish_reason": "tired"}, RolloutStatus.FAILED, "the engine gave the unknown finish reason 'tired'"),
        ({"token_ids": (), "rollout_logprobs": ()}, RolloutStatus.FAILED, "the engine gave no token"),
        (
            {"rollout_logprobs": (-1.0, math.nan)},
            RolloutStatus.FAILED,
            "the engine gave a log probability that is not finite",
        ),
    ],
)
def test_an_answer_becomes_a_status(changes, status, reason):
    rollout = run(ScriptedClient(answer=lambda completion, _: replace(completion, **changes)))
    assert (rollout.status, rollout.reason) == (status, reason)
    assert rollout.reward is None


def test_an_engine_error_is_data():
    rollout = run(ScriptedClient(answer=fail_when(lambda request_id: True)))
    assert (rollout.status, rollout.turns) == (RolloutStatus.FAILED, ())
    assert rollout.reason == "engine is gone for this request"


def test_a_bug_is_not_data():
    def answer(completion, request_id):
        raise AssertionError("a bug")

    with pytest.raises(AssertionError, match="a bug"):
        run(ScriptedClient(answer=answer))
