"""Curves as data for a page: the interactive twin of curves.py. Owns thinning and the choice of x axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlrecipes.tracking.curves import compute_mean, to_series
from rlrecipes.tracking.efficiency import AXES, Axis, compute_axes
from rlrecipes.tracking.log import MetricRecord
from rlrecipes.tracking.metrics import find_metric

MAX_POINTS = 1000
"""Of one curve; more cannot be told apart on a screen, and would make pages of long runs heavy."""

Points = Mapping[int, float]


class PanelBuilder:
    """Turns metrics of runs into panels: one a metric, one curve a run, a thick one for the mean of several seeds.

    Args:
        runs: label -> one list of records a seed.
    """

    def __init__(self, runs: Mapping[str, Sequence[Sequence[MetricRecord]]]) -> None:
        self._runs = runs
        self._axes = {label: [compute_axes(records) for records in seeds] for label, seeds in runs.items()}

    def build(self, name: str) -> dict[str, Any]:
        """One panel, as templates/page.js draws it.

        Args:
            name: of a metric.

        Returns:
            Plain data; ``traces`` is empty where no run logged the metric.
        """
        entry = find_metric(name)
        traces: list[dict[str, Any]] = []
        for number, (label, seeds) in enumerate(self._runs.items()):
            series = [to_series(records, name) for records in seeds]
            found = [(points, axes) for points, axes in zip(series, self._axes[label], strict=True) if points]
            is_alone = len(found) == 1
            for points, axes in found:
                traces.append(_to_trace(label, number, points, axes, "alone" if is_alone else "seed"))
            if len(found) > 1:
                mean = compute_mean([points for points, _ in found])
                mean_axes = {
                    step: {axis: sum(axes[step][axis] for _, axes in found) / len(found) for axis in AXES}
                    for step in mean
                }
                traces.append(_to_trace(f"{label}, mean of {len(found)}", number, mean, mean_axes, "mean"))
        return {
            "name": name,
            "unit": "" if entry is None or entry.unit == "1" else entry.unit,
            "explanation": "" if entry is None else f"{entry.explanation}; {entry.reading}",
            "traces": traces,
        }


def _to_trace(
    label: str, number: int, points: Points, axes: Mapping[int, Mapping[Axis, float]], kind: str
) -> dict[str, Any]:
    steps = thin(list(points))
    return {
        "label": label,
        "number": number,
        "kind": kind,
        "x": {axis: [_round(axes[step][axis]) for step in steps] for axis in AXES},
        "y": [_round(points[step]) for step in steps],
    }


def thin(steps: Sequence[int]) -> list[int]:
    """At most about ``MAX_POINTS`` of the steps, evenly, the last included.

    Args:
        steps: in order.
    """
    stride = max(1, math.ceil(len(steps) / MAX_POINTS))
    kept = list(steps[::stride])
    return kept if not steps or kept[-1] == steps[-1] else [*kept, steps[-1]]


def _round(value: float) -> float | None:
    """What a screen can show; JSON has no infinity, and a gap shows it best."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
