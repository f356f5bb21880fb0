"""The answer inside a response. Owns the ways to find it; refuses to judge it."""

from __future__ import annotations

from typing import Literal

from rlrecipes.errors import ConfigError

Extraction = Literal["whole", "after_marker", "last_boxed"]
"""whole: the text, stripped. after_marker: what follows the last marker, up to the end of its line. last_boxed: the
content of the last ``\\boxed{...}``."""


def check_extraction(extraction: Extraction, marker: str) -> None:
    """Check options before a run starts.

    Raises:
        ConfigError: a marker is missing.
    """
    if extraction == "after_marker" and not marker:
        problem = "extraction after_marker needs a marker"
        raise ConfigError("reward.options.marker", problem, "set it, for example to 'Answer:'")


def extract_answer(text: str, *, extraction: Extraction, marker: str = "") -> str | None:
    """Find the answer in a response.

    Args:
        text: the response.
        extraction: where the answer stands.
        marker: for ``after_marker``.

    Returns:
        The answer without surrounding white space; None when there is none.
    """
    if extraction == "whole":
        return text.strip()
    if extraction == "after_marker":
        _, found, rest = text.rpartition(marker)
        return rest.strip().partition("\n")[0].strip() if found else None
    return _last_boxed(text)


def _last_boxed(text: str) -> str | None:
    opening = "\\boxed{"
    start = text.rfind(opening)
    if start < 0:
        return None
    start += len(opening)
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position].strip()
    return None
