"""A comparison for people and programs: a table for a terminal, Markdown, JSON. Owns how values are written."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rlrecipes.tracking.compare import Comparison, Row, Value
from rlrecipes.tracking.seeds import Summary

if TYPE_CHECKING:
    from rich.table import Table

_MAX_CELL_CHARACTERS = 60
IQM = "interquartile mean"


def to_grid(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Lay the comparison out: a row a field, or a row a variant when there are more variants than fields.

    Args:
        comparison: of runs.

    Returns:
        The header and the rows, all text; long values are cut.
    """
    rows = _to_rows(comparison)
    header = ["", *(variant.label for variant in comparison.variants)]
    grid = to_cells(rows)
    if len(comparison.variants) > len(rows):
        whole = [list(column) for column in zip(header, *grid, strict=True)]
        return whole[0], whole[1:]
    return header, grid


def _to_rows(comparison: Comparison) -> list[Row]:
    return [*comparison.params, *with_interquartile_means(comparison.results), *comparison.efficiency]


def with_interquartile_means(rows: Sequence[Row]) -> list[Row]:
    """Give summaries of several seeds a second row; an interquartile mean of fewer than four is the mean.

    Args:
        rows: of results.
    """
    found: list[Row] = []
    for row in rows:
        found.append(row)
        summaries = [value if isinstance(value, Summary) else None for value in row.values]
        if any(value is not None and len(value.values) > 1 for value in summaries):
            means = tuple(None if value is None else value.interquartile_mean for value in summaries)
            found.append(Row(f"{row.field}, {IQM}", means))
    return found


def to_cells(rows: Sequence[Row]) -> list[list[str]]:
    """Rows as text, the field first.

    Args:
        rows: of a comparison.
    """
    return [[row.field, *(_to_text(value) for value in row.values)] for row in rows]


def _to_text(value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, Summary):
        interval = "" if value.low is None else f" ({_to_text(value.low)} to {_to_text(value.high)})"
        return _to_text(value.mean) + interval
    if isinstance(value, str):
        return value if len(value) <= _MAX_CELL_CHARACTERS else value[: _MAX_CELL_CHARACTERS - 3] + "..."
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def to_table(comparison: Comparison) -> Table:
    """Render for a terminal, with rich."""
    from rich.table import Table
    from rich.text import Text

    header, grid = to_grid(comparison)
    table = Table(title="what differs, what came of it, and what it took", title_justify="left")
    for index, name in enumerate(header):
        table.add_column(Text(name), overflow="fold", justify="left" if index == 0 else "right")
    num_rows = len(_to_rows(comparison))
    is_transposed = len(comparison.variants) > num_rows
    ends = {len(comparison.params) - 1, num_rows - len(comparison.efficiency) - 1}
    for index, row in enumerate(grid):
        table.add_row(*(Text(cell) for cell in row), end_section=not is_transposed and index in ends)
    return table


def describe_intervals(comparison: Comparison) -> str:
    """What brackets mean, for under a table; empty where there are none."""
    if all(len(variant.runs) == 1 for variant in comparison.variants):
        return ""
    return "in brackets: 95% interval of the mean over seeds, by the percentile bootstrap"


def to_markdown(comparison: Comparison) -> str:
    """Render as a markdown table."""
    header, grid = to_grid(comparison)
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *grid]
    text = "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
    note = describe_intervals(comparison)
    return f"{text}\n{note[0].upper()}{note[1:]}.\n" if note else text


def to_json(comparison: Comparison) -> str:
    """Render as JSON: an object a variant, whole values; not-a-number and infinities as text."""
    variants: list[dict[str, Any]] = []
    for index, variant in enumerate(comparison.variants):
        sections = {
            name: {row.field: _to_json_value(row.values[index]) for row in rows}
            for name, rows in (
                ("params", comparison.params),
                ("results", comparison.results),
                ("efficiency", comparison.efficiency),
            )
        }
        runs = [{"name": run.name, "id": run.run_id, "seed": run.params.get("seed")} for run in variant.runs]
        variants.append({"label": variant.label, "runs": runs, **sections})
    return json.dumps(variants, indent=2) + "\n"


def _to_json_value(value: Value) -> object:
    if isinstance(value, Summary):
        return asdict(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
