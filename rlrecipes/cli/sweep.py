"""`rlrecipes train -m ...`: every point is composed and judged before the first one runs; a failing one stops no other.

Run again, the same command goes on: finished points are skipped, the others resume.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlrecipes.cli.run import describe_failure, run_and_tell, tell_mlflow
from rlrecipes.config.compose import ComposedRecipe, compose, config_dirs_of, run_hydra_app
from rlrecipes.errors import ConfigError, InputError, Interrupted, Problem, RunError
from rlrecipes.plan.nodes import Plan
from rlrecipes.runner.faults import StopRequest
from rlrecipes.runner.resolution import resolve_recipe
from rlrecipes.tracking.sweeps import Point, PointState, SweepRecord, find_sweep

if TYPE_CHECKING:
    from rich.table import Table

_STOP = StopRequest()
"""Of this process, where joblib runs points: the one that waits for its workers, or a worker."""
_FIX = "mend it and rerun the same command: finished points are skipped"


def run_sweep(arguments: Sequence[str], shared: Sequence[str]) -> None:
    """Run every point of a sweep that has not finished yet, and show how all of them stand.

    Args:
        arguments: the command line after the verb.
        shared: its overrides that all points share.

    Raises:
        ConfigError: every problem of every point; nothing was started.
        RunError: points failed; the others ran.
        Interrupted: a signal stopped it.
    """
    base = _resolve_base(arguments, shared)
    if any(word.startswith("hydra/sweeper=") and word != "hydra/sweeper=basic" for word in arguments):
        _run_asked(arguments, base or resolve_recipe(_compose_base(arguments, shared)))
        return
    try:
        plans = _collect(arguments)
    except ConfigError:
        if "hydra/launcher=slurm" in arguments:  # tells these with what is wrong with its own options
            run_hydra_app(_run_point, arguments, can_submit="judge")
        raise
    if not plans:
        return  # Hydra was asked for something else than to run: --cfg, --help
    first = next(iter(plans.values()))
    record = find_sweep(Path(first.runs_dir), base.name if base else first.name)
    if "hydra/launcher=slurm" in arguments and any(_is_preview(word) for word in arguments):
        with _leaving_nothing(record.directory):
            record.register([_to_point(*item) for item in plans.items()], None)
            naming = _Naming(record, has_pruner=first.pruner is not None)
            run_hydra_app(_run_point, arguments, naming, can_submit="submit")
        return
    points = record.register([_to_point(*item) for item in plans.items()], base.to_yaml() if base else None)
    print(f"sweep {record.directory.name}: {len(points)} points, kept in {record.directory}", flush=True)
    numbers = {point.number for point in points}
    _run_points(arguments, record, first, lambda point: point.number in numbers, can_submit="submit")


def _is_preview(word: str) -> bool:
    return word.lstrip("+").lower() == "hydra.launcher.preview=true"


@contextlib.contextmanager
def _leaving_nothing(directory: Path) -> Iterator[None]:
    """Remove what is written there meanwhile, and directories that come to hold nothing."""
    before = set(directory.rglob("*"))
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        yield
    finally:
        for path in sorted(set(directory.rglob("*")) - before, reverse=True):  # what a directory holds comes before it
            path.rmdir() if path.is_dir() else path.unlink()
        for path in made:
            if path.exists() and not any(path.iterdir()):
                path.rmdir()


def _run_asked(arguments: Sequence[str], base: Plan) -> None:
    """A sweep whose sweeper asks for its points one after another: each is judged when it is asked for."""
    if "hydra/launcher=slurm" in arguments:
        fix = "leave it out, or use hydra/launcher=joblib, inside of one job"
        raise InputError("hydra/launcher", "is slurm, which ends before a point does; this sweeper waits for each", fix)
    record = find_sweep(Path(base.runs_dir), base.name)
    record.register([], base.to_yaml())
    print(f"sweep {record.directory.name}, kept in {record.directory}", flush=True)
    _run_points(arguments, record, base, lambda _: True)


def _run_points(
    arguments: Sequence[str],
    record: SweepRecord,
    plan: Plan,
    is_asked: Callable[[Point], bool],
    *,
    can_submit: Literal[False, "submit"] = False,
) -> None:
    """Have Hydra run them, and tell MLflow before and after, and the caller at the end, how those asked for stand."""

    def read() -> list[Point]:
        return [point for point in record.read() if is_asked(point)]

    try:
        tell_mlflow(record, read(), plan)
        naming = _Naming(record, has_pruner=plan.pruner is not None)
        if "hydra/launcher=joblib" in arguments:
            with _STOP.left_to_children():
                run_hydra_app(_run_in_worker, arguments, naming)
        else:
            run_hydra_app(_run_point, arguments, naming, can_submit=can_submit)
    finally:
        tell_mlflow(record, read(), plan)
    _tell(read())


def _resolve_base(arguments: Sequence[str], shared: Sequence[str]) -> Plan | None:
    """What no point changes; a recipe that needs a swept value has none."""
    try:
        return resolve_recipe(_compose_base(arguments, shared))
    except ConfigError:
        return None


def _compose_base(arguments: Sequence[str], shared: Sequence[str]) -> ComposedRecipe:
    words = [word for word in shared if not word.lstrip("+~").startswith(("hydra.", "hydra/"))]
    directories = config_dirs_of(arguments)
    return compose(words, directories[0] if directories else None)


def _collect(arguments: Sequence[str]) -> dict[tuple[str, ...], Plan]:
    """The Plan of every point under the sweep's own name, by the point's overrides."""
    plans: dict[tuple[str, ...], Plan] = {}
    problems: dict[Problem, list[tuple[str, ...]]] = {}
    points: list[tuple[str, ...]] = []

    def judge(recipe: ComposedRecipe) -> None:
        points.append(recipe.overrides)
        try:
            plans[recipe.overrides] = resolve_recipe(recipe)
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).append(recipe.overrides)

    words = [word for word in arguments if not word.lstrip("+~").startswith(("hydra.launcher", "hydra/launcher"))]
    with tempfile.TemporaryDirectory() as directory:  # Hydra makes one for every point
        run_hydra_app(judge, [*words, f"hydra.sweep.dir={directory}"], lambda _: {})
    if problems:
        raise ConfigError.from_problems([_name_points(problem, of, points) for problem, of in problems.items()])
    return plans


def _name_points(problem: Problem, wrong: Sequence[tuple[str, ...]], points: Sequence[tuple[str, ...]]) -> Problem:
    if len(wrong) == len(points):
        return problem
    others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    own = " ".join(_find_own(wrong[0], points))
    return dataclasses.replace(problem, problem=f"{problem.problem} (point {own}{others})")


def _find_own(overrides: tuple[str, ...], points: Sequence[tuple[str, ...]]) -> list[str]:
    """What not all points say."""
    common = set.intersection(*map(set, points)) if len(points) > 1 else set()
    return [word.lstrip("+") for word in overrides if word not in common]


def _to_point(overrides: tuple[str, ...], plan: Plan) -> Point:
    if Path(plan.run_dir) != Path(plan.runs_dir) / plan.name:
        fix = "leave it out, and name the sweep with name=NAME or its place with runs_dir=DIR"
        raise InputError("run_dir", "is given, so all points would share it", fix)
    return Point(-1, plan.hash, overrides, f"{plan.name}-{{number}}", f"{plan.run_dir}-{{number}}")


class _Naming:
    """Gives a point its run, wherever it is composed, and leaves out those that have finished, or were pruned.

    Without the pruner, what it had stopped goes on.
    """

    def __init__(self, record: SweepRecord, *, has_pruner: bool) -> None:
        self.record = record
        self._done = (PointState.FINISHED, PointState.PRUNED) if has_pruner else (PointState.FINISHED,)

    def register(self, recipe: ComposedRecipe) -> Point:
        """Number one more point; what the sweep knows keeps its number.

        Raises:
            ConfigError: it is no recipe that can run.
            Interrupted: a signal came while workers ran points.
        """
        _STOP.check()
        return self.record.register([_to_point(recipe.overrides, resolve_recipe(recipe))], None)[0]

    def __call__(self, overrides: Sequence[str]) -> dict[str, str] | None:
        point = self.record.find(overrides)
        if point.state in self._done and Path(point.run_dir).is_dir():
            print(f"{point.run_name}: {point.state}, skipped", flush=True)
            return None
        return {"name": point.run_name, "tracking.sweep": self.record.directory.name}


def _run_point(recipe: ComposedRecipe, stop: StopRequest | None = None) -> None:
    """One that fails leaves the others to run; its record says why.

    Raises:
        Interrupted: a signal came; also one that came too late for this point, or while it failed.
    """
    stop = stop or StopRequest()
    try:
        run_and_tell(resolve_recipe(recipe), stop)
    except Exception as error:
        print(f"{recipe.config.name} failed: {describe_failure(error)}", flush=True)
    stop.check()


def _run_in_worker(recipe: ComposedRecipe) -> None:
    """In a process of joblib's, which kills all others when one raises: after a signal, points end and none begins."""
    _STOP.listen()
    with contextlib.suppress(Interrupted):
        _STOP.check()
        _run_point(recipe, _STOP)


def _tell(points: Sequence[Point]) -> None:
    """A table of the points.

    Raises:
        RunError: some failed.
    """
    from rich.console import Console

    Console().print(_to_table(points))
    failed = [point for point in points if point.state is PointState.FAILED]
    if failed:
        first = f"{failed[0].run_name}: {failed[0].problem}"
        raise RunError("sweep", f"{len(failed)} of {len(points)} points failed, the first with: {first}", _FIX)


def _to_table(points: Sequence[Point]) -> Table:
    from rich.table import Table

    table = Table(title="points", title_justify="left")
    for column in ("run", "what is its own", "state"):
        table.add_column(column, overflow="fold")
    for point in points:
        own = _find_own(point.overrides, [other.overrides for other in points])
        table.add_row(point.run_name, "  ".join(own), point.state.value)
    return table
