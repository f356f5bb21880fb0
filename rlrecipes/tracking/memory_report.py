"""Memory of GPUs as the Plan predicted it, beside what was taken of them. Owns which phases are held together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlrecipes.tracking.log import MetricRecord

_GIB = 1 << 30
_PHASES = {
    "rollout": ("rollout",),
    "logprobs": ("logprobs",),
    "train": ("train", "update"),
    "weight_sync": ("weight_sync",),
}
"""Phase that is measured -> those of the Plan that lie in it; a train step ends with its update."""


def compare_memory(
    records: Sequence[MetricRecord], predicted: Mapping[str, Any] | None
) -> tuple[list[tuple[str, str, str, str]], str]:
    """Hold the Plan's memory model against the driver's figures.

    Args:
        records: of a run.
        predicted: the Plan's ``memory``; None where it has none.

    Returns:
        Rows of phase, GiB predicted, GiB measured and their ratio, as text; and what to know about them.
    """
    rows = []
    for phase, parts in _PHASES.items():
        expected = _predict(predicted, parts)
        measured = _find_most(records, f"system/gpu_memory_{phase}_bytes")
        if expected is None and measured is None:
            continue
        ratio = f"{measured / expected - 1:+.1%}" if expected and measured else ""
        rows.append((phase, _tell(expected), _tell(measured), ratio))
    return rows, " ".join(_describe(records, predicted))


def _predict(predicted: Mapping[str, Any] | None, parts: Sequence[str]) -> float | None:
    """Of the fullest GPU."""
    roles = [role["parts"] for role in predicted["roles"]] if predicted else []
    sums = [sum(role[part].values()) for role in roles for part in parts if part in role]
    return max(sums, default=None)


def _find_most(records: Sequence[MetricRecord], name: str) -> float | None:
    return max((record.metrics[name] for record in records if name in record.metrics), default=None)


def _tell(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / _GIB:.2f}"


def _describe(records: Sequence[MetricRecord], predicted: Mapping[str, Any] | None) -> list[str]:
    told = []
    if predicted is not None:
        told.append(f"{predicted['usable_bytes'] / _GIB:.1f} GiB of a GPU are usable; the fullest GPU is told of.")
    else:
        told.append("The Plan predicts no memory: it knows nothing of the machine's GPUs, or there are none.")
    if _find_most(records, "system/gpu_memory_bytes") is None:
        told.append("No GPU was watched.")
    else:
        told.append("Measured: what the driver says is taken by all processes of the head node, twice a second.")
    host = _find_most(records, "system/memory_bytes")
    if host is not None:
        told.append(f"The head node had at most {host / _GIB:.1f} GiB of its main memory in use, by all its processes.")
    return told
