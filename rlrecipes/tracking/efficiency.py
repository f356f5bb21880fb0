"""What a run spent: rollouts, tokens, hours, GPU hours and their price, step by step. Owns the sums over records."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlrecipes.tracking.log import MetricRecord

Axis = Literal["step", "rollouts", "tokens", "hours"]
AXES: Mapping[Axis, tuple[str, ...]] = {
    "step": (),
    "rollouts": ("rollout/num_rollouts",),
    "tokens": ("train/num_tokens",),
    "hours": ("time/step_s", "time/eval_s", "time/checkpoint_s"),
}
"""What a curve may be drawn against -> the metrics whose sum it is: rollouts handed to training, tokens trained on
(prompts included), and hours at work, in which no time between a stop and a resume is counted."""
AXIS_METRICS = tuple(name for names in AXES.values() for name in names)

_DEVICE = re.compile(r"(?:.+\.)?(?:devices|reserved)\.\d+")


def compute_axes(records: Sequence[MetricRecord]) -> dict[int, dict[Axis, float]]:
    """Sum up what a run had spent after each step.

    Args:
        records: of one run, oldest first.

    Returns:
        step -> axis -> sum up to the end of that step, its evaluation and checkpoint included.
    """
    steps: dict[int, dict[str, float]] = {}
    for record in records:
        steps.setdefault(record.step, {}).update(record.metrics)
    sums: dict[Axis, float] = dict.fromkeys(AXES, 0.0)
    found: dict[int, dict[Axis, float]] = {}
    for step in sorted(steps):
        for axis, names in AXES.items():
            sums[axis] += sum(steps[step].get(name, 0.0) for name in names) / (3600 if axis == "hours" else 1)
        found[step] = {**sums, "step": float(step)}
    return found


@dataclass(frozen=True, slots=True)
class Price:
    """What an hour of a run costs.

    Attributes:
        num_gpus: that its processes hold or keep free; 0 on CPUs.
        gpu_hour: price of one GPU for an hour, in the recipe's currency; None where the recipe names none.
    """

    num_gpus: int
    gpu_hour: float | None

    def compute_cost(self, hours: float) -> float | None:
        """The price of some hours; None where it is not known, or there are no GPUs to pay for."""
        return None if self.gpu_hour is None or not self.num_gpus else hours * self.num_gpus * self.gpu_hour


def read_price(params: Mapping[str, str]) -> Price:
    """Read from a Plan's parameters how many GPUs it holds and what they cost.

    Args:
        params: dotted path -> value as text.
    """
    gpus = set()
    for path, node in params.items():
        prefix, _, last = path.rpartition(".")
        gpu = params.get(f"{prefix}.gpu", "null")
        if last == "node" and _DEVICE.fullmatch(prefix) and gpu != "null":
            gpus.add((node, gpu))
    price = params.get("cluster.gpu_hour_price", "null")
    return Price(len(gpus), None if price == "null" else float(json.loads(price)))
