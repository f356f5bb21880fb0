"""`rlrecipes compare [RUN ...]`: what differs between runs and what came of it, from MLflow, with curves."""

from __future__ import annotations

from pathlib import Path

from rlrecipes.cli.flags import Parser


def _build_parser() -> Parser:
    parser = Parser(prog="rlrecipes compare", description=__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run names or MLflow ids; all runs when none is given")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where mlflow.db lies (default: runs)")
    parser.add_argument("--tracking-uri", help="an MLflow server, instead of --runs-dir")
    parser.add_argument("--experiment", help="look only there")
    parser.add_argument("--metric", action="append", help="a metric to compare; may be repeated (default: headlines)")
    parser.add_argument("--format", choices=("table", "markdown", "json"), default="table")
    parser.add_argument("--curves", type=Path, default=Path("curves.png"), help="PNG to draw (default: curves.png)")
    return parser


def run(arguments: list[str]) -> None:
    """Compare runs.

    Args:
        arguments: see ``--help``.

    Raises:
        InputError: a run, metric or database is unknown.
        RunError: MLflow does not answer.
    """
    asked = _build_parser().parse_args(arguments)
    from rlrecipes.tracking.compare import compare_runs, draw_comparison, to_json, to_markdown, to_table
    from rlrecipes.tracking.logged_runs import load_runs

    uri = asked.tracking_uri or f"sqlite:///{asked.runs_dir.absolute() / 'mlflow.db'}"
    runs = load_runs(uri, asked.runs, asked.experiment, asked.metric)
    comparison = compare_runs(runs)
    if asked.format == "json":
        print(to_json(comparison))
    elif asked.format == "markdown":
        print(to_markdown(comparison))
    else:
        from rich.console import Console

        Console().print(to_table(comparison))
    if draw_comparison(runs, asked.curves, asked.metric) and asked.format == "table":
        print(f"curves: {asked.curves}")
