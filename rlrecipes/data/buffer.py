"""Groups waiting to be trained. Owns their order and their survival; refuses to decide who trains."""

from __future__ import annotations

from collections import deque
from typing import Any

from rlrecipes.data.records import to_group, to_record
from rlrecipes.errors import ContractError
from rlrecipes.types import Group


class SampleBuffer:
    """A bounded queue of groups, first in, first out.

    What is taken stays part of ``state()`` until ``confirm_trained()``: a run that dies between collecting and training
    finds its groups again, at the head of the queue.

    Args:
        max_groups: most groups that may wait, at least 1.
    """

    def __init__(self, max_groups: int) -> None:
        self.max_groups = max_groups
        self._waiting: deque[Group] = deque()
        self._taken: list[Group] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_free(self) -> int:
        """Groups that may still be put."""
        return self.max_groups - len(self._waiting)

    def put(self, group: Group) -> None:
        """Append a group.

        Raises:
            ContractError: the buffer is full.
        """
        if self.num_free < 1:
            problem = f"{self.max_groups} groups wait already"
            raise ContractError("data.buffer", problem, "take groups before putting more, or raise max_groups")
        self._waiting.append(group)

    def take(self, num_groups: int) -> list[Group]:
        """Remove the oldest groups, to be trained now.

        Args:
            num_groups: how many.

        Raises:
            ContractError: fewer wait.
        """
        if num_groups > len(self._waiting):
            problem = f"{num_groups} groups were asked for, {len(self._waiting)} wait"
            raise ContractError("data.buffer", problem, "collect more groups first")
        groups = [self._waiting.popleft() for _ in range(num_groups)]
        self._taken.extend(groups)
        return groups

    def confirm_trained(self) -> None:
        """Forget the groups taken: they have been trained."""
        self._taken.clear()

    def state(self) -> dict[str, Any]:
        """All groups not yet trained, as JSON-able data, oldest first."""
        return {"groups": [to_record(group) for group in (*self._taken, *self._waiting)]}

    def restore(self, state: dict[str, Any]) -> None:
        """Replace the content by what ``state()`` gave; groups that had been taken wait again.

        Raises:
            CheckpointError: a record is damaged or of another version.
        """
        self._waiting = deque(to_group(record) for record in state["groups"])
        self._taken = []
