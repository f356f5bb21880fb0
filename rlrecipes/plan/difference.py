"""What differs between two Plans, or between any two trees of plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MISSING = "(absent)"


def flatten(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of plain data under dotted paths; lists count as leaves.

    Args:
        data: nested mappings.
        prefix: of every path.
    """
    if isinstance(data, Mapping) and data:
        for key, value in data.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, data


def compute_difference(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Paths whose values differ.

    Args:
        left: plain data.
        right: plain data.

    Returns:
        Path -> (left's value, right's value), ``MISSING`` where a side lacks it, in order of path.
    """
    first, second = dict(flatten(left)), dict(flatten(right))
    paths = sorted(first.keys() | second.keys())
    pairs = {path: (first.get(path, MISSING), second.get(path, MISSING)) for path in paths}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}
