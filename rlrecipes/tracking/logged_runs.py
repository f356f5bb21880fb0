"""Runs read back from MLflow. Owns every call of MLflow's client that reads; refuses to compare or draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlrecipes.errors import InputError, RecipeError, RunError
from rlrecipes.suggest import did_you_mean
from rlrecipes.tracking.curves import choose_headlines
from rlrecipes.tracking.log import MetricRecord
from rlrecipes.tracking.upload_state import redact
from rlrecipes.tracking.uploader import CHANGED_PARAM_TAG, build_client

LARGEST_FLOAT = 1.797e308
"""MLflow's databases keep infinity as the largest float; nothing else comes near it."""

_MAX_RUNS = 1000


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """One run as MLflow has it.

    Attributes:
        name: as people see it; not unique.
        run_id: MLflow's id.
        status: MLflow's word.
        params: dotted path -> value as text; after a resume with other values, the later ones.
        records: one a step, of the metrics that were asked for.
    """

    name: str
    run_id: str
    status: str
    params: Mapping[str, str]
    records: tuple[MetricRecord, ...]


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
    if tracking_uri.startswith("sqlite:///") and not Path(tracking_uri.removeprefix("sqlite:///")).exists():
        raise InputError(tracking_uri, "there is no such database", "train a run first, or give its tracking URI")
    try:
        client = build_client(tracking_uri)
        found = _choose_runs(_search(client, experiment), names)
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
    if metrics is None:
        return choose_headlines(logged)
    for name in metrics:
        if name not in logged:
            raise InputError("metrics", f"none of these runs logged '{name}'", did_you_mean(name, logged))
    return list(metrics)


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
        records=tuple(MetricRecord(step, times[step] / 1000, steps[step]) for step in sorted(steps)),
    )


def _to_value(stored: float) -> float:
    if abs(stored) >= LARGEST_FLOAT:
        return float("inf") if stored > 0 else float("-inf")
    return stored
