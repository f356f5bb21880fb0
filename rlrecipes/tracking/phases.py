"""Where a run's time went, phase by phase, beside what the Plan predicted. Owns which metric is which phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlrecipes.tracking.log import MetricRecord
from rlrecipes.tracking.panels import thin

_IN_STEP = {
    "rollout": "rollout/time_s",
    "logprobs": "time/logprobs_s",
    "train": "train/time_s",
    "weight sync": "weight_sync/time_s",
}
_BESIDE = {"evaluation": "time/eval_s", "checkpoint": "time/checkpoint_s"}
_REST = "rest of the step"
_PREDICTED = {
    "rollout": "rollout_s",
    "logprobs": "logprobs_s",
    "train": "train_s",
    "weight sync": "weight_sync_s",
    "checkpoint": "checkpoint_s",
}
_LEAST_FRACTION = 0.001


@dataclass(frozen=True, slots=True)
class Phases:
    """Time per phase.

    Attributes:
        columns: of the rows; what was not predicted has none.
        rows: phase, seconds a step (an evaluation, a checkpoint), share of the run, predicted seconds; as text.
        note: what the table leaves open.
        steps: of the bars.
        bars: one a phase, ``name`` and ``values`` in seconds, one a step.
    """

    columns: list[str]
    rows: list[tuple[str, ...]]
    note: str
    steps: list[int]
    bars: list[dict[str, Any]]


def tell_phases(records: Sequence[MetricRecord], predicted: Mapping[str, Any] | None) -> Phases:
    """Split the time of every step.

    Args:
        records: of a run.
        predicted: the Plan's ``step_time``; None where it has none.
    """
    steps: dict[int, dict[str, float]] = {}
    for record in records:
        steps.setdefault(record.step, {}).update(record.metrics)
    times = {step: _split(metrics) for step, metrics in sorted(steps.items())}
    total = sum(sum(split.values()) for split in times.values()) or 1.0
    columns = ["phase", "seconds a step", "share of the run", "predicted, s"]
    rows: list[tuple[str, ...]] = []
    for phase in (*_IN_STEP, _REST, *_BESIDE):
        values = [split[phase] for split in times.values() if phase in split]
        if sum(values) > _LEAST_FRACTION * total:
            row = (phase, f"{sum(values) / len(values):.3g}", f"{sum(values) / total:.1%}")
            expected = (predicted or {}).get(_PREDICTED.get(phase, ""))
            rows.append(row if predicted is None else (*row, "" if expected is None else f"{expected:.3g}"))
    kept = thin([step for step, split in times.items() if split])
    note = "Evaluations and checkpoints: seconds of one. The rest of a step is moving memory and what has no name."
    if predicted is None:
        note += " The Plan predicts no time: it knows nothing of the machine's GPUs, or there are none."
    bars = [{"name": row[0], "values": [round(times[step].get(row[0], 0.0), 4) for step in kept]} for row in rows]
    return Phases(columns[: 3 if predicted is None else 4], rows, note, kept, bars)


def _split(metrics: Mapping[str, float]) -> dict[str, float]:
    found = {phase: metrics[name] for phase, name in {**_IN_STEP, **_BESIDE}.items() if name in metrics}
    if "time/step_s" in metrics:
        found[_REST] = max(0.0, metrics["time/step_s"] - sum(found.get(phase, 0.0) for phase in _IN_STEP))
    return found
