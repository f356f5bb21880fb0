"""Failures that every rank must learn of. Owns the exchange; refuses to guess whose fault it was."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from rlrecipes.errors import CheckpointError


def run_together(where: str, fix: str, action: Callable[[], None]) -> None:
    """Run an action without collectives here, then learn how it went on every rank; also a barrier.

    Args:
        where: what is written or read.
        fix: what to do when it fails.
        action: this rank's part.

    Raises:
        CheckpointError: it failed on any rank; raised on all of them.
    """
    failure: Exception | None = None
    try:
        action()
    except Exception as error:  # whatever it is, the others must not wait for this rank
        failure = error
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, None if failure is None else f"{type(failure).__name__}: {failure}")
    told = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None]
    if told:
        raise CheckpointError(where, "; ".join(told), fix) from failure
