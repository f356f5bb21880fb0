"""`rlrecipes compare RUN ... | --sweep X`: what differs between runs, what came of it and what it took, with curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlrecipes.cli.flags import Parser
from rlrecipes.errors import InputError

if TYPE_CHECKING:
    from rlrecipes.tracking.compare import Comparison
    from rlrecipes.tracking.logged_runs import LoggedRun


def _build_parser() -> Parser:
    parser = Parser(prog="rlrecipes compare", description=__doc__)
    words = (
        "run directories, names of those in --runs-dir, names or ids of MLflow's; all of MLflow's when none is given"
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help=words)
    sweep = "all runs of a sweep: its name, a directory that holds theirs, or the name or id of MLflow's parent run"
    parser.add_argument("--sweep", help=sweep)
    parser.add_argument(
        "--runs-dir", type=Path, default=Path("runs"), help="where runs and mlflow.db lie (default: runs)"
    )
    parser.add_argument("--tracking-uri", help="an MLflow server, instead of --runs-dir")
    parser.add_argument("--experiment", help="look only there; MLflow's runs alone")
    parser.add_argument("--metric", action="append", help="a metric to compare; may be repeated (default: headlines)")
    parser.add_argument("--format", choices=("table", "markdown", "json"), default="table")
    parser.add_argument("--curves", type=Path, default=Path("curves.png"), help="PNG to draw (default: curves.png)")
    parser.add_argument("--html", type=Path, help="also write all of it, with interactive curves, as one file to send")
    return parser


def run(arguments: list[str]) -> None:
    """Compare runs.

    Args:
        arguments: see ``--help``.

    Raises:
        InputError: a run, metric or database is unknown, or a file cannot be written.
        RunError: MLflow does not answer.
    """
    asked = _build_parser().parse_args(arguments)
    if asked.sweep is not None and asked.runs:
        raise InputError("--sweep", f"is given beside {' '.join(asked.runs)}", "give runs or a sweep")
    from rlrecipes.tracking.compare import compare_runs, draw_comparison

    uri = asked.tracking_uri or f"sqlite:///{asked.runs_dir.absolute() / 'mlflow.db'}"
    if asked.sweep is not None:
        runs = _load_sweep(asked.sweep, None if asked.tracking_uri else asked.runs_dir, uri, asked.metric)
    else:
        runs_dir = None if asked.tracking_uri or asked.experiment else asked.runs_dir
        runs = _load(asked.runs, runs_dir, uri, asked.experiment, asked.metric)
    comparison = compare_runs(runs, asked.metric)
    _print(comparison, asked.format)
    try:
        if draw_comparison(comparison, asked.curves) and asked.format == "table":
            print(f"curves: {asked.curves}")
        if asked.html is not None:
            from rlrecipes.tracking.comparison_page import write_comparison

            write_comparison(comparison, asked.html)
            if asked.format == "table":
                print(f"page: {asked.html}")
    except OSError as error:
        where = str(error.filename or asked.curves)
        raise InputError(where, f"cannot be written: {error.strerror}", "name a writable file") from error


def _load(
    words: Sequence[str], runs_dir: Path | None, uri: str, experiment: str | None, metrics: Sequence[str] | None
) -> list[LoggedRun]:
    """In the order of the words; all of MLflow's where there is none."""
    from rlrecipes.tracking.logged_runs import load_runs

    if not words:
        return load_runs(uri, (), experiment, metrics)
    found: dict[str, LoggedRun] = {}
    for word in words:
        directory = _find_directory(word, runs_dir)
        of_word = load_runs(uri, [word], experiment, metrics) if directory is None else [_read(directory)]
        found.update({one.run_id: one for one in of_word})
    return list(found.values())


def _find_directory(word: str, runs_dir: Path | None) -> Path | None:
    from rlrecipes.tracking.logged_runs import is_run_directory

    places = [Path(word)] if runs_dir is None else [Path(word), runs_dir / word]
    return next((place for place in places if is_run_directory(place)), None)


def _read(directory: Path) -> LoggedRun:
    from rlrecipes.plan.nodes import load_plan
    from rlrecipes.tracking.logged_runs import read_run

    plan = load_plan(directory / "plan.yaml")
    return read_run(directory, plan.name, plan.to_execution())


def _load_sweep(word: str, runs_dir: Path | None, uri: str, metrics: Sequence[str] | None) -> list[LoggedRun]:
    from rlrecipes.tracking.logged_runs import find_run_directories, is_run_directory, load_children
    from rlrecipes.tracking.sweeps import SWEEPS_DIR, SweepRecord

    for place in [Path(word), *([runs_dir / SWEEPS_DIR / word] if runs_dir else [])]:
        of_points = [Path(point.run_dir) for point in SweepRecord(place).read()]
        if directories := list(filter(is_run_directory, of_points)):
            return [_read(directory) for directory in directories]
    if not Path(word).is_dir():
        return load_children(uri, word, metrics)
    if not (directories := find_run_directories(Path(word))):
        raise InputError("--sweep", f"{word} holds no run", "name the directory that holds the runs' directories")
    return [_read(directory) for directory in directories]


def _print(comparison: Comparison, form: str) -> None:
    from rlrecipes.tracking.comparison_text import describe_intervals, to_json, to_markdown, to_table

    if form == "json":
        print(to_json(comparison))
    elif form == "markdown":
        print(to_markdown(comparison))
    else:
        from rich.console import Console

        console = Console()
        console.print(to_table(comparison))
        if note := describe_intervals(comparison):
            console.print(note, highlight=False)
