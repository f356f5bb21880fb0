"""Sending one run to MLflow. Owns every call of MLflow's client that writes; refuses to retry or wait.

A call of ``Uploader.upload`` sends what is missing and raises when the server does not take it; calling it again goes
on where it stopped. Metrics carry the time of their record, and MLflow keeps one value per (metric, step, time), so a
record sent twice (killed between sending and noting it) is there once.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from posixpath import dirname
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from rlrecipes.tracking.log import MetricRecord, parse_lines
from rlrecipes.tracking.upload_state import LOGGER, MAX_TAG_LENGTH, UploadState, shorten, to_legal_key

MAX_METRICS_A_BATCH = 1000
MAX_ITEMS_A_BATCH = 100
UID_TAG = "rlrecipes.uid"
PARENT_TAG = "mlflow.parentRunId"
STEP_TAG = "rlrecipes.step"
CHANGED_PARAM_TAG = "param_after_resume."
"""Before the key of a parameter that a resumed run has another value of: MLflow's parameters cannot change."""

_REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
_CLIENT_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}


def build_client(tracking_uri: str) -> Any:
    """Build MLflow's client: one attempt a call, bounded, silent (importing MLflow takes seconds).

    Args:
        tracking_uri: ``sqlite:////absolute/mlflow.db`` (made when missing), ``http://host:port`` or any MLflow knows.

    Returns:
        An ``mlflow.MlflowClient``.
    """
    for name, value in _CLIENT_SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    path = _to_sqlite_path(tracking_uri)
    if path is not None and not path.exists():
        _create_sqlite(path, MlflowClient)
    return MlflowClient(tracking_uri)


def _to_sqlite_path(tracking_uri: str) -> Path | None:
    return Path(tracking_uri.removeprefix("sqlite:///")) if tracking_uri.startswith("sqlite:///") else None


def _create_sqlite(path: Path, client_class: Any) -> None:
    """Make the tables in a file aside: they take seconds, and a kill in between would leave a broken database."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    draft.unlink(missing_ok=True)
    client_class(f"sqlite:///{draft}").search_experiments(max_results=1)
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()


class Uploader:
    """Sends one run's metrics, parameters, tags, artifacts and status.

    Args:
        state: what to send and what is sent.
        metric_log_path: the run's metrics.jsonl; may not exist yet.
    """

    def __init__(self, state: UploadState, metric_log_path: Path) -> None:
        self._state = state
        self._tail = LogTail(metric_log_path)
        self._client: Any = None
        self._is_run_checked = False
        self._lock: int | None = None

    def close(self) -> None:
        """Let another process upload this run."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def lock(self) -> None:
        """Keep other processes from uploading this run: two at once would make two runs on the server.

        The lock is on the run directory itself and ends with the process.

        Raises:
            RuntimeError: another process has it.
        """
        if self._lock is not None:
            return
        descriptor = os.open(self._state.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise RuntimeError("another process uploads this run") from None
        except OSError:
            pass  # a file system without locks
        self._lock = descriptor

    def upload(self) -> None:
        """Send everything that the server lacks.

        Raises:
            Exception: whatever MLflow raises when the server is away; what was sent until then is noted.
        """
        self.lock()
        if self._client is None:
            self._client = build_client(self._state.record.tracking_uri)
        if not self._is_run_checked:
            self._ensure_run()
            self._is_run_checked = True
        self._send_pairs("params")
        self._send_pairs("tags")
        self._send_metrics()
        self._send_artifacts()
        self._send_models()
        self._send_status()

    @property
    def _run_id(self) -> str:
        run_id = self._state.record.run_id
        if run_id is None:
            raise RuntimeError("no MLflow run yet")
        return run_id

    def _ensure_run(self) -> None:
        run_id = self._state.record.run_id
        run = self._find_by_id(run_id) if run_id else None
        if run is None:
            if run_id:
                LOGGER.warning("MLflow does not have run %s any more; a new one receives everything", run_id)
                self._state.forget_sent()
            run = self._find_or_create()
            self._state.set_run_id(run.info.run_id)
        self._move_changed_params(run.data.params)
        if run.info.status != "RUNNING" and self._state.record.status == "RUNNING":
            self._client.update_run(self._run_id, status="RUNNING")

    def _find_by_id(self, run_id: str) -> Any:
        try:
            run = self._client.get_run(run_id)
        except Exception as error:
            if getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run if run.info.lifecycle_stage == "active" else None

    def _find_or_create(self) -> Any:
        record = self._state.record
        experiment_id = ensure_experiment(self._client, record.tracking_uri, record.experiment)
        tags = {}
        if record.parent_uid:
            parent = find_or_create_run(self._client, experiment_id, record.parent_uid, record.parent_name)
            tags[PARENT_TAG] = parent.info.run_id
        return find_or_create_run(self._client, experiment_id, record.uid, record.run_name, tags)

    def _move_changed_params(self, on_server: dict[str, str]) -> None:
        known = [item for item in self._state.pending("params") if item.key in on_server]
        tags = {
            to_legal_key(CHANGED_PARAM_TAG + item.key): shorten(item.value, MAX_TAG_LENGTH, "whole in the plan")
            for item in known
            if on_server[item.key] != item.value
        }
        if tags:
            self._state.add("tags", tags)
        self._state.mark_sent("params", known)

    def _send_pairs(self, kind: str) -> None:
        from mlflow.entities import Param, RunTag

        entity = Param if kind == "params" else RunTag
        pending = self._state.pending(kind)
        for start in range(0, len(pending), MAX_ITEMS_A_BATCH):
            batch = pending[start : start + MAX_ITEMS_A_BATCH]
            entities = [entity(item.key, item.value) for item in batch]
            self._send(f"{len(batch)} {kind}", **{kind: entities})
            self._state.mark_sent(kind, batch)

    def _send_metrics(self) -> None:
        records = [r for r in self._tail.read_new() if r.time_ms > self._state.record.sent_time_ms]
        try:
            for batch in _to_batches(records):
                entities = [entity for record in batch for entity in _to_entities(record)]
                for start in range(0, len(entities), MAX_METRICS_A_BATCH):
                    part = entities[start : start + MAX_METRICS_A_BATCH]
                    self._send(f"metrics of step {batch[-1].step}", metrics=part)
                self._state.mark_metrics_sent(batch[-1].time_ms)
        except BaseException:
            self._tail.rewind()
            raise

    def _send_artifacts(self) -> None:
        for item in self._state.pending("artifacts"):
            path = self._state.to_local_path(item.value)
            if path.is_file():
                self._client.log_artifact(self._run_id, str(path), dirname(item.key) or None)
            else:
                LOGGER.warning("%s is gone and cannot be uploaded to MLflow", path)
            self._state.mark_sent("artifacts", [item])

    def _send_models(self) -> None:
        """Make versions in the registry; one made before a kill is found by its tags and not made again."""
        for item in self._state.pending("models"):
            directory, _, step = item.value.partition("@")
            self._ensure_registered_model(item.key)
            tags = {UID_TAG: self._state.record.uid, STEP_TAG: step}
            versions = self._client.search_model_versions(f"run_id = '{self._run_id}'")
            if not any(v.name == item.key and tags.items() <= v.tags.items() for v in versions):
                source = f"{self._client.get_run(self._run_id).info.artifact_uri}/{directory}"
                self._client.create_model_version(item.key, source, self._run_id, tags=tags)
            self._state.mark_sent("models", [item])

    def _ensure_registered_model(self, name: str) -> None:
        try:
            self._client.create_registered_model(name)
        except Exception as error:
            if getattr(error, "error_code", "") != "RESOURCE_ALREADY_EXISTS":
                raise

    def _send_status(self) -> None:
        status = self._state.record.status
        if status != "RUNNING":
            self._client.set_terminated(self._run_id, status)

    def _send(self, what: str, **entities: list[Any]) -> None:
        """Send a batch; one that the server will never take must not block what comes after it."""
        try:
            self._client.log_batch(self._run_id, **entities)
        except Exception as error:
            if getattr(error, "error_code", "") not in _REFUSALS:
                raise
            LOGGER.warning("MLflow refused %s (%s); they are only in the run directory", what, error)


def ensure_experiment(client: Any, tracking_uri: str, name: str) -> str:
    """The id of an experiment, made or restored where it is missing.

    Args:
        client: from :func:`build_client`.
        tracking_uri: of the same.
        name: of the experiment.

    Raises:
        Exception: whatever MLflow raises when the server is away.
    """
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        sqlite_path = _to_sqlite_path(tracking_uri)
        location = None
        if sqlite_path is not None:
            location = (sqlite_path.resolve().parent / "mlartifacts" / quote(name, safe="")).as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=location))
        except Exception as error:  # another run may have made it meanwhile
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise error from None
    if experiment.lifecycle_stage != "active":
        client.restore_experiment(experiment.experiment_id)
    return str(experiment.experiment_id)


