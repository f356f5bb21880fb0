"""Rewards of a group, by a verifier. Owns timeouts and what a failing verifier means; knows no task.

A verifier that raises, exceeds its time or gives no finite number is data: the rollout becomes FAILED with the reason
and reward 0.0, and is counted as failed; it is never trained. Rollouts that had failed or were aborted before are not
judged and also get 0.0.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from dataclasses import replace

from rlrecipes.rewards.verifiers import RewardResult, Verifier
from rlrecipes.types import Group, Rollout, RolloutStatus


class VerifierReward:
    """Gives groups their rewards, rollout by rollout.

    Args:
        verify: judges one rollout.
        name: of the verifier, for reasons.
        timeout_s: longest time for one rollout.
    """

    def __init__(self, verify: Verifier, *, name: str, timeout_s: float) -> None:
        self._verify = verify
        self._name = name
        self._timeout_s = timeout_s

    async def score_group(self, group: Group) -> Group:
        """Give every rollout of a group its reward.

        Args:
            group: freshly generated.

        Returns:
            The same rollouts in the same order, with ``reward`` and ``reward_parts`` set.
        """
        return replace(group, rollouts=tuple(await asyncio.gather(*map(self._judge, group.rollouts))))

    async def _judge(self, rollout: Rollout) -> Rollout:
        if rollout.status in (RolloutStatus.FAILED, RolloutStatus.ABORTED):
            return replace(rollout, reward=0.0)
        try:
            result = _to_result(await asyncio.wait_for(self._call(rollout), self._timeout_s))
        except TimeoutError:
            return self._fail(rollout, f"took longer than {self._timeout_s:g} s")
        # Whatever a verifier (often a user's) raises speaks of this one answer.
        except Exception as error:
            return self._fail(rollout, f"{type(error).__name__}: {error}")
        return replace(rollout, reward=result.value, reward_parts=result.parts)

    async def _call(self, rollout: Rollout) -> object:
        if inspect.iscoroutinefunction(self._verify):
            return await self._verify(rollout)
        return await _run_in_thread(self._verify, rollout)

    def _fail(self, rollout: Rollout, problem: str) -> Rollout:
        reason = f"verifier {self._name}: {problem}"
        return replace(rollout, status=RolloutStatus.FAILED, reward=0.0, reason=reason)


async def _run_in_thread(verify: Verifier, rollout: Rollout) -> object:
    """Call a plain function in a daemon thread.

    Not ``asyncio.to_thread``: a verifier that never returns would keep one of the pool's few threads, and the
    interpreter would wait for it at exit.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[object] = loop.create_future()

    def deliver(value: object, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)

    def call() -> None:
        value, error = None, None
        try:
            value = verify(rollout)
        except BaseException as raised:
            error = raised if isinstance(raised, Exception) else RuntimeError(f"raised {type(raised).__name__}")
        try:
            loop.call_soon_threadsafe(deliver, value, error)
        except RuntimeError:
            return  # The loop closed meanwhile: nobody waits for the answer.

    threading.Thread(target=call, name="verifier", daemon=True).start()
    return await answer


def _to_result(value: object) -> RewardResult:
    result = value if isinstance(value, RewardResult) else RewardResult(_to_number(value))
    parts = {name: _to_number(part) for name, part in result.parts.items()}
    return RewardResult(_to_number(result.value), parts)


def _to_number(value: object) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"gave {value!r}, not a finite number")
    return float(value)
