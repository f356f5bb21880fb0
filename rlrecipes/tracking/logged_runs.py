"""Runs read back, from MLflow or their directories. Owns every call of MLflow's client that reads; compares nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlrecipes.errors import InputError, RecipeError, RunError
from rlrecipes.suggest import did_you_mean
from rlrecipes.tracking.attempts import read_attempts
from rlrecipes.tracking.curves import choose_headlines
from rlrecipes.tracking.efficiency import AXIS_METRICS
from rlrecipes.tracking.log import MetricRecord, read_records
from rlrecipes.tracking.mlflow_sink import METRICS_FILE
from rlrecipes.tracking.upload_state import flatten, redact
from rlrecipes.tracking.uploader import CHANGED_PARAM_TAG, PARENT_TAG, build_client

LARGEST_FLOAT = 1.797e308
"""MLflow's databases keep infinity as the largest float; nothing else comes near it."""

_MAX_RUNS = 1000


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """One run, as MLflow or its directory has it.

    Attributes:
        name: as people see it; not unique.
        run_id: MLflow's id, or the directory.
        status: MLflow's word.
        params: dotted path -> value as text; after a resume with other values, the later ones.
        records: oldest first; from MLflow one a step, of the metrics that were asked for and those of ``AXIS_METRICS``.
    """

    name: str
    run_id: str
    status: str
    params: Mapping[str, str]
    records: tuple[MetricRecord, ...]


def is_run_directory(path: Path) -> bool:
    """Whether a run was tracked in a directory and its Plan is there to be compared."""
    return (path / METRICS_FILE).is_file() and (path / "plan.yaml").is_file()


def find_run_directories(root: Path) -> list[Path]:
    """The run directories at and below a directory, by path."""
    return sorted(file.parent for file in root.rglob(METRICS_FILE) if is_run_directory(file.parent))


def read_run(run_dir: Path, name: str, plan: Mapping[str, object]) -> LoggedRun:
    """Read a run from its directory.

    Args:
        run_dir: holds metrics.jsonl.
        name: as people see it.
        plan: nested values of its Plan, as ``Tracker.log_plan`` got them.

    Raises:
        RunError: metrics.jsonl is malformed.
    """
    attempts = read_attempts(run_dir)
    status = attempts[-1].status if attempts else "UNKNOWN"
    return LoggedRun(
        name, str(run_dir.absolute()), status, flatten(dict(plan)), tuple(read_records(run_dir / METRICS_FILE))
    )


def load_children(tracking_uri: str, parent: str, metrics: Sequence[str] | None = None) -> list[LoggedRun]:
    """Read the nested runs of a sweep's run from MLflow.

    Args:
        tracking_uri: the server or database.
        parent: name or id of the run that they are nested in; of several of that name the newest counts.
        metrics: as of ``load_runs``.

    Raises:
        InputError: no such database or run, or no run is nested in it.
        RunError: the server does not answer.
    """
    run_id = load_runs(tracking_uri, [parent], metrics=[])[-1].run_id

    def choose(runs: list[Any]) -> list[Any]:
        nested = [run for run in runs if run.data.tags.get(PARENT_TAG) == run_id]
        if not nested:
            raise InputError("--sweep", f"no run is nested in '{parent}'", "name the parent run of a sweep")
        return nested

    return _load(tracking_uri, None, metrics, choose)


def load_runs(
    tracking_uri: str, names: Sequence[str] = (), experiment: str | None = None, metrics: Sequence[str] | None = None
) -> list[LoggedRun]:
    """Read runs from MLflow.

    Args:
        tracking_uri: the server or database; a database is not made when missing.
        names: run names or ids; all runs that have one of them. Empty takes all.
        experiment: look only there; None looks everywhere.
        metrics: names to read the history of; the headlines by default.

    Returns:
        The runs, oldest first; those of ``names`` in its order.

    Raises:
        InputError: no such database, experiment, run or metric; near names are given.
        RunError: the server does not answer.
    """
    return _load(tracking_uri, experiment, metrics, lambda runs: _choose_runs(runs, names))


