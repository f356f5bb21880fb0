"""A run against MLflow's own server, as its users start it: dead when the run begins, and back before it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from rlrecipes.engines.sglang.process import find_free_port
from rlrecipes.tracking import mlflow_sink
from rlrecipes.tracking.rollouts import build_record
from rlrecipes.tracking.system import SystemSampler
from rlrecipes.tracking.tracker import build_tracker
from rlrecipes.tracking.uploader import build_client
from tests.unit.tracking.test_rollouts import build_group

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def server(tmp_path):
    """Starts the server when called; gives its address before."""
    port = find_free_port()
    uri = f"http://127.0.0.1:{port}"
    processes = []

    def start():
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{tmp_path}/server.db"]
        command += ["--artifacts-destination", str(tmp_path / "stored")]
        env = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (tmp_path / "server.log").open("w") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path, process_group=0, env=env))
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{uri}/health", timeout=5):
                    return
            except OSError:
                assert processes[-1].poll() is None, (tmp_path / "server.log").read_text()
                time.sleep(0.2)
        raise AssertionError((tmp_path / "server.log").read_text())

    yield uri, start
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_server_that_comes_late_gets_metrics_tables_references_and_the_model(server, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(mlflow_sink, "UPLOAD_INTERVAL_S", 0.2)
    monkeypatch.setattr(mlflow_sink, "MAX_RETRY_INTERVAL_S", 0.5)
    uri, start = server
    run_dir = tmp_path / "run"
    tracker = build_tracker(run_dir, uri, "exp", "late")
    tracker.resume(-1)
    tracker.log_plan({"algo": {"name": "grpo"}, "long": "x" * 9000}, "plan", "diff")
    with SystemSampler(tmp_path) as system:
        tracker.log_metrics(1, {"reward/mean": 0.5} | system.take())
    tracker.log_rollouts(build_record(1, "eval", "words", [build_group(i, [i / 9]) for i in range(9)]))
    checkpoint, model = run_dir / "checkpoints" / "step_00000001", run_dir / "hf"
    for directory in (checkpoint, model):
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(b"weights")
    tracker.log_checkpoints([checkpoint])
    deadline = time.monotonic() + 60
    while "does not answer" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.1)
    start()
    tracker.register_model("speller", model, 1)
    assert tracker.finish()
    assert caplog.text.count("does not answer") == 1 and "has everything" in caplog.text

    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    client = build_client(uri)
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED" and run.data.metrics["system/memory_bytes"] > 0
    assert run.data.metrics["system/network_sent_bytes_per_s"] >= 0
    assert "shortened from 9000 characters" in run.data.params["long"]
    names = {artifact.path for artifact in client.list_artifacts(tracker.run_id)}
    assert names >= {"report.html", "rollouts.json", "rollouts.jsonl", "checkpoints.json", "curves.png", "hf"}
    table = client.load_table(run.info.experiment_id, "rollouts.json")
    assert list(table["pick"]) == ["first"] * 3 + ["best"] * 3 + ["worst"] * 3
    reference = json.loads((run_dir / "artifacts" / "checkpoints.json").read_text())
    assert [(entry["path"], entry["num_bytes"]) for entry in reference] == [(str(checkpoint), 7)]
    assert "checkpoints" not in names, "by reference alone"

    (version,) = client.search_model_versions("name = 'speller'")
    assert (version.run_id, version.tags["rlrecipes.step"]) == (tracker.run_id, "1")
    target = tmp_path / "fetched"
    target.mkdir()
    fetched = client.download_artifacts(tracker.run_id, "hf/model.safetensors", str(target))
    assert Path(fetched).read_bytes() == b"weights"

    again = build_tracker(run_dir, uri, "exp", "late")
    again.register_model("speller", model, 1)
    assert again.finish()
    assert len(client.search_model_versions("name = 'speller'")) == 1, "one step is one version"
    again = build_tracker(run_dir, uri, "exp", "late")
    again.register_model("speller", model, 2)
    assert again.finish()
    assert len(client.search_model_versions("name = 'speller'")) == 2
