import asyncio
import threading
import time

import pytest

from rlrecipes.rewards.verifier_reward import VerifierReward
from rlrecipes.rewards.verifiers import RewardResult
from rlrecipes.types import Completion, Group, Prompt, Rollout, RolloutStatus, Turn

PROMPT = Prompt(0, (1,), "1+1=", label="2")


def make_group(*texts, status=RolloutStatus.COMPLETED):
    turn = Turn((1,), Completion((2,), (-0.5,), "stop", 0))
    return Group(PROMPT, tuple(Rollout(PROMPT, i, (turn,), text, status) for i, text in enumerate(texts)))


def score(verify, group, timeout_s=30.0):
    return asyncio.run(VerifierReward(verify, name="mine", timeout_s=timeout_s).reward_group(group)).rollouts


def by_length(rollout):
    return RewardResult(len(rollout.text), {"first": float(rollout.text[0] == "a")})


async def by_length_later(rollout):
    await asyncio.sleep(0.001 * (5 - len(rollout.text)))
    return by_length(rollout)


@pytest.mark.parametrize("verify", [by_length, by_length_later])
def test_each_rollout_gets_its_own_reward_and_parts(verify):
    rollouts = score(verify, make_group("a", "bb", "ccc"))
    assert [rollout.reward for rollout in rollouts] == [1.0, 2.0, 3.0]
    assert [rollout.reward_parts["first"] for rollout in rollouts] == [1.0, 0.0, 0.0]
    assert [rollout.sibling for rollout in rollouts] == [0, 1, 2]
    assert {rollout.status for rollout in rollouts} == {RolloutStatus.COMPLETED}


def test_a_verifier_that_raises_fails_that_rollout_only():
    def verify(rollout):
        return {"a": 1, "b": 0}[rollout.text]

    fine, broken = score(verify, make_group("a", "x"))
    assert (fine.reward, fine.status) == (1.0, RolloutStatus.COMPLETED)
    assert (broken.reward, broken.status, broken.reason) == (0.0, RolloutStatus.FAILED, "verifier mine: KeyError: 'x'")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", RewardResult(1.0, {"part": float("nan")})])
def test_what_is_no_finite_number_fails(value):
    (rollout,) = score(lambda rollout: value, make_group("a"))
    assert (rollout.reward, rollout.status) == (0.0, RolloutStatus.FAILED)
    assert "not a finite number" in rollout.reason


def test_a_verifier_that_hangs_is_given_up_and_holds_nobody():
    def verify(rollout):
        if rollout.text == "hang":
            time.sleep(3600)
        return 1.0

    rollouts = score(verify, make_group(*["hang"] * 40, "fine"), timeout_s=1.0)
    assert {rollout.reason for rollout in rollouts[:-1]} == {"verifier mine: took longer than 1 s"}
    assert rollouts[-1].reward == 1.0


def test_slow_calls_do_not_wait_for_one_another():
    all_there = threading.Barrier(4)  # breaks unless all four calls are inside at once

    def verify(rollout):
        all_there.wait(30)
        return 1.0

    assert [rollout.reward for rollout in score(verify, make_group("a", "b", "c", "d"))] == [1.0] * 4


def test_a_timeout_of_the_verifiers_own_is_its_error():
    def verify(rollout):
        raise TimeoutError("the sandbox is slow")

    (rollout,) = score(verify, make_group("a"))
    assert rollout.reason == "verifier mine: TimeoutError: the sandbox is slow"


def test_the_event_loop_goes_on_while_a_verifier_works():
    async def run():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        def verify(rollout):
            seen = ticks
            while ticks < seen + 5:
                time.sleep(0.001)
            return 1.0

        ticking = asyncio.create_task(tick())
        group = await VerifierReward(verify, name="mine", timeout_s=30).reward_group(make_group("a"))
        ticking.cancel()
        return group.rollouts[0].reward

    assert asyncio.run(run()) == 1.0


@pytest.mark.parametrize("status", [RolloutStatus.FAILED, RolloutStatus.ABORTED])
def test_unanswered_rollouts_are_not_judged(status):
    def verify(rollout):
        raise AssertionError("was judged")

    (rollout,) = score(verify, make_group("a", status=status))
    assert (rollout.reward, rollout.status, rollout.reason) == (0.0, status, "")


def test_truncated_rollouts_are_judged():
    (rollout,) = score(by_length, make_group("aa", status=RolloutStatus.TRUNCATED))
    assert (rollout.reward, rollout.status) == (2.0, RolloutStatus.TRUNCATED)


def test_threads_are_kept_for_the_next_group_and_one_that_is_held_is_replaced():
    threads, leave = set(), threading.Event()

    def verify(rollout):
        threads.add(threading.current_thread())
        return leave.wait() if rollout.text == "stuck" else 1.0

    for _ in range(50):
        score(verify, make_group("a", "b"))
    assert len(threads) < 50
    held = len(threads) + 1
    for _ in range(held):  # as many as there are, and one more
        score(verify, make_group("stuck"), timeout_s=0.01)
    (rollout,) = score(verify, make_group("a"))
    leave.set()
    assert rollout.reward == 1.0