def _load(
    tracking_uri: str,
    experiment: str | None,
    metrics: Sequence[str] | None,
    choose: Callable[[list[Any]], list[Any]],
) -> list[LoggedRun]:
    if tracking_uri.startswith("sqlite:///") and not Path(tracking_uri.removeprefix("sqlite:///")).exists():
        raise InputError(tracking_uri, "there is no such database", "train a run first, or give its tracking URI")
    try:
        client = build_client(tracking_uri)
        found = choose(_search(client, experiment))
        wanted = _choose_metrics(found, metrics)
        return [_to_logged_run(client, run, wanted) for run in found]
    except RecipeError:
        raise
    except Exception as error:
        raise RunError(
            redact(tracking_uri),
            f"MLflow does not answer: {redact(str(error))}",
            "start the server or correct its address",
        ) from error


def load_artifact(tracking_uri: str, name: str, artifact: str, directory: Path) -> Path:
    """Fetch a file that a run left in MLflow.

    Args:
        tracking_uri: the server or database.
        name: of the run, or its id; of several runs of that name the newest counts.
        artifact: path on the server.
        directory: where to put it.

    Raises:
        InputError: no such database, run or artifact.
        RunError: the server does not answer.
    """
    run = load_runs(tracking_uri, [name], metrics=[])[-1]
    client = build_client(tracking_uri)
    if artifact not in [found.path for found in client.list_artifacts(run.run_id)]:
        raise InputError(name, f"MLflow keeps no {artifact} of this run", "name its run directory instead")
    return Path(client.download_artifacts(run.run_id, artifact, str(directory)))


def _search(client: Any, experiment: str | None) -> list[Any]:
    experiments = {e.name: e.experiment_id for e in client.search_experiments()}
    if experiment is not None and experiment not in experiments:
        raise InputError(
            "experiment", f"MLflow has no experiment '{experiment}'", did_you_mean(experiment, experiments)
        )
    ids = list(experiments.values()) if experiment is None else [experiments[experiment]]
    return list(client.search_runs(ids, max_results=_MAX_RUNS, order_by=["attributes.start_time ASC"]))


def _choose_runs(runs: list[Any], names: Sequence[str]) -> list[Any]:
    if not runs:
        raise InputError("runs", "MLflow has no run there", "train one first, or name another experiment")
    if not names:
        return runs
    chosen: dict[str, Any] = {}
    for name in names:
        matching = [run for run in runs if name in (run.info.run_id, run.info.run_name)]
        if not matching:
            known = [run.info.run_name for run in runs] + [run.info.run_id for run in runs]
            raise InputError("runs", f"MLflow has no run '{name}'", did_you_mean(name, known))
        chosen.update({run.info.run_id: run for run in matching})
    return list(chosen.values())


def _choose_metrics(runs: list[Any], metrics: Sequence[str] | None) -> list[str]:
    logged = sorted({name for run in runs for name in run.data.metrics})
    for name in metrics or ():
        if name not in logged:
            raise InputError("metrics", f"none of these runs logged '{name}'", did_you_mean(name, logged))
    wanted = choose_headlines(logged) if metrics is None else list(metrics)
    return wanted + [name for name in AXIS_METRICS if wanted and name not in wanted]


def _to_logged_run(client: Any, run: Any, metrics: Sequence[str]) -> LoggedRun:
    steps: dict[int, dict[str, float]] = {}
    times: dict[int, int] = {}
    for name in metrics:
        if name not in run.data.metrics:
            continue
        for point in sorted(client.get_metric_history(run.info.run_id, name), key=lambda p: p.timestamp):
            steps.setdefault(point.step, {})[name] = _to_value(point.value)
            times[point.step] = max(point.timestamp, times.get(point.step, 0))
    changed = {
        k.removeprefix(CHANGED_PARAM_TAG): v for k, v in run.data.tags.items() if k.startswith(CHANGED_PARAM_TAG)
    }
    return LoggedRun(
        name=run.info.run_name,
        run_id=run.info.run_id,
        status=run.info.status,
        params={**run.data.params, **changed},
        records=tuple(MetricRecord(step, times[step] / 1000, steps[step]) for step in _list_valid(times)),
    )


def _list_valid(times: Mapping[int, int]) -> list[int]:
    """Steps that no resume took back: MLflow forgets nothing, but what an earlier attempt did beyond is older."""
    valid: list[int] = []
    for step in sorted(times):
        if not valid or times[step] >= times[valid[-1]]:
            valid.append(step)
    return valid


def _to_value(stored: float) -> float:
    if abs(stored) >= LARGEST_FLOAT:
        return float("inf") if stored > 0 else float("-inf")
    return stored
