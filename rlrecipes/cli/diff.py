"""`rlrecipes diff A B`: what two recipes, saved plans, run directories or MLflow runs say differently, by meaning."""

from __future__ import annotations

import dataclasses
import json
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlrecipes.cli.flags import Parser
from rlrecipes.config.compose import compose
from rlrecipes.plan.comparison import Difference, Kind, compare_plans
from rlrecipes.plan.nodes import Plan, load_plan
from rlrecipes.runner.resolution import resolve_recipe

if TYPE_CHECKING:
    from rich.table import Table

_TITLES: dict[Kind, str] = {
    "choice": "what was chosen",
    "learning": "what is learned",
    "execution": "how it is run",
    "prediction": "what is expected of it",
}
_MAX_CELL_CHARACTERS = 60


def _build_parser() -> Parser:
    parser = Parser(prog="rlrecipes diff", description=__doc__)
    what = "a saved plan, a run directory, overrides in one word ('recipe=quickstart algo=dapo'), or an MLflow run"
    parser.add_argument("left", metavar="A", help=what)
    parser.add_argument("right", metavar="B", help="the same")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where mlflow.db lies (default: runs)")
    parser.add_argument("--tracking-uri", help="an MLflow server, instead of --runs-dir")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    return parser


def run(arguments: list[str]) -> None:
    """Show what differs.

    Args:
        arguments: see ``--help``.

    Raises:
        InputError: a side is nothing of that kind, or its recipe is wrong.
    """
    asked = _build_parser().parse_args(arguments)
    uri = asked.tracking_uri or f"sqlite:///{asked.runs_dir.absolute() / 'mlflow.db'}"
    left, right = (_to_plan(word, uri) for word in (asked.left, asked.right))
    differences = compare_plans(left, right)
    if asked.format == "json":
        print(json.dumps([dataclasses.asdict(difference) for difference in differences], indent=2))
        return
    from rich.console import Console

    console = Console()
    for kind, title in _TITLES.items():
        rows = [difference for difference in differences if difference.kind == kind]
        if rows:
            console.print(_to_table(title, (asked.left, asked.right), rows))
    if not differences:
        console.print(f"no difference: both are plan {left.hash}", highlight=False)


def _to_plan(word: str, tracking_uri: str) -> Plan:
    path = Path(word)
    if path.is_dir():
        return load_plan(path / "plan.yaml")
    if path.is_file():
        return load_plan(path)
    if "=" in word or not word.strip():
        return resolve_recipe(compose(shlex.split(word)))
    from rlrecipes.tracking.logged_runs import load_artifact

    with tempfile.TemporaryDirectory() as directory:
        return load_plan(load_artifact(tracking_uri, word, "plan.yaml", Path(directory)))


def _to_table(title: str, names: tuple[str, str], rows: list[Difference]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in ("", *names):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(
            row.path, *(_to_cell(*side) for side in ((row.left, row.left_origin), (row.right, row.right_origin)))
        )
    return table


def _to_cell(value: Any, origin: str) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    shown = text if len(text) <= _MAX_CELL_CHARACTERS else text[: _MAX_CELL_CHARACTERS - 3] + "..."
    return f"{shown}\n[dim]{origin}[/dim]" if origin else shown
