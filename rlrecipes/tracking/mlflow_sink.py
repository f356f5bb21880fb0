"""The MLflow sink of a running run: one thread that keeps the server up to date. Owns waiting, retrying and warning.

It never raises into the run and never keeps it waiting: everything is on disk first (``UploadState``, the metric log),
the thread copies it to the server, and a server that is down or hangs costs one warning. What it missed is sent when
it is back, at the next start of the run, or by ``python -m rlrecipes.tracking.mlflow_sink RUN_DIR``.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from posixpath import basename

from rlrecipes.errors import InputError, RecipeError, RunError
from rlrecipes.tracking.upload_state import (
    LOGGER,
    MAX_PARAM_LENGTH,
    MAX_TAG_LENGTH,
    ParentRun,
    UploadRecord,
    UploadState,
    flatten,
    redact,
    shorten,
    to_legal_key,
)
from rlrecipes.tracking.uploader import Uploader

METRICS_FILE = "metrics.jsonl"
STATE_FILE = "mlflow_upload.json"
UPLOAD_INTERVAL_S = 5.0
MAX_RETRY_INTERVAL_S = 60.0
SLOWEST_UPLOAD_BYTES_PER_S = 10e6


class MlflowSink:
    """Keeps one MLflow run up to date from the files of a run directory.

    Args:
        tracking_uri: the server: ``sqlite:////absolute/mlflow.db``, ``http://host:port``...
        experiment: name of the experiment; made when missing.
        run_name: name of the run as people see it.
        run_dir: holds metrics.jsonl, which this reads, and mlflow_upload.json, which this writes.
        run_id: of a run to continue, from a checkpoint; None continues the run directory's own, or starts one.
        parent: the sweep's run, in which this one is nested; made when missing.
    """

    def __init__(
        self,
        tracking_uri: str,
        experiment: str,
        run_name: str,
        run_dir: Path,
        run_id: str | None = None,
        *,
        parent: ParentRun | None = None,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        record = UploadRecord(tracking_uri, experiment, run_name, run_id=run_id)
        if parent is not None:
            record.parent_name, record.parent_uid = parent.name, parent.uid
        self._state = UploadState(run_dir / STATE_FILE, record)
        self._state.save()
        self._run_dir = run_dir
        self._uploader = Uploader(self._state, run_dir / METRICS_FILE)
        self._wake = threading.Event()
        self._is_closing = threading.Event()
        self._deadline = float("inf")
        self._model_bytes = 0
        self._is_uploaded = False
        self._thread = threading.Thread(target=self._run, name="mlflow-sink", daemon=True)
        self._thread.start()

    @property
    def run_id(self) -> str | None:
        """The server's id of the run; None until it answered for the first time."""
        return self._state.record.run_id

    def log_params(self, params: Mapping[str, object]) -> None:
        """Add parameters; nested mappings become dotted names, and a value too long is cut visibly.

        Args:
            params: name -> anything JSON can say. The whole of a long value becomes an artifact.
        """
        legal: dict[str, str] = {}
        for name, value in flatten(dict(params)).items():
            key = to_legal_key(name)
            if len(value) > MAX_PARAM_LENGTH:
                target = f"long_params/{key.replace('/', '_')[:200]}.txt"
                self.log_text(target, value)
                value = shorten(value, MAX_PARAM_LENGTH, f"whole in artifact {target}")
            legal[key] = value
        self._state.add("params", legal)
        self._wake.set()

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags.

        Args:
            tags: name -> text; cut visibly at 5000 characters.
        """
        legal = {to_legal_key(name): shorten(value, MAX_TAG_LENGTH, "cut") for name, value in tags.items()}
        self._state.add("tags", legal)
        self._wake.set()

    def log_artifact(self, path: Path, target: str | None = None) -> None:
        """Add a file; it is read when it is uploaded, and again at the next upload after it changed.

        Args:
            path: the file; must stay where it is.
            target: path on the server, ending in the file's own name; its name alone by default.
        """
        path = path.resolve()
        run_dir = self._run_dir.resolve()
        local = path.relative_to(run_dir) if path.is_relative_to(run_dir) else path
        self._state.add("artifacts", {target or path.name: str(local)})
        self._wake.set()

    def log_text(self, target: str, text: str) -> None:
        """Add a text as a file.

        Args:
            target: path on the server, such as ``git/diff.patch``; the file is kept under ``artifacts/``.
            text: its contents.
        """
        path = self._run_dir / "artifacts" / target
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="replace")
        except OSError as error:
            LOGGER.warning("artifact %s is not kept: %s", basename(target), error)
            return
        self.log_artifact(path, target)

    def register_model(self, name: str, path: Path, step: int) -> None:
        """Upload an exported model and make it a version in MLflow's registry.

        Args:
            name: in the registry.
            path: its directory, under the run directory.
            step: completed when it was exported.
        """
        files = sorted(file for file in path.rglob("*") if file.is_file())
        for file in files:
            self.log_artifact(file, f"{path.name}/{file.relative_to(path).as_posix()}")
        self._model_bytes = sum(file.stat().st_size for file in files)
        self._state.add("models", {name: f"{path.name}@{step}"})
        self._wake.set()

    def notify(self) -> None:
        """Say that the metric log has grown or was truncated; the thread looks within seconds."""
        self._wake.set()

    def close(self, status: str = "FINISHED", timeout_s: float = 30.0) -> bool:
        """Send what is left, for a bounded time.

        Args:
            status: MLflow's word: FINISHED, FAILED or KILLED.
            timeout_s: most seconds to wait for the server, beside what a registered model takes at 10 MB/s.

        Returns:
            Whether the server has everything.
        """
        self._state.set_status(status)
        timeout_s += self._model_bytes / SLOWEST_UPLOAD_BYTES_PER_S
        self._deadline = time.monotonic() + timeout_s
        self._is_closing.set()
        self._wake.set()
        self._thread.join(timeout_s)
        is_done = not self._thread.is_alive() and self._is_uploaded
        if not is_done:
            LOGGER.warning(
                "MLflow at %s does not have all of this run; nothing is lost. Upload it later with: "
                "python -m rlrecipes.tracking.mlflow_sink %s",
                redact(self._state.record.tracking_uri),
                self._run_dir,
            )
        return is_done

    def _run(self) -> None:
        num_failures = 0
        while True:
            is_last = self._is_closing.is_set()
            self._wake.clear()
            num_failures = 0 if self._try_upload(num_failures) else num_failures + 1
            self._is_uploaded = num_failures == 0
            if is_last and (self._is_uploaded or time.monotonic() >= self._deadline):
                self._uploader.close()
                return
            self._pause(num_failures)

    def _pause(self, num_failures: int) -> None:
        """Wait for work, at least as long as batching or the outage asks; closing cuts it short."""
        if self._is_closing.is_set():
            time.sleep(min(0.5, max(0.0, self._deadline - time.monotonic())) if num_failures else 0)
        elif num_failures:
            self._is_closing.wait(min(MAX_RETRY_INTERVAL_S, 2.0**num_failures))
        else:
            self._is_closing.wait(UPLOAD_INTERVAL_S)
            self._wake.wait()

    def _try_upload(self, num_failures: int) -> bool:
        try:
            self._uploader.upload()
        except Exception as error:
            if num_failures == 0:
                LOGGER.warning(
                    "MLflow at %s does not answer (%s); the run goes on and uploads when it is back",
                    redact(self._state.record.tracking_uri),
                    redact(shorten(str(error), 300, "cut")),
                )
            return False
        if num_failures:
            LOGGER.warning("MLflow at %s is back and has everything", redact(self._state.record.tracking_uri))
        return True


def upload_run(run_dir: Path) -> str:
    """Send to MLflow what it missed of a run that has ended.

    Args:
        run_dir: the run's directory.

    Returns:
        MLflow's run id.

    Raises:
        InputError: the directory holds no run tracked by MLflow.
        RunError: the server does not take it; calling again goes on.
    """
    try:
        state = UploadState(run_dir / STATE_FILE)
    except FileNotFoundError:
        raise InputError(
            str(run_dir), f"holds no {STATE_FILE}", "give the directory of a run that was tracked by MLflow"
        ) from None
    uploader = Uploader(state, run_dir / METRICS_FILE)
    try:
        uploader.lock()
        if state.record.status == "RUNNING":
            state.set_status("KILLED")
        uploader.upload()
    except Exception as error:
        raise RunError(
            redact(state.record.tracking_uri),
            f"MLflow did not take the run: {redact(str(error))}",
            "start the server, or wait for the run to end, and upload again",
        ) from error
    finally:
        uploader.close()
    return state.record.run_id or ""


def _main(arguments: list[str]) -> int:
    try:
        for run_dir in arguments:
            print(f"{run_dir}: MLflow run {upload_run(Path(run_dir))} is complete")
    except RecipeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
