"""What a verifier is, and what it gives. Owns the contract; the verifiers themselves have files of their own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from rlrecipes.types import Rollout


@dataclass(frozen=True, slots=True)
class RewardResult:
    """What one rollout is worth.

    Attributes:
        value: the reward; 1 or more counts as right in evaluations.
        parts: named parts of it, for metrics.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


type Verifier = Callable[[Rollout], RewardResult | float | Awaitable[RewardResult | float]]
"""Judges one finished rollout. A plain function runs in a thread of its own, several at a time, so it must not change
shared state; a coroutine function runs on the event loop and must not block it."""
