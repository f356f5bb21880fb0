import json
import shutil
import subprocess
from pathlib import Path

import pytest

from rlrecipes.errors import ContractError, RunError
from rlrecipes.tracking.environment import collect_git, collect_machine, collect_packages
from rlrecipes.tracking.tracker import RunStatus, build_tracker
from rlrecipes.tracking.uploader import build_client

pytestmark = pytest.mark.usefixtures("fast_sink")


def test_a_whole_run_and_its_resume(mlflow_uri, run_dir):
    tracker = build_tracker(run_dir, mlflow_uri, "exp", "seed0")
    tracker.log_plan({"algo": {"name": "grpo"}}, "algo: {name: grpo}\n", "algo.name: ppo -> grpo\n")
    for step in range(4):
        tracker.log_metrics(step, {"reward/mean": step, "eval/chain_sum/accuracy": step / 4})
    tracker.log_text("rollouts/step_3.txt", "1 + 1 = 2")
    assert tracker.finish(RunStatus.INTERRUPTED)
    run_id = tracker.run_id
    client = build_client(mlflow_uri)
    assert client.get_run(run_id).info.status == "KILLED"

    tracker = build_tracker(run_dir, mlflow_uri, "exp", "seed0", run_id)
    assert tracker.resume(1) == 2
    tracker.log_metrics(2, {"reward/mean": 20.0})
    assert [(r.step, r.metrics["reward/mean"]) for r in tracker.read()] == [(0, 0), (1, 1), (2, 20)]
    assert tracker.finish()

    run = client.get_run(run_id)
    assert run.info.status == "FINISHED" and run.data.params == {"algo.name": "grpo"}
    names = {a.path for a in client.list_artifacts(run_id)}
    assert {"plan.yaml", "defaults_diff.txt", "environment", "rollouts", "curves.png"} <= names
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in run_dir.iterdir()) == [
        "artifacts",
        "attempts.jsonl",
        "curves.png",
        "metrics.jsonl",
        "mlflow_upload.json",
        "report.html",
    ]


def test_without_mlflow_files_are_all_there_is(run_dir):
    tracker = build_tracker(run_dir, None, "exp", "run")
    tracker.log_plan({"a": 1}, "a: 1", "")
    tracker.log_metrics(0, {"reward/mean": 1.0})
    tracker.log_text("a.txt", "a")
    assert tracker.finish() and tracker.run_id is None
    assert sorted(p.name for p in run_dir.iterdir()) == ["attempts.jsonl", "curves.png", "metrics.jsonl", "report.html"]


def test_an_unknown_metric_stops_the_run_and_logs_nothing(run_dir):
    tracker = build_tracker(run_dir, None, "exp", "run")
    with pytest.raises(ContractError, match="did you mean 'reward/mean'"):
        tracker.log_metrics(0, {"reward/std": 1.0, "reward/maen": 1.0})
    assert tracker.read() == []


def test_curves_that_cannot_be_drawn_do_not_fail_the_run(run_dir, caplog):
    tracker = build_tracker(run_dir, None, "exp", "run")
    tracker.log_metrics(0, {"reward/mean": 1.0})
    (run_dir / "curves.png").mkdir()
    assert tracker.finish() and "curves are not drawn" in caplog.text


def test_a_log_that_cannot_be_opened_starts_no_mlflow_run(tmp_path):
    (tmp_path / "run").write_text("a file where the directory should be")
    with pytest.raises(RunError):
        build_tracker(tmp_path / "run", f"sqlite:///{tmp_path}/mlflow.db", "exp", "run")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.fixture
def checkout(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    git("init", "-b", "trunk")
    (tmp_path / "file").write_text("one\n")
    git("add", "file")
    git("commit", "-m", "first")
    return tmp_path


def test_git_state_clean_and_dirty(checkout):
    clean = collect_git(checkout)
    assert (clean.branch, clean.status, clean.diff, clean.is_dirty) == ("trunk", "", "", False)
    assert len(clean.commit) == 40
    (checkout / "file").write_text("two\n")
    (checkout / "new").write_text("")
    dirty = collect_git(checkout)
    assert dirty.is_dirty and "-one\n+two" in dirty.diff and "?? new" in dirty.status


def test_git_state_is_absent_rather_than_an_error(tmp_path, checkout, monkeypatch):
    shutil.rmtree(checkout / ".git")
    assert collect_git(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert collect_git(Path(__file__).parent) is None


def test_environment_is_json_and_names_what_is_installed(tmp_path):
    machine = json.loads(json.dumps(collect_machine()))
    assert machine["num_cpus"] >= 1 and machine["memory_bytes"] > 1e8
    packages = collect_packages()
    assert any(p.startswith("mlflow==") for p in packages) and packages == sorted(packages, key=str.lower)


def test_a_slurm_job_and_how_often_it_was_queued_again_are_tags(mlflow_uri, run_dir, monkeypatch):
    tracker = build_tracker(run_dir, mlflow_uri, "exp", "seed0")
    for number in (None, 2):
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
        if number is not None:
            monkeypatch.setenv("SLURM_RESTART_COUNT", str(number))
        tracker.log_plan({}, "", "")
        assert tracker.finish()
        tags = build_client(mlflow_uri).get_run(tracker.run_id).data.tags
        assert (tags["slurm.id"], tags["slurm.nodes"]) == ("17", "n[1-2]")
        assert tags["slurm.restart_count"] == str(number or 0)
        tracker = build_tracker(run_dir, mlflow_uri, "exp", "seed0", tracker.run_id)
    tracker.finish()
