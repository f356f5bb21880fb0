"""A number to be guessed, told higher or lower: an environment and its reward.

    rlrecipes train data=jsonl ... rollout=multi_turn rollout.generate.max_turns=6
        rollout.generate.environment.name=guessing_game:answer_guess '~rollout.generate.environment.options.feedback'
        reward.name=guessing_game:reward_guess

with this file's directory on PYTHONPATH. Prompts ask for a number; their label is the number.
"""

from __future__ import annotations

import re
from typing import Any


def answer_guess(episode: Any, *, higher: str = "higher", lower: str = "lower") -> str | None:
    """Say where the number lies; over once it is found.

    Args:
        episode: a ``rlrecipes.rollout.environments.Episode``.
        higher: shown when the guess is too small, or when there is none.
        lower: shown when it is too large.
    """
    number, guess = int(episode.rollout.prompt.label), read_guess(episode.answers[-1])
    if guess == number:
        return None
    return lower if guess is not None and guess > number else higher


def reward_guess(rollout: Any) -> float:
    """1 for the number at the first guess, less for every further one; 0 when it was not found.

    Args:
        rollout: a ``rlrecipes.types.Rollout``; its text is the last answer.
    """
    return 1.0 / len(rollout.turns) if read_guess(rollout.text) == int(rollout.prompt.label) else 0.0


def read_guess(text: str) -> int | None:
    """The last number in an answer."""
    numbers = re.findall(r"-?\d+", text)
    return int(numbers[-1]) if numbers else None
