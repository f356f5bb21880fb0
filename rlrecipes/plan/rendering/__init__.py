"""A Plan for people: tables, the map of its GPUs, bars of memory, the time line of a step; on a terminal or as HTML.

Owns no facts.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from rlrecipes.plan.nodes import Plan
from rlrecipes.plan.rendering.gpu_map import build_gpu_map
from rlrecipes.plan.rendering.predictions import build_predictions
from rlrecipes.plan.rendering.tables import build_process_table, build_tables

_HTML_WIDTH = 160

__all__ = ["print_plan", "to_html"]


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print what would run, where, and what follows from the choices.

    Args:
        plan: the Plan.
        console: where; standard output by default.
    """
    console = console or Console()
    for part in _parts(plan):
        console.print(part, highlight=False)


def to_html(plan: Plan) -> str:
    """The same as one HTML page that needs nothing else.

    Args:
        plan: the Plan.
    """
    console = Console(record=True, width=_HTML_WIDTH, file=io.StringIO())
    print_plan(plan, console)
    return console.export_html(inline_styles=True)


def _parts(plan: Plan) -> Iterator[RenderableType]:
    yield Text.assemble((plan.name, "bold"), f"  plan {plan.hash}  run directory {plan.run_dir}")
    yield from build_tables(plan)
    yield from build_gpu_map(plan)
    yield from build_predictions(plan)
    yield build_process_table(plan)
    yield from (Text(f"note: {note}") for note in plan.notes)
