"""The reward that both sides of grpo_speed.py use: 1 for the label itself, else 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlrecipes.types import Rollout


def score(response: str, label: str) -> float:
    return float(response == label)


def verify(rollout: Rollout) -> float:
    return score(rollout.text, rollout.prompt.label or "")
