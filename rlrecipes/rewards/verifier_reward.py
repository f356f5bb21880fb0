"""Rewards of a group, by a verifier. Owns timeouts and what a failing verifier means; knows no task.

A verifier that raises, exceeds its time or gives no finite number is data: the rollout becomes FAILED with the reason
and reward 0.0, and is counted as failed; it is never trained. Rollouts that had failed or were aborted before are not
judged and also get 0.0.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import cast

from rlrecipes.rewards.verifiers import RewardResult, Verifier
from rlrecipes.types import Group, Rollout, RolloutStatus

_WITHOUT_ANSWER = (RolloutStatus.FAILED, RolloutStatus.ABORTED)
_PATIENCE_S = 0.05
"""While calls take longer than this, the others of the group get threads of their own."""


class _OverdueError(Exception):
    """A call took too long."""


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

    async def reward_group(self, group: Group) -> Group:
        """Give every rollout of a group its reward.

        Args:
            group: freshly generated.

        Returns:
            The same rollouts in the same order, with ``reward`` and ``reward_parts`` set.
        """
        judged = [rollout for rollout in group.rollouts if rollout.status not in _WITHOUT_ANSWER]
        if inspect.iscoroutinefunction(self._verify):
            outcomes = await asyncio.gather(*map(self._await_one, judged))
        else:
            outcomes = await _Calls(self._verify, judged, self._timeout_s).run()
        found = iter(outcomes)
        return replace(
            group,
            rollouts=tuple(
                replace(rollout, reward=0.0) if rollout.status in _WITHOUT_ANSWER else self._take(rollout, next(found))
                for rollout in group.rollouts
            ),
        )

    async def _await_one(self, rollout: Rollout) -> object:
        try:
            return await asyncio.wait_for(cast("Awaitable[object]", self._verify(rollout)), self._timeout_s)
        except TimeoutError:
            return _OverdueError()
        # Whatever a verifier (often a user's) raises speaks of this one answer.
        except Exception as error:
            return error

    def _take(self, rollout: Rollout, outcome: object) -> Rollout:
        if isinstance(outcome, _OverdueError):
            return self._fail(rollout, f"took longer than {self._timeout_s:g} s")
        try:
            if isinstance(outcome, Exception):
                raise outcome
            result = _to_result(outcome)
        except Exception as error:
            return self._fail(rollout, f"{type(error).__name__}: {error}")
        return replace(rollout, reward=result.value, reward_parts=result.parts)

    def _fail(self, rollout: Rollout, problem: str) -> Rollout:
        reason = f"verifier {self._name}: {problem}"
        return replace(rollout, status=RolloutStatus.FAILED, reward=0.0, reason=reason)


class _Threads:
    """As many threads as are ever busy at once, kept for the next group: to start one holds the event loop up.

    They are daemons, not ``asyncio.to_thread``: a verifier that never returns would keep one of the pool's few
    threads, and the interpreter would wait for it at exit.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)

    def run(self, work: Callable[[], None]) -> None:
        """Have an idle thread, or a new one, do it at once; ``work`` raises nothing."""
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._loop, name="verifier", daemon=True).start()
        self._work.put(work)

    def _loop(self) -> None:
        while True:
            self._work.get()()
            self._idle.release()


_THREADS = _Threads()


class _Calls:
    """A plain function over rollouts: in one thread while it is quick, in one more for every moment it is not."""

    def __init__(self, verify: Verifier, rollouts: Sequence[Rollout], timeout_s: float) -> None:
        self._verify = verify
        self._rollouts = rollouts
        self._timeout_s = timeout_s
        self._waiting = deque(range(len(rollouts)))
        self._started_s: dict[int, float] = {}
        self._outcomes: dict[int, object] = {}
        self._loop = asyncio.get_running_loop()
        self._is_done = asyncio.Event()

    async def run(self) -> list[object]:
        """What each call gave or raised, in order; _OverdueError for one that took too long."""
        while len(self._outcomes) < len(self._rollouts):
            if self._waiting:
                _THREADS.run(self._work)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_done.wait(), _PATIENCE_S)
            overdue_s = time.monotonic() - self._timeout_s
            for place, started_s in list(self._started_s.items()):
                if started_s < overdue_s:
                    self._outcomes.setdefault(place, _OverdueError())
        return [self._outcomes[place] for place in range(len(self._rollouts))]

    def _work(self) -> None:
        while True:
            try:
                place = self._waiting.popleft()
            except IndexError:
                return
            self._started_s[place] = time.monotonic()
            outcome: object
            try:
                outcome = self._verify(self._rollouts[place])
            except BaseException as error:
                outcome = error if isinstance(error, Exception) else RuntimeError(f"raised {type(error).__name__}")
            self._outcomes.setdefault(place, outcome)
            if len(self._outcomes) == len(self._rollouts):
                # A closed loop: nobody waits for the answer.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._is_done.set)


def _to_result(value: object) -> RewardResult:
    result = value if isinstance(value, RewardResult) else RewardResult(_to_number(value))
    parts = {name: _to_number(part) for name, part in result.parts.items()}
    return RewardResult(_to_number(result.value), parts)


def _to_number(value: object) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"gave {value!r}, not a finite number")
    return float(value)
