"""Curves of metrics as a PNG. Owns the picture; refuses to know where the records came from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlrecipes.tracking.efficiency import AXES, Axis, compute_axes
from rlrecipes.tracking.log import MetricRecord
from rlrecipes.tracking.metrics import find_metric

HEADLINES = (
    "reward/mean",
    "eval/<dataset>/accuracy",
    "response/mean_tokens",
    "rollout/zero_variance_fraction",
    "train/entropy",
    "train/ref_kl",
    "sft/loss",
    "time/step_s",
)
"""The metrics and families people look at first; drawn when nothing else is asked for."""

_NUM_COLUMNS = 2
_MAX_MARKED_POINTS = 40


def choose_headlines(names: Sequence[str]) -> list[str]:
    """Pick the metrics to look at first.

    Args:
        names: of the metrics that were logged.

    Returns:
        Those of ``HEADLINES``, in its order.
    """
    found = {name: metric.name for name in sorted(set(names)) if (metric := find_metric(name)) is not None}
    return [name for headline in HEADLINES for name, entry in found.items() if entry == headline]


def to_series(records: Sequence[MetricRecord], name: str) -> dict[int, float]:
    """One metric over steps; a step logged twice has its later value.

    Args:
        records: of one run, oldest first.
        name: of the metric.

    Returns:
        step -> value, by step.
    """
    values = {record.step: record.metrics[name] for record in records if name in record.metrics}
    return dict(sorted(values.items()))


def draw_curves(
    runs: Mapping[str, Sequence[Sequence[MetricRecord]]],
    path: Path,
    metrics: Sequence[str] | None = None,
    spent_by: str | None = None,
) -> bool:
    """Draw one panel a metric: each seed as a thin line, the mean of several as a thick one.

    Args:
        runs: label -> one list of records a seed.
        path: the PNG to write.
        metrics: names, a panel each; the headlines that were logged by default.
        spent_by: a metric that is drawn against rollouts, tokens and hours too.

    Returns:
        False when there was nothing to draw, and nothing was written.
    """
    if metrics is None:
        metrics = choose_headlines(
            [n for seeds in runs.values() for records in seeds for r in records for n in r.metrics]
        )
    if not metrics:
        return False
    from matplotlib.figure import Figure

    drawn: list[tuple[str, Axis]] = [(name, "step") for name in metrics]
    if spent_by is not None:
        drawn += [(spent_by, axis) for axis in AXES if axis != "step" and _is_spent(runs, axis)]
    num_rows = math.ceil(len(drawn) / _NUM_COLUMNS)
    num_columns = min(_NUM_COLUMNS, len(drawn))
    figure = Figure(figsize=(5.6 * num_columns, 3.2 * num_rows + 0.5), dpi=110, layout="constrained")
    panels = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for panel, (name, axis) in zip(panels, drawn, strict=False):
        _draw_panel(panel, runs, name, axis)
    for panel in panels[len(drawn) :]:
        panel.set_visible(False)
    handles: dict[str, Any] = {}
    for panel in panels:
        for line, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, line)
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, format="png")
    return True


def _is_spent(runs: Mapping[str, Sequence[Sequence[MetricRecord]]], axis: Axis) -> bool:
    names = AXES[axis]
    return any(
        name in record.metrics for seeds in runs.values() for records in seeds for record in records for name in names
    )


def _draw_panel(panel: Any, runs: Mapping[str, Sequence[Sequence[MetricRecord]]], name: str, axis: Axis) -> None:
    entry = find_metric(name)
    for index, (label, seeds) in enumerate(runs.items()):
        color = f"C{index % 10}"
        found = [(points, compute_axes(records)) for records in seeds if (points := to_series(records, name))]
        for points, axes in found:
            is_alone = len(found) == 1
            panel.plot(
                [axes[step][axis] for step in points],
                [value if math.isfinite(value) else math.nan for value in points.values()],
                color=color,
                linewidth=1.8 if is_alone else 0.8,
                alpha=1.0 if is_alone else 0.45,
                marker="o" if is_alone and len(points) <= _MAX_MARKED_POINTS else None,
                markersize=3,
                label=label if is_alone else None,
            )
        if len(found) > 1:
            mean = compute_mean([points for points, _ in found])
            spent = [sum(axes[step][axis] for _, axes in found) / len(found) for step in mean]
            panel.plot(spent, list(mean.values()), color=color, linewidth=2.2, label=f"{label}, mean of {len(found)}")
    panel.set_title(name, fontsize=11)
    panel.set_xlabel(axis)
    panel.set_ylabel("" if entry is None or entry.unit == "1" else entry.unit)
    panel.grid(alpha=0.25)
    if axis == "step":
        panel.xaxis.get_major_locator().set_params(integer=True)
    panel.spines[["top", "right"]].set_visible(False)


def compute_mean(series: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Mean over seeds, at the steps that every seed has.

    Args:
        series: step -> value, one a seed.

    Returns:
        step -> mean.
    """
    steps = sorted(set.intersection(*(set(found) for found in series)))
    return {step: sum(found[step] for found in series) / len(series) for step in steps}
