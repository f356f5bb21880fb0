"""Rewards of this project: each takes a rollout and gives a number."""

from __future__ import annotations

from rlrecipes.types import Rollout


def count_vowels(rollout: Rollout, *, vowels: str = "aeiou") -> float:
    """Share of an answer's letters that are vowels; 0 for an empty one.

    Args:
        rollout: ``rollout.text`` is the answer, ``rollout.prompt`` what was asked, with its label and metadata.
        vowels: letters that count; ``reward.options.vowels`` in a recipe.
    """
    return sum(letter in vowels for letter in rollout.text) / max(1, len(rollout.text))
