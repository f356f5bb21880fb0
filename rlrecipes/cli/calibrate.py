"""`rlrecipes calibrate RUN_DIR...`: the constants of predicted step times, fitted to what runs measured."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from rlrecipes.cli.flags import Parser
from rlrecipes.errors import InputError
from rlrecipes.plan.calibration import Calibration, Constant, load_calibration
from rlrecipes.plan.fitting import METRICS, Fit, Lengths, Measurement, fit
from rlrecipes.plan.nodes import load_plan
from rlrecipes.plan.step_inputs import read_step_inputs
from rlrecipes.plan.step_time import load_time_constants
from rlrecipes.tracking.log import MetricRecord, read_records

_PLAIN_WIDTH = 140
"""Columns where there is no terminal to ask."""


def _build_parser() -> Parser:
    parser = Parser(prog="rlrecipes calibrate", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="with plan.yaml and metrics.jsonl")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the constants; calibration=FILE uses them")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    return parser


def run(arguments: list[str]) -> None:
    """Fit and print, and write a file where one is asked for.

    Args:
        arguments: see ``--help``.

    Raises:
        InputError: a run is none, nothing can be fitted, or the file cannot be written.
        ConfigError: a plan cannot be read.
    """
    asked = _build_parser().parse_args(arguments)
    measurements = [_measure(path) for path in asked.runs]
    constants = load_time_constants(None)
    found = fit(measurements, constants)
    if not found.fitted:
        fix = "calibrate on runs with rollouts on GPUs, of at least two steps"
        raise InputError("rlrecipes calibrate", "these runs tell of no constant", fix)
    changed = _to_constants(found, measurements)
    if asked.format == "json":
        print(json.dumps(_to_data(found, measurements), indent=2))
    else:
        _print(found, measurements)
    if asked.save is not None:
        _save(load_calibration().replace("time", changed), asked.save)
        print(f"saved; use it with: calibration={asked.save}", file=sys.stderr)


def _measure(path: Path) -> Measurement:
    """Medians over the steps after the first, which also warms up."""
    plan_path, metrics_path = path / "plan.yaml", path / "metrics.jsonl"
    missing = next((file for file in (plan_path, metrics_path) if not file.is_file()), None)
    if missing is not None:
        raise InputError(str(path), f"has no {missing.name}", "name the directory of a run, runs/<name>")
    plan = load_plan(plan_path)
    records = [record for record in read_records(metrics_path) if record.step > 1]
    observed = {name: value for name, metric in METRICS.items() if (value := _median(records, metric)) is not None}
    idle = _median(records, "train/forward_only_fraction") or 0.0
    if "train_s" in observed:
        observed["train_s"] /= 1 - idle * 2 / 3  # what goes forward only costs a third; a Plan assumes that none does
    if (_median(records, "rollout/num_filtered_groups") or 0.0) > 0:
        observed.pop("rollout_s", None)  # more was generated than the step kept
    return Measurement(
        name=str(path),
        inputs=read_step_inputs(plan),
        observed=observed,
        lengths=_read_lengths(records),
        max_new_tokens=plan.rollout.generate.compute_response_tokens(plan.rollout.sampling.max_new_tokens),
        max_prompt_tokens=plan.data.max_prompt_tokens,
    )


def _values(records: Sequence[MetricRecord], name: str) -> list[float]:
    return [value for record in records if math.isfinite(value := record.metrics.get(name, math.nan))]


def _median(records: Sequence[MetricRecord], name: str) -> float | None:
    values = _values(records, name)
    return median(values) if values else None


def _read_lengths(records: Sequence[MetricRecord]) -> Lengths | None:
    names = {
        "prompt_tokens": "prompt/mean_tokens",
        "mean_tokens": "response/mean_tokens",
        "max_tokens": "response/max_tokens",
        "truncated_fraction": "response/truncated_fraction",
        "num_rollouts": "rollout/num_rollouts",
    }
    found = {field: _values(records, metric) for field, metric in names.items()}
    if not all(found.values()):
        return None
    means = {field: fmean(values) for field, values in found.items()}
    return Lengths(**means) if means["mean_tokens"] >= 1 and means["prompt_tokens"] >= 1 else None


def _to_constants(found: Fit, measurements: Sequence[Measurement]) -> dict[str, Constant]:
    shipped = load_calibration().sections["time"]
    source = f"fitted: {', '.join(m.name for m in measurements)}"
    return {name: Constant(getattr(found.constants, name), shipped[name].unit, source) for name in found.fitted}


def _to_data(found: Fit, measurements: Sequence[Measurement]) -> dict[str, object]:
    shipped = load_calibration().values("time")
    return {
        "fitted": {name: {"old": shipped[name], "new": getattr(found.constants, name)} for name in found.fitted},
        "kept": dict(found.kept),
        "residuals": [dataclasses.asdict(residual) for residual in found.residuals],
        "notes": _notes(measurements),
    }


def _notes(measurements: Sequence[Measurement]) -> list[str]:
    return [
        f"{m.name}: no GPU is described in its plan, or others ran its engines: it tells of lengths alone"
        for m in measurements
        if m.inputs is None
    ]


def _print(found: Fit, measurements: Sequence[Measurement]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    shipped = load_calibration().sections["time"]
    table = Table("constant", "old", "new", "unit", title="fitted", title_justify="left", box=None)
    for name in found.fitted:
        table.add_row(name, f"{shipped[name].value:.4g}", f"{getattr(found.constants, name):.4g}", shipped[name].unit)
    console.print(table)
    if found.residuals:
        columns = ("run", "what", "measured", "predicted before", "off by", "after", "off by")
        residuals = Table(*columns, title="measured and predicted", title_justify="left", box=None)
        for one in found.residuals:
            off = [f"{value / one.measured - 1:+.1%}" for value in (one.before, one.after)]
            figures = [f"{value:.4g}" for value in (one.measured, one.before, one.after)]
            residuals.add_row(one.run, one.name, figures[0], figures[1], off[0], figures[2], off[1])
        console.print(residuals)
    for name, reason in found.kept.items():
        console.print(f"kept {name}: {reason}", highlight=False)
    for note in _notes(measurements):
        console.print(f"note: {note}", highlight=False)


def _save(calibration: Calibration, path: Path) -> None:
    try:
        path.write_text(calibration.to_yaml(), encoding="utf-8")
    except OSError as error:
        raise InputError(str(path), f"cannot be written: {error.strerror}", "name a writable file") from error
