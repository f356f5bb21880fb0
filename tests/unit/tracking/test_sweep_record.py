import json
from pathlib import Path

import pytest

from rlrecipes.errors import InputError, RunError
from rlrecipes.tracking.logged_runs import load_children
from rlrecipes.tracking.sweeps import Point, PointState, find_sweep, upload_sweep
from rlrecipes.tracking.tracker import build_tracker
from rlrecipes.tracking.uploader import build_client


def build_point(plan_hash, *overrides):
    return Point(-1, plan_hash, overrides, "run-{number}", "runs/run-{number}")


@pytest.fixture
def record(tmp_path):
    return find_sweep(tmp_path, "mine")


def test_a_point_keeps_its_number_its_run_and_its_state_by_its_plan(record):
    first, second = record.register([build_point("a", "seed=1"), build_point("b", "seed=2")], None)
    uid = record.uid
    assert [(point.number, point.run_name, point.run_dir) for point in (first, second)] == [
        (0, "run-0", "runs/run-0"),
        (1, "run-1", "runs/run-1"),
    ]
    record.set_state(second, PointState.FAILED, "why")
    again = record.register([build_point("c", "seed=3"), build_point("b", "x=1", "seed=2")], "base: 1\n")
    assert [(point.number, point.state, point.problem) for point in again] == [(2, "waiting", ""), (1, "failed", "why")]
    assert record.find(["x=1", "seed=2"]) == again[1]
    assert [point.plan_hash for point in record.read()] == ["a", "b", "c"]
    assert record.uid == uid and record.base_path.read_text() == "base: 1\n"


def test_what_is_no_sweep_and_what_is_no_point_are_told(record):
    with pytest.raises(InputError, match="holds no sweep"):
        record.uid  # noqa: B018
    record.register([build_point("a", "seed=1")], None)
    with pytest.raises(RunError, match="has no point seed=2"):
        record.find(["seed=2"])


def test_a_damaged_file_costs_its_point_and_no_other(record):
    record.register([build_point("a", "seed=1"), build_point("b", "seed=2")], None)
    (record.directory / "points" / "0.json").write_text('{"number": 0')
    assert [point.plan_hash for point in record.read()] == ["b"]
    (again,) = record.register([build_point("a", "seed=1")], None)
    assert again.number == 2  # its run may hold what was trained under the old number
    assert [point.plan_hash for point in record.read()] == ["b", "a"]


def test_a_disk_that_takes_nothing_is_told(record, tmp_path):
    (tmp_path / "sweeps").write_text("a file where the directory should be")
    with pytest.raises(RunError, match="cannot be written"):
        record.register([build_point("a", "seed=1")], None)


def test_runs_of_points_are_nested_in_the_sweeps_own(record, mlflow_uri, tmp_path, fast_sink):
    points = record.register([build_point("a", "seed=1"), build_point("b", "seed=2")], "base: 1\n")
    assert upload_sweep(record, points, mlflow_uri, "exp") == ""
    ids = []
    for point in points:
        tracker = build_tracker(tmp_path / point.run_name, mlflow_uri, "exp", point.run_name, parent=record.parent)
        tracker.log_metrics(1, {"reward/mean": 1.0})
        assert tracker.finish()
        ids.append(tracker.run_id)
        record.set_state(point, PointState.FINISHED)
    client = build_client(mlflow_uri)
    experiment = client.get_experiment_by_name("exp").experiment_id
    runs = {run.info.run_id: run for run in client.search_runs([experiment])}
    (parent,) = set(runs) - set(ids)
    assert [runs[one].data.tags["mlflow.parentRunId"] for one in ids] == [parent, parent]
    assert (runs[parent].info.run_name, runs[parent].info.status) == ("mine", "RUNNING")
    assert sorted(run.name for run in load_children(mlflow_uri, "mine", None)) == ["run-0", "run-1"]
    record.set_state(points[1], PointState.FAILED, "why")
    assert upload_sweep(record, record.read(), mlflow_uri, "exp") == ""
    assert client.get_run(parent).info.status == "FAILED"
    told = json.loads(Path(client.download_artifacts(parent, "points.json", str(tmp_path))).read_text())
    assert [(point["run_name"], point["state"]) for point in told] == [("run-0", "finished"), ("run-1", "failed")]
    assert "base.yaml" in [artifact.path for artifact in client.list_artifacts(parent)]


def test_a_server_that_is_away_costs_a_line(record):
    points = record.register([build_point("a", "seed=1")], None)
    assert upload_sweep(record, points, "http://127.0.0.1:1", "exp") != ""
