"""Prompts in, rewarded groups out. Owns which prompts are asked next and that none is trained twice or skipped."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlrecipes.errors import CheckpointError, ContractError, RunError
from rlrecipes.rollout.filters import Filter
from rlrecipes.rollout.groups import FailureTally, GroupGenerator, cancel_all
from rlrecipes.rollout.protocols import GroupBuffer, PromptSource
from rlrecipes.types import Group

MAX_PROMPTS_PER_GROUP = 32
"""Prompts asked for one group kept, on the mean of a step, before filters that drop nearly everything stop the run."""


@dataclass(frozen=True, slots=True)
class CollectProgress:
    """Where a collection stands.

    Attributes:
        num_groups: groups ready.
        num_wanted_groups: groups asked for.
        num_tokens: response tokens generated so far, dropped groups included.
        mean_reward: over the rollouts of the groups that came back so far, dropped ones included.
        elapsed_s: since the start.
    """

    num_groups: int
    num_wanted_groups: int
    num_tokens: int
    mean_reward: float
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Collection:
    """What one step trains, and what was asked for it.

    Attributes:
        groups: in order of their prompts.
        num_filtered: reason -> groups dropped for it.
        num_tokens: response tokens generated for it, dropped groups included, groups kept by a restart not.
        duration_s: wall-clock seconds it took.
        dropped: groups that filters dropped, in order of their prompts; those dropped before a restart are not here.
    """

    groups: tuple[Group, ...]
    num_filtered: Mapping[str, int]
    num_tokens: int
    duration_s: float
    dropped: tuple[Group, ...] = ()


type OnProgress = Callable[[CollectProgress], None]


class Collector:
    """Asks prompt after prompt and gathers their groups.

    A prompt is *open* from when it is asked until its group is dropped by a filter or lies in the buffer; it leaves the
    buffer's state when ``confirm_trained`` is called. ``state()`` therefore names every prompt that was asked and not
    settled: ``restore()`` asks the open ones again and keeps the buffered ones.

    ``collect`` asks exactly as many prompts as are needed: every dropped group is replaced by the next prompt. Which
    prompts end up trained depends on their rewards only, never on who finishes first.

    Cancelling ``collect`` cancels all requests, waits for their end, and leaves a valid state.

    Args:
        generator: makes the group of a prompt.
        source: the endless stream of prompts.
        buffer: where finished groups wait.
        max_concurrent_requests: rollouts running at once.
        filters: decide which groups are kept.
        max_failed_fraction: more failed rollouts than this in a step stop the run.
    """

    def __init__(
        self,
        generator: GroupGenerator,
        *,
        source: PromptSource,
        buffer: GroupBuffer,
        max_concurrent_requests: int,
        filters: Sequence[Filter],
        max_failed_fraction: float,
    ) -> None:
        self._generator = generator
        self._source = source
        self._buffer = buffer
        self._max_concurrent_requests = max_concurrent_requests
        self._filters = filters
        self._max_failed_fraction = max_failed_fraction
        self._next_index = 0
        self._open: set[int] = set()

    async def collect(self, num_groups: int, on_progress: OnProgress | None = None) -> Collection:
        """Collect the groups of one step.

        Args:
            num_groups: how many.
            on_progress: called after every group that comes back.

        Returns:
            Exactly ``num_groups`` groups.

        Raises:
            EngineError: too many rollouts failed.
            RunError: the filters drop nearly everything.
            ContractError: the buffer is smaller than ``num_groups``, or a part broke its protocol.
        """
        if num_groups > self._buffer.max_groups:
            problem = f"{num_groups} groups do not fit into a buffer of {self._buffer.max_groups}"
            raise ContractError("rollout.collector", problem, "build the buffer for the groups of a step")
        pass_ = _Pass(num_groups, FailureTally(num_groups * self._generator.group_size, self._max_failed_fraction))
        again = deque(sorted(self._open))
        slots = asyncio.Semaphore(self._max_concurrent_requests)
        running: set[asyncio.Task[Group]] = set()
        try:
            while True:
                while len(self._buffer) + len(running) < num_groups:
                    pass_.count_prompt(len(self._buffer))
                    index = again.popleft() if again else self._take_index()
                    running.add(asyncio.create_task(self._generator.run(self._source.prompt(index), slots)))
                if not running:
                    break
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for group in _sort(task.result() for task in done):
                    self._settle(group, pass_)
                    if on_progress is not None:
                        on_progress(pass_.to_progress(len(self._buffer)))
        finally:
            await cancel_all(running)
        groups, dropped = _sort(self._buffer.take(num_groups)), _sort(pass_.dropped)
        return Collection(groups, dict(pass_.num_filtered), pass_.num_tokens, pass_.elapsed_s, dropped)

    def _take_index(self) -> int:
        index = self._next_index
        self._next_index += 1
        self._open.add(index)
        return index

    def _settle(self, group: Group, pass_: _Pass) -> None:
        reason = next((why for keep, why in (judge(group) for judge in self._filters) if not keep), None)
        if reason is None:
            self._buffer.put(group)
        else:
            pass_.drop(group, reason)
        self._open.discard(group.prompt.index)
        pass_.add(group)

    @property
    def num_waiting_groups(self) -> int:
        """Groups collected beyond those handed out."""
        return len(self._buffer)

    def confirm_trained(self) -> None:
        """Say that every group collected so far has been trained; call it before saving the state after a step."""
        self._buffer.confirm_trained()

    def state(self) -> dict[str, Any]:
        """Everything needed to go on, as JSON-able data; valid at any moment between awaits."""
        return {"next_index": self._next_index, "open": sorted(self._open), "buffer": self._buffer.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what ``state()`` gave.

        Raises:
            CheckpointError: it is not such a state.
        """
        try:
            next_index, open_indices = int(state["next_index"]), {int(index) for index in state["open"]}
            self._buffer.restore(state["buffer"])
        except (KeyError, TypeError, ValueError) as error:
            problem = f"the collector's state is damaged: {type(error).__name__}: {error}"
            raise CheckpointError("rollout.collector", problem, "resume from an earlier checkpoint") from error
        self._next_index, self._open = next_index, open_indices


