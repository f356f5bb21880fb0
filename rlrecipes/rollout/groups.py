"""One group: its rollouts side by side, then their reward. Owns the concurrency of requests and the failure limit."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlrecipes.errors import ContractError, EngineError
from rlrecipes.rollout.protocols import GenerateFunction, Reward
from rlrecipes.types import Group, Prompt, Rollout, RolloutStatus


@dataclass(frozen=True, slots=True)
class GroupGenerator:
    """Makes rewarded groups.

    Attributes:
        generate: runs one rollout.
        reward: rewards the group.
        group_size: rollouts per prompt.
    """

    generate: GenerateFunction
    reward: Reward
    group_size: int

    async def run(self, prompt: Prompt, slots: asyncio.Semaphore) -> Group:
        """Generate and score the group of one prompt.

        Args:
            prompt: what to ask.
            slots: one is held by each running rollout, none while rewarding.

        Returns:
            The group, rewarded; failures inside it are data.

        Raises:
            ContractError: the reward left a rollout without one, or changed their number or order.
        """

        async def run_one(sibling: int) -> Rollout:
            async with slots:
                return await self.generate(prompt, sibling)

        rollouts = await run_together(run_one(sibling) for sibling in range(self.group_size))
        group = await self.reward.reward_group(Group(prompt, tuple(rollouts)))
        if [rollout.sibling for rollout in group.rollouts] != [rollout.sibling for rollout in rollouts]:
            problem = f"the reward returned other rollouts than it got for prompt {prompt.index}"
            raise ContractError("rewards", problem, "return the same rollouts in the same order")
        if any(rollout.reward is None for rollout in group.rollouts):
            raise ContractError("rewards", f"prompt {prompt.index} has rollouts without reward", "score every rollout")
        return group


async def run_together[T](awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Await all at once; when one raises or the caller is cancelled, cancel the others and wait for their end.

    Args:
        awaitables: what to await.

    Returns:
        Their results in order.
    """
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until each has ended, whatever it ends with."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def is_answered(rollout: Rollout) -> bool:
    """Whether a rollout has an answer that can be trained: neither failed nor aborted."""
    return rollout.status in (RolloutStatus.COMPLETED, RolloutStatus.TRUNCATED)


def check_weight_version(groups: Sequence[Group], weight_version: int) -> None:
    """Refuse answers of an engine that the last weight sync did not reach.

    Args:
        groups: asked since that sync.
        weight_version: that it brought.

    Raises:
        EngineError: an engine answered with other weights.
    """
    turns = (turn for group in groups for rollout in group.rollouts for turn in rollout.turns)
    for found in (turn.completion.weight_version for turn in turns):
        if found not in (weight_version, -1):  # -1: aborted before an engine began it
            problem = f"an engine answered with weights of version {found}; the last sync brought {weight_version}"
            fix = (
                "it joined its router after the run began, or was restarted: rerun the same command, which sends the"
                " weights to every engine, after correcting num_joining_engines if it joined late"
            )
            raise EngineError("rollout", problem, fix)


class FailureTally:
    """Counts failed rollouts and stops a step that has too many.

    Args:
        num_expected: rollouts the step wants; more may run when groups are replaced.
        max_failed_fraction: more than this part of them stops the run.
    """

    def __init__(self, num_expected: int, max_failed_fraction: float) -> None:
        self._num_expected = num_expected
        self._max_failed_fraction = max_failed_fraction
        self._reasons: Counter[str] = Counter()
        self._num_rollouts = 0

    @property
    def num_failed(self) -> int:
        """Failed rollouts seen."""
        return self._reasons.total()

    def add(self, group: Group) -> None:
        """Count the rollouts of a group.

        Raises:
            EngineError: more have failed than the limit allows, or all that were expected.
        """
        self._num_rollouts += len(group.rollouts)
        self._reasons.update(rollout.reason for rollout in group.rollouts if rollout.status is RolloutStatus.FAILED)
        num_expected = max(self._num_expected, self._num_rollouts)
        if self.num_failed > self._max_failed_fraction * num_expected or self.num_failed == num_expected:
            reason, count = self._reasons.most_common(1)[0]
            problem = (
                f"{self.num_failed} of {num_expected} rollouts failed, more than"
                f" rollout.max_failed_fraction={self._max_failed_fraction:g} allows; most often ({count}): {reason}"
            )
            raise EngineError("rollout", problem, "see the logs of the engines and of the reward; then resume")