def find_or_create_run(
    client: Any, experiment_id: str, uid: str, name: str, tags: Mapping[str, str] = MappingProxyType({})
) -> Any:
    """The one run of a uid; of several that were made at once the oldest, so that all find the same.

    Args:
        client: from :func:`build_client`.
        experiment_id: where it belongs.
        uid: of the run.
        name: of a new one.
        tags: of a new one.

    Raises:
        Exception: whatever MLflow raises when the server is away.
    """
    query, order = f"tags.`{UID_TAG}` = '{uid}'", ["attributes.start_time ASC"]
    found = client.search_runs([experiment_id], query, max_results=1, order_by=order)
    return found[0] if found else client.create_run(experiment_id, tags={UID_TAG: uid, **tags}, run_name=name)


class LogTail:
    """Reads a metric log that another thread, or process, appends to and may truncate.

    Args:
        path: metrics.jsonl; may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._position = 0

    def rewind(self) -> None:
        """Read from the start next time."""
        self._position = 0

    def read_new(self) -> list[MetricRecord]:
        """Records since the last call; from the start when the file was replaced by a truncated one."""
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._position:
                    self._inode, self._position = stat.st_ino, 0
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return []
        data = data[: data.rfind(b"\n") + 1]
        self._position += len(data)
        return parse_lines(data.splitlines())


def _to_batches(records: list[MetricRecord]) -> Iterator[list[MetricRecord]]:
    batch: list[MetricRecord] = []
    for record in records:
        if batch and sum(len(r.metrics) for r in batch) + len(record.metrics) > MAX_METRICS_A_BATCH:
            yield batch
            batch = []
        batch.append(record)
    if batch:
        yield batch


def _to_entities(record: MetricRecord) -> list[Any]:
    """Build MLflow's metrics; it stores infinity as the largest float, so nothing is lost by sending that."""
    from mlflow.entities import Metric

    return [
        Metric(to_legal_key(name), _to_storable(value), record.time_ms, record.step)
        for name, value in record.metrics.items()
    ]


def _to_storable(value: float) -> float:
    return math.copysign(1.7976931348623157e308, value) if math.isinf(value) else value