def _sort(groups: Iterable[Group]) -> tuple[Group, ...]:
    return tuple(sorted(groups, key=lambda group: group.prompt.index))


class _Pass:
    """The counts of one call of ``collect``, and the groups it dropped."""

    def __init__(self, num_groups: int, failures: FailureTally) -> None:
        self.num_filtered: Counter[str] = Counter()
        self.dropped: list[Group] = []
        self.num_tokens = 0
        self._num_groups = num_groups
        self._failures = failures
        self._rewards: list[float] = []
        self._num_prompts = 0
        self._started_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def count_prompt(self, num_ready: int) -> None:
        self._num_prompts += 1
        if self._num_prompts > MAX_PROMPTS_PER_GROUP * self._num_groups:
            reason, count = self.num_filtered.most_common(1)[0]
            problem = (
                f"{self._num_prompts - 1} prompts gave only {num_ready} of {self._num_groups} groups;"
                f" filters dropped {count} for {reason}"
            )
            raise RunError("rollout.filters", problem, "take easier or harder prompts, or fewer filters")

    def drop(self, group: Group, reason: str) -> None:
        self.num_filtered[reason] += 1
        self.dropped.append(group)

    def add(self, group: Group) -> None:
        self.num_tokens += sum(rollout.num_response_tokens for rollout in group.rollouts)
        self._rewards += [rollout.reward or 0.0 for rollout in group.rollouts]
        self._failures.add(group)

    def to_progress(self, num_ready: int) -> CollectProgress:
        return CollectProgress(
            num_groups=num_ready,
            num_wanted_groups=self._num_groups,
            num_tokens=self.num_tokens,
            mean_reward=sum(self._rewards) / len(self._rewards),
            elapsed_s=self.elapsed_s,
        )
