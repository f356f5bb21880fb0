"""A migrated MLflow database (made once: it takes seconds) and MLflow's own REST application on a real socket."""

from __future__ import annotations

import shutil
import socket
import threading
from pathlib import Path

import pytest

from rlrecipes.tracking.uploader import build_client


@pytest.fixture(scope="session")
def migrated_db(tmp_path_factory):
    path = tmp_path_factory.mktemp("mlflow") / "made" / "mlflow.db"
    build_client(f"sqlite:///{path}")
    return path


@pytest.fixture
def mlflow_uri(migrated_db, tmp_path):
    path = tmp_path / "db" / "mlflow.db"
    path.parent.mkdir()
    shutil.copy(migrated_db, path)
    return f"sqlite:///{path}"


class RestServer:
    """MLflow's REST application, which can be away and come back at the same address."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._server = None

    def start(self) -> None:
        from mlflow.server import app
        from werkzeug.serving import make_server

        self._server = make_server("127.0.0.1", self.port, app, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


@pytest.fixture
def rest_server(mlflow_uri, tmp_path, monkeypatch):
    from mlflow.server import handlers

    monkeypatch.setenv("_MLFLOW_SERVER_FILE_STORE", mlflow_uri)
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", "mlflow-artifacts:/")
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_DESTINATION", str(tmp_path / "server_artifacts"))
    monkeypatch.setenv("_MLFLOW_SERVER_SERVE_ARTIFACTS", "true")
    monkeypatch.setattr(handlers, "_tracking_store", None)
    monkeypatch.setattr(handlers, "_artifact_repo", None)
    server = RestServer()
    yield server
    server.stop()


@pytest.fixture
def run_dir(tmp_path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def fast_sink(monkeypatch):
    from rlrecipes.tracking import mlflow_sink

    monkeypatch.setattr(mlflow_sink, "UPLOAD_INTERVAL_S", 0.05)
    monkeypatch.setattr(mlflow_sink, "MAX_RETRY_INTERVAL_S", 0.1)
