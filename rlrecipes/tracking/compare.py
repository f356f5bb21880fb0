"""Comparing runs: what differs between their plans and what came of it. Owns the table and its three renderings."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING

from rlrecipes.tracking.curves import draw_curves, to_series
from rlrecipes.tracking.log import MetricRecord
from rlrecipes.tracking.logged_runs import LoggedRun
from rlrecipes.tracking.metrics import find_metric

if TYPE_CHECKING:
    from rich.table import Table

_NAMES = frozenset({"name", "run_dir", "runs_dir", "resume", "notes"})
_NAME_PREFIXES = ("provenance.", "tracking.")
"""Parameters that name a run, or say who set a value or where it is tracked: no difference in what runs."""

_SEED_IN_TEXT = re.compile(r"(seed\W{1,6})\d+")
_MAX_CELL_CHARACTERS = 60

Value = str | float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a comparison.

    Attributes:
        field: a parameter's dotted path, or a metric and which of its values.
        values: one a run; None where the run has none.
    """

    field: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs between runs.

    Attributes:
        runs: their labels; unique.
        params: parameters that differ, by path.
        results: status, steps, and the last and best value of each metric.
    """

    runs: tuple[str, ...]
    params: tuple[Row, ...]
    results: tuple[Row, ...]


def compare_runs(runs: Sequence[LoggedRun]) -> Comparison:
    """Lay runs side by side.

    Args:
        runs: one or more.

    Returns:
        What differs between their plans, and their results.
    """
    counts = Counter(run.name for run in runs)
    labels = tuple(run.name if counts[run.name] == 1 else f"{run.name} ({run.run_id[:6]})" for run in runs)
    plans = [_to_comparable(run) for run in runs]
    keys = sorted({key for plan in plans for key in plan})
    params = [
        Row(key, tuple(run.params.get(key) for run in runs))
        for key in keys
        if len({plan.get(key) for plan in plans}) > 1
    ]
    results = [
        Row("status", tuple(run.status.lower() for run in runs)),
        Row("last step", tuple(run.records[-1].step if run.records else None for run in runs)),
    ]
    for name in dict.fromkeys(name for run in runs for record in run.records for name in record.metrics):
        results += _to_result_rows(name, runs)
    return Comparison(labels, tuple(params), tuple(results))


def _to_result_rows(name: str, runs: Sequence[LoggedRun]) -> list[Row]:
    series = [list(to_series(run.records, name).values()) for run in runs]
    rows = [Row(f"{name} (last)", tuple(values[-1] if values else None for values in series))]
    entry = find_metric(name)
    if entry is not None and entry.better:
        pick = max if entry.better == "higher" else min
        finite = [[value for value in values if math.isfinite(value)] for values in series]
        rows.append(Row(f"{name} (best)", tuple(pick(values) if values else None for values in finite)))
    return rows


def group_seeds(runs: Sequence[LoggedRun]) -> dict[str, list[tuple[MetricRecord, ...]]]:
    """Put runs together that differ in nothing but seeds.

    Args:
        runs: in any order.

    Returns:
        label -> the records of each seed, as ``draw_curves`` takes them.
    """
    groups: dict[tuple[tuple[str, str], ...], list[LoggedRun]] = {}
    for run in runs:
        plan = tuple(sorted((key, value) for key, value in _to_comparable(run).items() if not _is_seed(key)))
        groups.setdefault(plan if plan else (("run_id", run.run_id),), []).append(run)
    labelled: dict[str, list[tuple[MetricRecord, ...]]] = {}
    for members in groups.values():
        label = commonprefix([run.name for run in members]).rstrip("-_. ")
        if len(members) > 1:
            label = label.removesuffix("seed").rstrip("-_. ")
        label = label or members[0].name
        if label in labelled:
            label = f"{label} ({members[0].run_id[:6]})"
        labelled[label] = [run.records for run in members]
    return labelled


def _to_comparable(run: LoggedRun) -> dict[str, str]:
    """What a run does: without names, paths inside its own directory, and seeds inside command lines."""
    run_dir = run.params.get("run_dir") or "<run_dir>"
    return {
        key: value if _is_seed(key) else _SEED_IN_TEXT.sub(r"\1<seed>", value.replace(run_dir, "<run_dir>"))
        for key, value in run.params.items()
        if key not in _NAMES and not key.startswith(_NAME_PREFIXES)
    }


def _is_seed(key: str) -> bool:
    last = key.rsplit(".", 1)[-1]
    return last == "seed" or last.endswith("_seed")


def draw_comparison(runs: Sequence[LoggedRun], path: Path, metrics: Sequence[str] | None = None) -> bool:
    """Draw the runs' curves, seeds of one plan as thin lines with their mean.

    Args:
        runs: to draw.
        path: the PNG to write.
        metrics: names, a panel each; the headlines by default.

    Returns:
        False when there was nothing to draw.
    """
    return draw_curves(group_seeds(runs), path, metrics)


def to_grid(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Lay the comparison out for people: a row a field, or a row a run when there are more runs than fields.

    Args:
        comparison: of runs.

    Returns:
        The header and the rows, all text; long values are cut.
    """
    rows = [*comparison.params, *comparison.results]
    header = ["", *comparison.runs]
    grid = [[row.field, *(_to_text(value) for value in row.values)] for row in rows]
    if len(comparison.runs) > len(rows):
        whole = [list(column) for column in zip(header, *grid, strict=True)]
        return whole[0], whole[1:]
    return header, grid


def _to_text(value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value if len(value) <= _MAX_CELL_CHARACTERS else value[: _MAX_CELL_CHARACTERS - 3] + "..."
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def to_table(comparison: Comparison) -> Table:
    """Render for a terminal, with rich."""
    from rich.table import Table
    from rich.text import Text

    header, grid = to_grid(comparison)
    table = Table(title="what differs, and what came of it", title_justify="left")
    for index, name in enumerate(header):
        table.add_column(Text(name), overflow="fold", justify="left" if index == 0 else "right")
    is_transposed = len(comparison.runs) > len(comparison.params) + len(comparison.results)
    for index, row in enumerate(grid):
        ends_params = not is_transposed and index == len(comparison.params) - 1
        table.add_row(*(Text(cell) for cell in row), end_section=ends_params)
    return table


def to_markdown(comparison: Comparison) -> str:
    """Render as a markdown table."""
    header, grid = to_grid(comparison)
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *grid]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def to_json(comparison: Comparison) -> str:
    """Render as JSON: an object a run, whole values; not-a-number and infinities as text."""
    runs: list[Mapping[str, object]] = []
    for index, label in enumerate(comparison.runs):
        params = {row.field: row.values[index] for row in comparison.params}
        results = {row.field: _to_json_value(row.values[index]) for row in comparison.results}
        runs.append({"run": label, "params": params, "results": results})
    return json.dumps(runs, indent=2) + "\n"


def _to_json_value(value: Value) -> Value:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
