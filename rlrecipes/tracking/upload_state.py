"""What an MLflow run shall hold and what it holds already. Owns mlflow_upload.json; knows nothing of MLflow's client.

Everything meant for the server is written here (or to the metric log) before it is sent, so that a run whose server
was dead can be uploaded later, from the files alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from posixpath import normpath
from typing import NamedTuple

from rlrecipes.tracking.log import write_atomically

LOGGER = logging.getLogger("rlrecipes.tracking")

MAX_KEY_LENGTH = 250
MAX_PARAM_LENGTH = 6000
MAX_TAG_LENGTH = 5000


@dataclass(frozen=True, slots=True)
class ParentRun:
    """The MLflow run of a sweep, in which those of its points are nested.

    Attributes:
        name: as people see it.
        uid: names it on the server, whatever else has its name.
    """

    name: str
    uid: str


@dataclass
class UploadRecord:
    """The contents of mlflow_upload.json.

    Attributes:
        tracking_uri, experiment, run_name: where the run belongs.
        uid: names the run on the server before the server's own id is known, so that no run is made twice.
        run_id: the server's id; None until it answered.
        status: MLflow's word: RUNNING, FINISHED, FAILED or KILLED.
        sent_time_ms: records of the metric log up to this time are on the server.
        params, tags: what the run shall hold, keys and values legal for MLflow.
        artifacts: path on the server -> local path, relative to the run directory where possible.
        models: name in the registry -> ``<directory of artifacts>@<step>`` that shall be its newest version.
        parent_name, parent_uid: of the sweep's run that this one is nested in; empty where it is of no sweep.
        sent: ``params/<key>`` and the like -> fingerprint of what the server has.
    """

    tracking_uri: str
    experiment: str
    run_name: str
    uid: str = field(default_factory=lambda: uuid.uuid4().hex)
    run_id: str | None = None
    status: str = "RUNNING"
    sent_time_ms: int = 0
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    parent_name: str = ""
    parent_uid: str = ""
    sent: dict[str, str] = field(default_factory=dict)


class Item(NamedTuple):
    """One parameter, tag or artifact to send; the fingerprint tells its value (a file's size and time) from others."""

    key: str
    value: str
    fingerprint: str


class UploadState:
    """The record on disk, shared by the run's thread and the uploading one.

    Args:
        path: of mlflow_upload.json; the run directory is the directory it lies in.
        record: used when there is none on disk yet.
    """

    def __init__(self, path: Path, record: UploadRecord | None = None) -> None:
        self.path = path
        self._lock = threading.RLock()
        found = load_record(path)
        if found is None and record is None:
            raise FileNotFoundError(path)
        self.record = found or record or UploadRecord("", "", "")
        if found is not None and record is not None:
            self._move_to(record)

    def _move_to(self, wanted: UploadRecord) -> None:
        """Follow a changed server, experiment or run id: everything is sent again to where it belongs now."""
        record = self.record
        is_elsewhere = (record.tracking_uri, record.experiment) != (wanted.tracking_uri, wanted.experiment)
        is_other_run = wanted.run_id is not None and wanted.run_id != record.run_id
        record.tracking_uri, record.experiment, record.run_name = (
            wanted.tracking_uri,
            wanted.experiment,
            wanted.run_name,
        )
        record.status = "RUNNING"
        if is_elsewhere or is_other_run:
            self.forget_sent(wanted.run_id)

    def forget_sent(self, run_id: str | None = None) -> None:
        """Start over: the server's run is not (or no longer) the one that was sent to.

        Args:
            run_id: of the run to send to now; None makes a new one.
        """
        with self._lock:
            self.record.run_id = run_id
            self.record.sent_time_ms = 0
            self.record.sent.clear()
            self.save()

    def set_run_id(self, run_id: str) -> None:
        """Keep the id the server gave."""
        with self._lock:
            self.record.run_id = run_id
            self.save()

    def set_status(self, status: str) -> None:
        """Say how the run stands, in MLflow's word."""
        with self._lock:
            self.record.status = status
            self.save()

    def add(self, kind: str, items: dict[str, str]) -> None:
        """Note what the run shall hold.

        Args:
            kind: ``params``, ``tags``, ``artifacts`` or ``models``.
            items: legal key -> legal value (path on the server -> local path for artifacts).
        """
        with self._lock:
            getattr(self.record, kind).update(items)
            self.save()

    def pending(self, kind: str) -> list[Item]:
        """What the server lacks of one kind, or has another value of."""
        with self._lock:
            items = [
                Item(key, value, self._fingerprint(kind, value)) for key, value in getattr(self.record, kind).items()
            ]
            return [item for item in items if self.record.sent.get(f"{kind}/{item.key}") != item.fingerprint]

    def mark_sent(self, kind: str, items: Sequence[Item]) -> None:
        """The server has these now, as they were when ``pending`` gave them."""
        if not items:
            return
        with self._lock:
            self.record.sent.update({f"{kind}/{item.key}": item.fingerprint for item in items})
            self.save()

    def mark_metrics_sent(self, time_ms: int) -> None:
        """The server has every record of the metric log up to this time."""
        with self._lock:
            self.record.sent_time_ms = time_ms
            self.save()

    def to_local_path(self, value: str) -> Path:
        """Where an artifact lies on this machine."""
        return self.path.parent / value

    def _fingerprint(self, kind: str, value: str) -> str:
        if kind != "artifacts":
            return hashlib.sha256(value.encode()).hexdigest()[:16]
        try:
            stat = self.to_local_path(value).stat()
        except OSError:
            return "missing"
        return f"{stat.st_size}:{stat.st_mtime_ns}"

    def save(self) -> None:
        """Write the record; a disk that refuses costs a second upload later, never the run."""
        try:
            write_atomically(self.path, json.dumps(asdict(self.record), indent=1).encode())
        except OSError as error:
            LOGGER.warning("%s cannot be written (%s); MLflow may receive things twice", self.path, error)


def load_record(path: Path) -> UploadRecord | None:
    """Read mlflow_upload.json.

    Args:
        path: the file.

    Returns:
        Its contents; None when it is missing or damaged (then logged, and the upload starts over).
    """
    try:
        return UploadRecord(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        LOGGER.warning("%s cannot be read (%s); the upload to MLflow starts over", path, error)
        return None


def flatten(values: object, prefix: str = "") -> dict[str, str]:
    """Turn nested values into MLflow's flat strings: ``{"algo": {"kind": "grpo"}}`` -> ``{"algo.kind": "grpo"}``.

    Args:
        values: mappings of anything JSON can say; a list of mappings is spread (``nodes.0.name``), others stay whole.
        prefix: dotted path of ``values``.

    Returns:
        Dotted path -> value; strings bare, all else as JSON.
    """
    if isinstance(values, list | tuple) and any(isinstance(value, dict) for value in values):
        values = dict(enumerate(values))
    if isinstance(values, dict) and values:
        return {
            path: text
            for key, value in values.items()
            for path, text in flatten(value, f"{prefix}.{key}" if prefix else str(key)).items()
        }
    return {prefix: values if isinstance(values, str) else json.dumps(values, default=str)}


def to_legal_key(key: str) -> str:
    """Make a key MLflow accepts; a changed key carries a digest, so that two never become one.

    Args:
        key: any text.

    Returns:
        The key itself when legal, else its legal characters, shortened, and 8 hexadecimal digits.
    """
    legal = re.sub(r"[^/\w.\- :]", "_", key)
    is_path = normpath(legal) == legal and not legal.startswith(("/", "..")) and legal != "."
    if legal == key and is_path and len(key) <= MAX_KEY_LENGTH:
        return key
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]
    return legal.replace("/", "_").strip(".")[: MAX_KEY_LENGTH - 9] + "_" + digest


def shorten(value: str, max_length: int, whole: str) -> str:
    """Cut a value visibly.

    Args:
        value: any text.
        max_length: most characters to keep, the marker included.
        whole: says where the whole value is.

    Returns:
        The value, or its start and a marker.
    """
    if len(value) <= max_length:
        return value
    marker = f" ... [shortened from {len(value)} characters; {whole}]"
    return value[: max_length - len(marker)] + marker


def redact(text: str) -> str:
    """Hide users and passwords of the URIs in a text that is shown to people."""
    return re.sub(r"//[^/@\s]*@", "//***@", text)
