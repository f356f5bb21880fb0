"""`rlrecipes run plan.yaml`: exactly what `train` would have done with the recipe the plan was resolved from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlrecipes.errors import ConfigError, InputError, Interrupted, Pruned, RecipeError
from rlrecipes.plan.lock import Lock, build_lock, check_lock, read_lock, to_lock_path
from rlrecipes.plan.nodes import Plan, load_plan
from rlrecipes.tracking.sweeps import Point, PointState, SweepRecord, find_point, upload_sweep

if TYPE_CHECKING:
    from rlrecipes.runner.faults import StopRequest


def run(arguments: list[str]) -> None:
    """Run a saved plan.

    Args:
        arguments: one path.

    Raises:
        InputError: not exactly one path.
    """
    if arguments in (["-h"], ["--help"]):
        print("usage: rlrecipes run PLAN.yaml\n\nExecutes a plan saved by `rlrecipes plan ... --save PLAN.yaml`.")
        return
    if len(arguments) != 1 or arguments[0].startswith("-"):
        fix = "write `rlrecipes run plan.yaml`; overrides belong to `rlrecipes plan`"
        raise InputError("rlrecipes run", f"takes one plan file, not {arguments}", fix)
    path = Path(arguments[0])
    plan, lock = load_plan(path), read_lock(path)
    if lock is not None:
        _check(path, plan, lock)
    run_and_tell(plan)


def _check(path: Path, plan: Plan, lock: Lock) -> None:
    where = to_lock_path(path)
    if lock.plan_hash != plan.hash:
        problem = f"is plan {plan.hash}; {where} was written for plan {lock.plan_hash}: it was edited since"
        raise ConfigError(str(path), problem, f"save it anew with `rlrecipes plan ... --save`, or remove {where}")
    for note in check_lock(lock, build_lock(plan), where):
        print(f"  note: {note}", flush=True)


def run_and_tell(plan: Plan, stop: StopRequest | None = None) -> None:
    """Run a Plan and say what it left behind; of a point of a sweep, the sweep keeps how it ended.

    Args:
        plan: the Plan.
        stop: takes the signals that come meanwhile.
    """
    with _keep_state(plan):
        _run_and_tell(plan, stop)


def describe_failure(error: BaseException) -> str:
    """What is said of a point that failed.

    Args:
        error: that ended it.
    """
    return str(error) if isinstance(error, RecipeError) else f"internal error: {type(error).__name__}: {error}"


@contextmanager
def _keep_state(plan: Plan) -> Iterator[None]:
    found = find_point(Path(plan.runs_dir), plan.tracking.sweep, Path(plan.run_dir))
    if found is None:
        yield
        return
    record, point = found
    record.set_state(point, PointState.RUNNING)
    state, problem = PointState.FINISHED, ""
    try:
        yield
    except Pruned as error:
        state, problem = PointState.PRUNED, str(error)
        print(f"{plan.name} is stopped early: {error}", flush=True)
    except Interrupted:
        state = PointState.INTERRUPTED
        raise
    except BaseException as error:
        state, problem = PointState.FAILED, describe_failure(error)
        raise
    finally:
        record.set_state(point, state, problem)
        tell_mlflow(record, record.read(), plan)  # jobs end when nobody waits for them


def tell_mlflow(record: SweepRecord, points: Sequence[Point], plan: Plan) -> None:
    """Bring the sweep's run in MLflow up to date, where MLflow is on.

    Args:
        record: of the sweep.
        points: that count.
        plan: of any of them.
    """
    from rlrecipes.runner.build import to_tracking_uri

    uri = to_tracking_uri(plan)
    if uri is not None and (problem := upload_sweep(record, points, uri, plan.tracking.experiment)):
        print(f"MLflow does not have how the sweep stands: {problem}", flush=True)


def _run_and_tell(plan: Plan, stop: StopRequest | None) -> None:
    print(f"{plan.name}: plan {plan.hash}, run directory {plan.run_dir}", flush=True)
    for note in plan.notes:
        print(f"  note: {note}", flush=True)
    from rlrecipes.runner.run import run_plan

    result = run_plan(plan, stop)
    for step, accuracy in sorted(result.evaluations.items()):
        print(f"  held-out accuracy after {step} steps: {accuracy:.3f}")
    print(f"{plan.name}: {result.steps} steps done; metrics, curves and report.html in {result.run_dir}")
    if result.hf_path is not None:
        print(f"  model: {result.hf_path}")
