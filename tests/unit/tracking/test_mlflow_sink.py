import logging
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from rlrecipes.errors import InputError, RunError
from rlrecipes.tracking import uploader
from rlrecipes.tracking.log import MetricLog
from rlrecipes.tracking.mlflow_sink import MlflowSink, upload_run
from rlrecipes.tracking.upload_state import load_record
from rlrecipes.tracking.uploader import build_client

pytestmark = pytest.mark.usefixtures("fast_sink")


def build_sink(uri, run_dir, run_id=None):
    return MlflowSink(uri, "exp", "run", run_dir, run_id)


def get_run(uri, run_dir):
    return build_client(uri).get_run(load_record(run_dir / "mlflow_upload.json").run_id)


def history(uri, run_dir, name="reward/mean"):
    """All points MLflow holds, not only the newest of a step."""
    run_id = load_record(run_dir / "mlflow_upload.json").run_id
    points = build_client(uri).get_metric_history(run_id, name)
    return [(p.step, p.value) for p in sorted(points, key=lambda p: p.timestamp)]


def wait_until(is_true, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_artifact(uri, run_dir, name, tmp_path):
    client = build_client(uri)
    run_id = load_record(run_dir / "mlflow_upload.json").run_id
    target = tmp_path / "downloads"
    target.mkdir(exist_ok=True)
    return open(client.download_artifacts(run_id, name, str(target))).read()


def test_everything_logged_is_on_the_server_after_close(mlflow_uri, run_dir, tmp_path):
    sink = build_sink(mlflow_uri, run_dir)
    log = MetricLog(run_dir / "metrics.jsonl")
    sink.log_params(
        {
            "algo": {"name": "grpo", "kl_coef": 1e-5, "is_on": True, "none": None},
            "sizes": [1, 2],
            "empty": {},
            "nodes": [{"n": 1}],
        }
    )
    sink.log_tags({"note": "hello"})
    sink.log_text("git/diff.patch", "ä\n")
    (run_dir / "picture.png").write_bytes(b"png")
    sink.log_artifact(run_dir / "picture.png", "plots/picture.png")
    for step in range(5):
        log.append(step, {"reward/mean": step / 2, "train/loss": math.nan, "train/ratio_max": math.inf})
        sink.notify()
    assert sink.close("FINISHED")
    run = get_run(mlflow_uri, run_dir)
    assert run.info.status == "FINISHED" and run.info.run_name == "run" and run.info.run_id == sink.run_id
    assert run.data.params == {
        "algo.name": "grpo",
        "algo.kl_coef": "1e-05",
        "algo.is_on": "true",
        "algo.none": "null",
        "sizes": "[1, 2]",
        "empty": "{}",
        "nodes.0.n": "1",
    }
    assert run.data.tags["note"] == "hello"
    assert history(mlflow_uri, run_dir) == [(s, s / 2) for s in range(5)]
    assert all(math.isnan(value) for _, value in history(mlflow_uri, run_dir, "train/loss"))
    assert [s for s, _ in history(mlflow_uri, run_dir, "train/ratio_max")] == list(range(5))
    assert read_artifact(mlflow_uri, run_dir, "git/diff.patch", tmp_path) == "ä\n"
    assert read_artifact(mlflow_uri, run_dir, "plots/picture.png", tmp_path) == "png"


def test_artifacts_of_a_database_lie_beside_it_not_in_the_working_directory(mlflow_uri, run_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sink = build_sink(mlflow_uri, run_dir)
    sink.log_text("a.txt", "a")
    assert sink.close()
    assert list((tmp_path / "db" / "mlartifacts").rglob("a.txt"))
    assert sorted(os.listdir(tmp_path)) == ["db", "run"]


def test_a_changed_file_is_uploaded_again(mlflow_uri, run_dir, tmp_path):
    sink = build_sink(mlflow_uri, run_dir)
    sink.log_text("note.txt", "first")
    wait_until(lambda: "artifacts/note.txt" in load_record(run_dir / "mlflow_upload.json").sent)
    sink.log_text("note.txt", "second and longer")
    assert sink.close()
    assert read_artifact(mlflow_uri, run_dir, "note.txt", tmp_path) == "second and longer"


def test_long_values_are_cut_visibly_and_kept_whole_beside(mlflow_uri, run_dir, tmp_path):
    sink = build_sink(mlflow_uri, run_dir)
    long = "x" * 7000
    sink.log_params({"plan": {"processes": long}, "ok": "y" * 6000})
    assert sink.close()
    params = get_run(mlflow_uri, run_dir).data.params
    assert params["ok"] == "y" * 6000
    cut = params["plan.processes"]
    assert len(cut) == 6000 and cut.startswith("xxx")
    assert cut.endswith("... [shortened from 7000 characters; whole in artifact long_params/plan.processes.txt]")
    assert read_artifact(mlflow_uri, run_dir, "long_params/plan.processes.txt", tmp_path) == long


def test_illegal_and_long_keys_stay_apart(mlflow_uri, run_dir):
    sink = build_sink(mlflow_uri, run_dir)
    keys = ["a#b", "a?b", "k" * 300 + "1", "k" * 300 + "2", "/abs", "..", "a//b", "fine.key-1 x:y"]
    sink.log_params({key: str(i) for i, key in enumerate(keys)})
    assert sink.close()
    params = get_run(mlflow_uri, run_dir).data.params
    assert sorted(params.values()) == [str(i) for i in range(len(keys))]
    assert params["fine.key-1 x:y"] == "7" and sum(key.startswith("a_b_") for key in params) == 2


def test_more_than_one_batch_of_metrics_and_params(mlflow_uri, run_dir):
    log = MetricLog(run_dir / "metrics.jsonl")
    log.append(0, {f"reward_part/p{i}": i for i in range(1100)})
    for step in range(1, 601):
        log.append(step, {"reward/mean": step, "reward/std": step})
    sink = build_sink(mlflow_uri, run_dir)
    sink.log_params({f"p{i}": i for i in range(250)})
    assert sink.close(timeout_s=60)
    run = get_run(mlflow_uri, run_dir)
    assert len(run.data.params) == 250 and len(run.data.metrics) == 1102
    assert history(mlflow_uri, run_dir) == [(s, float(s)) for s in range(1, 601)]


def test_a_restart_continues_the_run_and_sends_nothing_twice(mlflow_uri, run_dir):
    for start in (0, 3):
        sink = build_sink(mlflow_uri, run_dir)
        log = MetricLog(run_dir / "metrics.jsonl")
        for step in range(start, start + 3):
            log.append(step, {"reward/mean": step})
        assert sink.close()
    assert history(mlflow_uri, run_dir) == [(s, float(s)) for s in range(6)]
    assert len(build_client(mlflow_uri).search_runs([get_run(mlflow_uri, run_dir).info.experiment_id])) == 1


def test_killed_between_sending_and_noting_it_sends_nothing_twice(mlflow_uri, run_dir):
    log = MetricLog(run_dir / "metrics.jsonl")
    sink = build_sink(mlflow_uri, run_dir)
    sink.log_params({"a": 1})
    before = (run_dir / "mlflow_upload.json").read_bytes()
    for step in range(3):
        log.append(step, {"reward/mean": step})
    assert sink.close()
    (run_dir / "mlflow_upload.json").write_bytes(before)
    assert build_sink(mlflow_uri, run_dir).close()
    assert history(mlflow_uri, run_dir) == [(s, float(s)) for s in range(3)]
    assert len(build_client(mlflow_uri).search_runs([get_run(mlflow_uri, run_dir).info.experiment_id])) == 1


def test_after_a_truncation_the_repeated_steps_arrive_and_are_the_latest(mlflow_uri, run_dir):
    log = MetricLog(run_dir / "metrics.jsonl")
    sink = build_sink(mlflow_uri, run_dir)
    for step in range(4):
        log.append(step, {"reward/mean": step})
    assert sink.close()
    log.truncate_after(1)
    sink = build_sink(mlflow_uri, run_dir)
    assert get_run(mlflow_uri, run_dir).info.status in ("FINISHED", "RUNNING")
    for step in range(2, 5):
        log.append(step, {"reward/mean": step + 0.5})
        sink.notify()
    assert sink.close()
    assert history(mlflow_uri, run_dir) == [
        (0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (2, 2.5), (3, 3.5), (4, 4.5),
    ]  # fmt: skip
    assert get_run(mlflow_uri, run_dir).data.metrics["reward/mean"] == 4.5


def test_a_truncation_under_a_running_sink_loses_nothing(mlflow_uri, run_dir):
    log = MetricLog(run_dir / "metrics.jsonl")
    sink = build_sink(mlflow_uri, run_dir)
    for step in range(6):
        log.append(step, {"reward/mean": step})
    sink.notify()
    wait_until(lambda: load_record(run_dir / "mlflow_upload.json").sent_time_ms == log.read()[-1].time_ms)
    log.truncate_after(0)
    for step in range(1, 8):
        log.append(step, {"reward/mean": step + 0.5})
    assert sink.close()
    assert dict(history(mlflow_uri, run_dir)) == {0: 0.0, **{s: s + 0.5 for s in range(1, 8)}}


def test_a_param_changed_by_a_resume_is_visible(mlflow_uri, run_dir, caplog):
    first = build_sink(mlflow_uri, run_dir)
    first.log_params({"tp": 1, "lr": 0.1})
    assert first.close()
    second = build_sink(mlflow_uri, run_dir)
    second.log_params({"tp": 2, "lr": 0.1, "new": 1})
    assert second.close()
    run = get_run(mlflow_uri, run_dir)
    assert run.data.params == {"tp": "1", "lr": "0.1", "new": "1"}
    assert run.data.tags["param_after_resume.tp"] == "2"
    assert not any(key.endswith("lr") for key in run.data.tags)


def test_a_run_deleted_on_the_server_is_made_again_with_everything(mlflow_uri, run_dir, caplog):
    log = MetricLog(run_dir / "metrics.jsonl")
    log.append(0, {"reward/mean": 0.5})
    sink = build_sink(mlflow_uri, run_dir)
    sink.log_params({"a": 1})
    assert sink.close()
    build_client(mlflow_uri).delete_run(sink.run_id)
    again = build_sink(mlflow_uri, run_dir)
    assert again.close()
    assert again.run_id != sink.run_id
    assert history(mlflow_uri, run_dir) == [(0, 0.5)] and get_run(mlflow_uri, run_dir).data.params == {"a": "1"}


def test_a_run_id_from_a_checkpoint_is_continued_in_another_directory(mlflow_uri, run_dir, tmp_path):
    sink = build_sink(mlflow_uri, run_dir)
    assert sink.close()
    MetricLog(tmp_path / "moved" / "metrics.jsonl").append(1, {"reward/mean": 1.0})
    moved = build_sink(mlflow_uri, tmp_path / "moved", sink.run_id)
    assert moved.close() and moved.run_id == sink.run_id
    assert history(mlflow_uri, tmp_path / "moved") == [(1, 1.0)]


def test_a_server_that_is_down_costs_one_warning_and_nothing_is_lost(rest_server, run_dir, caplog):
    log = MetricLog(run_dir / "metrics.jsonl")
    sink = build_sink(rest_server.uri, run_dir)
    sink.log_params({"a": 1})
    for step in range(3):
        log.append(step, {"reward/mean": step})
        sink.notify()
    wait_until(lambda: "does not answer" in caplog.text)
    time.sleep(0.5)
    assert caplog.text.count("does not answer") == 1 and sink.run_id is None
    assert not sink.close("FINISHED", timeout_s=0.5)
    assert f"python -m rlrecipes.tracking.mlflow_sink {run_dir}" in caplog.text
    sink._thread.join(20)
    with pytest.raises(RunError, match="did not take the run"):
        upload_run(run_dir)
    rest_server.start()
    run_id = upload_run(run_dir)
    assert upload_run(run_dir) == run_id
    assert history(rest_server.uri, run_dir) == [(s, float(s)) for s in range(3)]
    run = get_run(rest_server.uri, run_dir)
    assert run.info.status == "FINISHED" and run.data.params == {"a": "1"}


def test_a_server_that_goes_and_comes_back_gets_everything_once(rest_server, run_dir, caplog, tmp_path):
    rest_server.start()
    log = MetricLog(run_dir / "metrics.jsonl")
    sink = build_sink(rest_server.uri, run_dir)

    def log_steps(steps):
        for step in steps:
            log.append(step, {"reward/mean": step})
            sink.notify()

    log_steps(range(5))
    wait_until(lambda: load_record(run_dir / "mlflow_upload.json").sent_time_ms == log.read()[-1].time_ms)
    rest_server.stop()
    log_steps(range(5, 10))
    sink.log_text("late.txt", "late")
    wait_until(lambda: "does not answer" in caplog.text)
    rest_server.start()
    log_steps(range(10, 15))
    assert sink.close()
    assert "is back" in caplog.text
    assert history(rest_server.uri, run_dir) == [(s, float(s)) for s in range(15)]
    assert read_artifact(rest_server.uri, run_dir, "late.txt", tmp_path) == "late"


def test_a_server_that_hangs_keeps_nobody_waiting(run_dir, caplog, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        sink = build_sink(f"http://127.0.0.1:{silent.getsockname()[1]}", run_dir)
        log = MetricLog(run_dir / "metrics.jsonl")
        for step in range(100):
            log.append(step, {"reward/mean": step})
            sink.notify()
        assert not sink.close(timeout_s=0.3)
    assert "nothing is lost" in caplog.text


def test_what_the_server_refuses_does_not_block_the_rest(mlflow_uri, run_dir, caplog):
    sink = build_sink(mlflow_uri, run_dir)
    wait_until(lambda: sink.run_id is not None)
    build_client(mlflow_uri).log_param(sink.run_id, "a", "somebody else's")
    sink.log_params({"a": "ours"})
    MetricLog(run_dir / "metrics.jsonl").append(0, {"reward/mean": 1.0})
    assert sink.close()
    assert history(mlflow_uri, run_dir) == [(0, 1.0)]
    assert "MLflow refused 1 params" in caplog.text


def test_an_address_that_makes_no_sense_does_not_fail_the_run(run_dir, caplog):
    sink = build_sink("htp://user:secret@nowhere", run_dir)
    MetricLog(run_dir / "metrics.jsonl").append(0, {"reward/mean": 1.0})
    assert not sink.close("FAILED", timeout_s=0.3)
    assert "htp://***@nowhere" in caplog.text and "secret" not in caplog.text


def test_a_damaged_state_file_starts_the_upload_over(mlflow_uri, run_dir, caplog):
    run_dir.mkdir()
    (run_dir / "mlflow_upload.json").write_text("{")
    MetricLog(run_dir / "metrics.jsonl").append(0, {"reward/mean": 1.0})
    assert build_sink(mlflow_uri, run_dir).close()
    assert history(mlflow_uri, run_dir) == [(0, 1.0)] and "cannot be read" in caplog.text


def test_a_run_that_is_still_tracked_is_not_uploaded_by_another(mlflow_uri, run_dir):
    sink = build_sink(mlflow_uri, run_dir)
    wait_until(lambda: sink.run_id is not None)
    with pytest.raises(RunError, match="another process"):
        upload_run(run_dir)
    assert sink.close()
    assert get_run(mlflow_uri, run_dir).info.status == "FINISHED" and upload_run(run_dir) == sink.run_id


class LateClient:
    """MLflow's client as it is for the later of two runs that start at once: no experiment, then there is one."""

    def __init__(self, client):
        self._client = client
        self._has_looked = False

    def __getattr__(self, name):
        return getattr(self._client, name)

    def get_experiment_by_name(self, name):
        found = self._client.get_experiment_by_name(name) if self._has_looked else None
        self._has_looked = True
        return found


def test_runs_that_start_at_once_share_one_experiment(mlflow_uri, run_dir, tmp_path, monkeypatch, caplog):
    assert build_sink(mlflow_uri, tmp_path / "first").close()
    monkeypatch.setattr(uploader, "build_client", lambda uri: LateClient(build_client(uri)))
    assert build_sink(mlflow_uri, run_dir).close()
    runs = [get_run(mlflow_uri, directory) for directory in (tmp_path / "first", run_dir)]
    assert runs[0].info.experiment_id == runs[1].info.experiment_id and not caplog.text


def test_uploading_a_directory_without_a_tracked_run_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="no mlflow_upload.json"):
        upload_run(tmp_path)


def run_forever(uri, run_dir, num_logged):
    log = MetricLog(run_dir / "metrics.jsonl")
    sink = build_sink(uri, run_dir)
    for step in range(10**9):
        log.append(step, {"reward/mean": step})
        sink.notify()
        time.sleep(0.002)
        num_logged.value += sink.run_id is not None


def test_kill_9_in_the_middle_of_uploading_and_the_rest_later(mlflow_uri, run_dir):
    fork = multiprocessing.get_context("fork")  # a fresh process would import MLflow for seconds
    num_logged = fork.Value("i", 0)
    run = fork.Process(target=run_forever, args=(mlflow_uri, run_dir, num_logged))
    run.start()
    wait_until(lambda: num_logged.value >= 60)
    run.kill()
    run.join()
    steps = [record.step for record in MetricLog(run_dir / "metrics.jsonl").read()]
    upload_run(run_dir)
    assert history(mlflow_uri, run_dir) == [(s, float(s)) for s in steps]
    assert get_run(mlflow_uri, run_dir).info.status == "KILLED"


def test_a_run_killed_while_the_database_is_made_leaves_no_broken_one(tmp_path):
    path = tmp_path / "new" / "mlflow.db"
    run = multiprocessing.get_context("fork").Process(target=build_client, args=(f"sqlite:///{path}",))
    run.start()
    wait_until(lambda: any(p.stat().st_size > 0 for p in path.parent.glob("*.new")), 60)
    run.kill()
    run.join()
    assert not path.exists()


@pytest.mark.slow
def test_a_real_mlflow_server_process(mlflow_uri, run_dir, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sink = build_sink(f"http://127.0.0.1:{port}", run_dir)
    log = MetricLog(run_dir / "metrics.jsonl")
    log.append(0, {"reward/mean": 0.0, "train/loss": math.nan})
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", mlflow_uri, "--port", str(port)]
    command += ["--artifacts-destination", str(tmp_path / "served"), "--workers", "1"]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = subprocess.Popen(command, env=environment, start_new_session=True, cwd=tmp_path)
    try:
        sink.log_text("a.txt", "a")
        sink.log_params({"empty": ""})
        wait_until(lambda: sink.run_id is not None, 120)
        log.append(1, {"reward/mean": 1.0, "train/ratio_max": math.inf})
        assert sink.close(timeout_s=60)
        uri = f"http://127.0.0.1:{port}"
        assert history(uri, run_dir) == [(0, 0.0), (1, 1.0)]
        assert math.isnan(history(uri, run_dir, "train/loss")[0][1])
        assert read_artifact(uri, run_dir, "a.txt", tmp_path) == "a"
        assert list((tmp_path / "served").rglob("a.txt"))
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


def test_mlflow_stays_silent(mlflow_uri, run_dir, capfd):
    logging.getLogger("mlflow").info("heard")
    num_before = threading.active_count()  # other tests of the process have left theirs
    assert build_sink(mlflow_uri, run_dir).close()
    assert threading.active_count() - num_before < 20
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""
