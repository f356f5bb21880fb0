"""Did-you-mean: the nearest right spelling. Owns the search and the wording, so that every room words it alike."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MOST_LISTED = 40


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The choice most like ``word``, or None when nothing is near.

    Args:
        word: what was written.
        choices: what is allowed.
        cutoff: least likeness, 0 to 1.
    """
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=cutoff)
    return found[0] if found else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A fix line: the nearest choice first, then all of them when they are few.

    Args:
        word: what was written.
        choices: what is allowed.
    """
    options = sorted(set(choices))
    near = nearest(word, options)
    listed = ", ".join(options) if len(options) <= _MOST_LISTED else f"{len(options)} choices"
    return f"did you mean {near!r}? allowed: {listed}" if near else f"allowed: {listed or 'nothing'}"
