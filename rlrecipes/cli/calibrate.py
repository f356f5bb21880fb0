"""`rlrecipes calibrate RUN_DIR...`: the constants of predicted step times and memory, fitted to what runs measured."""

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
from rlrecipes.plan.memory import load_memory_constants
from rlrecipes.plan.memory_fitting import (
    MemoryFit,
    MemoryMeasurement,
    MemoryObservation,
    fit_memory,
    predict_memory,
)
from rlrecipes.plan.nodes import load_plan
from rlrecipes.plan.step_inputs import read_step_inputs
from rlrecipes.plan.step_time import load_time_constants
from rlrecipes.tracking.log import MetricRecord, read_records

_PLAN, _METRICS, _MEMORY = "plan.yaml", "metrics.jsonl", "memory.jsonl"
_PLAIN_WIDTH = 140
"""Columns where there is no terminal to ask."""


def _build_parser() -> Parser:
    parser = Parser(prog="rlrecipes calibrate", description=__doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN_DIR", help="with plan.yaml, and metrics.jsonl or memory.jsonl"
    )
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
    for path in asked.runs:
        _check_is_run(path)
    measurements = [_measure(path) for path in asked.runs if (path / _METRICS).is_file()]
    found = fit(measurements, load_time_constants(None))
    runs = [run for path in asked.runs if (run := _measure_memory(path)) is not None]
    memory = fit_memory(runs, load_memory_constants(None))
    if not found.fitted and not memory.fitted:
        fix = "calibrate on runs with rollouts on GPUs, of at least two steps"
        raise InputError("rlrecipes calibrate", "these runs tell of no constant", fix)
    if asked.format == "json":
        print(json.dumps(_to_data(found, measurements, memory), indent=2))
    else:
        _print(found, measurements, memory)
    if asked.save is not None:
        changed = load_calibration().replace("time", _to_constants("time", found, [m.name for m in measurements]))
        _save(changed.replace("memory", _to_constants("memory", memory, [run.name for run in runs])), asked.save)
        print(f"saved; use it with: calibration={asked.save}", file=sys.stderr)


def _check_is_run(path: Path) -> None:
    measured = [name for name in (_METRICS, _MEMORY) if (path / name).is_file()]
    missing = _PLAN if not (path / _PLAN).is_file() else None if measured else _METRICS
    if missing is not None:
        raise InputError(str(path), f"has no {missing}", "name the directory of a run, runs/<name>")


def _measure_memory(path: Path) -> MemoryMeasurement | None:
    """What benchmarks/gpu/memory_phases.py wrote: a line of JSON a phase, with ``phase``, ``owner``, ``num_bytes``."""
    file = path / _MEMORY
    if not file.is_file():
        return None
    inputs = read_step_inputs(load_plan(path / _PLAN))
    if inputs is None:
        raise InputError(str(path), "measured memory, but its plan describes no GPU", f"remove {file.name}")
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        observed = tuple(MemoryObservation(**line) for line in lines)
        predict_memory(inputs, load_memory_constants(None), observed)
    except (ValueError, TypeError, KeyError) as error:
        fix = 'write lines like {"phase": "train", "owner": "trainer", "num_bytes": 1e9}'
        raise InputError(str(file), f"holds what is no measurement: {error}", fix) from error
    return MemoryMeasurement(str(path), inputs, observed)


def _measure(path: Path) -> Measurement:
    """Medians over the steps after the first, which also warms up."""
    plan = load_plan(path / _PLAN)
    records = [record for record in read_records(path / _METRICS) if record.step > 1]
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


def _to_constants(section: str, found: Fit | MemoryFit, names: Sequence[str]) -> dict[str, Constant]:
    shipped = load_calibration().sections[section]
    source = f"fitted: {', '.join(names)}"
    return {name: Constant(getattr(found.constants, name), shipped[name].unit, source) for name in found.fitted}


def _to_data(found: Fit, measurements: Sequence[Measurement], memory: MemoryFit) -> dict[str, object]:
    fitted = {
        name: {"old": load_calibration().values(section)[name], "new": getattr(one.constants, name)}
        for section, one in (("time", found), ("memory", memory))
        for name in one.fitted
    }
    return {
        "fitted": fitted,
        "kept": dict(found.kept),
        "residuals": [dataclasses.asdict(residual) for residual in found.residuals],
        "memory": [dataclasses.asdict(residual) for residual in memory.residuals],
        "notes": _notes(measurements),
    }


def _notes(measurements: Sequence[Measurement]) -> list[str]:
    return [
        f"{m.name}: no GPU is described in its plan, or others ran its engines: it tells of lengths alone"
        for m in measurements
        if m.inputs is None
    ]


def _print(found: Fit, measurements: Sequence[Measurement], memory: MemoryFit) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    table = Table("constant", "old", "new", "unit", title="fitted", title_justify="left", box=None)
    for section, fitted in (("time", found), ("memory", memory)):
        shipped = load_calibration().sections[section]
        for name in fitted.fitted:
            new = getattr(fitted.constants, name)
            table.add_row(name, f"{shipped[name].value:.4g}", f"{new:.4g}", shipped[name].unit)
    console.print(table)
    rows = [(r.run, r.name, r.measured, r.before, r.after) for r in found.residuals]
    rows += [(r.run, f"{r.phase}, {r.owner}: bytes", r.measured, r.before, r.after) for r in memory.residuals]
    if rows:
        columns = ("run", "what", "measured", "predicted before", "off by", "after", "off by")
        residuals = Table(*columns, title="measured and predicted", title_justify="left", box=None)
        for name, what, measured, before, after in rows:
            off = [f"{value / measured - 1:+.1%}" for value in (before, after)]
            figures = [f"{value:.4g}" for value in (measured, before, after)]
            residuals.add_row(name, what, figures[0], figures[1], off[0], figures[2], off[1])
        console.print(residuals)
    for name, reason in found.kept.items() if measurements else ():
        console.print(f"kept {name}: {reason}", highlight=False)
    for note in _notes(measurements):
        console.print(f"note: {note}", highlight=False)


def _save(calibration: Calibration, path: Path) -> None:
    try:
        path.write_text(calibration.to_yaml(), encoding="utf-8")
    except OSError as error:
        raise InputError(str(path), f"cannot be written: {error.strerror}", "name a writable file") from error
