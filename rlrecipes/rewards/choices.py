"""Multiple-choice answers. Owns how a letter is found in a response."""

from __future__ import annotations

import re

from rlrecipes.errors import ConfigError
from rlrecipes.rewards.verifiers import Verifier
from rlrecipes.types import Rollout


def build_choice_verifier(*, letters: str = "ABCD") -> Verifier:
    """Build a verifier giving 1.0 when the chosen letter is the label.

    The choice is the letter boxed last; else the one that follows the last "answer is" or "answer:"; else the last
    letter that stands alone.

    Args:
        letters: the letters of the choices, upper case.

    Raises:
        ConfigError: ``letters`` is not made of different upper-case letters.
    """
    if not re.fullmatch(r"[A-Z]+", letters) or len(set(letters)) != len(letters):
        problem = f"{letters!r} is not a row of different upper-case letters"
        raise ConfigError("reward.options.letters", problem, "write for example 'ABCDE'")

    def verify(rollout: Rollout) -> float:
        label = (rollout.prompt.label or "").strip().strip("()").upper()
        if len(label) != 1 or label not in letters:
            raise ValueError(f"the label {rollout.prompt.label!r} is none of {letters}")
        return float(find_choice(rollout.text, letters) == label)

    return verify


def find_choice(text: str, letters: str) -> str | None:
    """Find the letter a response chose; None when it chose none.

    Args:
        text: the response.
        letters: the letters of the choices, upper case.
    """
    patterns = (
        rf"\\boxed\{{\s*\(?([{letters}])\)?\s*\}}",
        rf"(?i:answer(?:\s+is)?)\s*:?\s*\**\(?([{letters}])\b",
        rf"(?<![A-Za-z])([{letters}])(?![A-Za-z'])",
    )
    for pattern in patterns:
        found = re.findall(pattern, text)
        if found:
            return str(found[-1])
    return None
