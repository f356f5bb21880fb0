import json
import math
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from rlrecipes.errors import RunError
from rlrecipes.tracking.log import MetricLog, read_records


def test_a_line_is_readable_by_others_as_soon_as_append_returns(tmp_path):
    log = MetricLog(tmp_path / "deep" / "metrics.jsonl")
    log.append(3, {"reward/mean": 0.1 + 0.2})
    line = json.loads((tmp_path / "deep" / "metrics.jsonl").read_text())
    assert line["step"] == 3 and line["metrics"] == {"reward/mean": 0.1 + 0.2}
    assert abs(line["time"] - time.time()) < 60


def test_times_name_records_also_across_a_restart(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        log = MetricLog(path)
        for step in range(20):
            log.append(step, {"reward/mean": 1.0})
        log.close()
    times = [record.time_ms for record in read_records(path)]
    assert len(set(times)) == 40 and times == sorted(times)


def test_times_rise_when_the_clock_goes_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    future = time.time() + 1e6
    path.write_text(json.dumps({"step": 0, "time": round(future, 3), "metrics": {}}) + "\n")
    assert MetricLog(path).append(1, {}).time > future - 0.001


def test_nan_and_infinity_are_valid_json_and_come_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricLog(path).append(0, {"train/loss": math.nan, "train/ratio_max": math.inf, "reward/min": -math.inf})
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    metrics = read_records(path)[0].metrics
    assert math.isnan(metrics["train/loss"])
    assert (metrics["train/ratio_max"], metrics["reward/min"]) == (math.inf, -math.inf)


@pytest.mark.parametrize("tail", [b'{"step": 2, "ti', b'{"step": 2, "time"\n', b"\0" * 100, b"\0\0\0\n", b"["])
def test_a_torn_last_line_is_dropped_and_the_log_goes_on(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    MetricLog(path).append(1, {"reward/mean": 1.0})
    with path.open("ab") as file:
        file.write(tail)
    assert [record.step for record in read_records(path)] == [1]
    MetricLog(path).append(2, {"reward/mean": 2.0})
    assert [record.step for record in read_records(path)] == [1, 2]


def test_a_malformed_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricLog(path)
    log.append(1, {})
    path.open("ab").write(b"nonsense\n")
    log.append(2, {})
    with pytest.raises(RunError) as caught:
        MetricLog(path)
    assert caught.value.problems[0].where == f"{path}:2"


WRITER = """
import sys
from pathlib import Path
from rlrecipes.tracking.log import MetricLog
log = MetricLog(Path(sys.argv[1]))
start = len(log.read())
for step in range(start, 10**9):
    log.append(step, {"reward/mean": step, "train/loss": 1 / (step + 1)})
    print(step, flush=True)
"""


def test_kill_9_of_a_writer_loses_nothing_it_reported(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
            reported = [int(writer.stdout.readline()) for _ in range(50)]
            os.kill(writer.pid, signal.SIGKILL)
            reported += [int(line) for line in writer.stdout.read().split()]
        steps = [record.step for record in read_records(path)]
        assert steps == list(range(len(steps))) and steps[-1] >= reported[-1]
        # A kill in the middle of one write is rare: tear the last line by hand as well.
        os.truncate(path, path.stat().st_size - 7)
        assert [record.step for record in read_records(path)] == steps[:-1]


def test_truncate_keeps_what_a_checkpoint_holds(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricLog(path)
    for step in (0, 1, 1, 2, 3, 2):
        log.append(step, {"reward/mean": step})
    before = log.read()
    assert log.truncate_after(1) == 3
    assert log.read() == before[:3]
    appended = log.append(2, {"reward/mean": 2.5})
    assert appended.time > before[-1].time, "times of removed records must not come again"
    assert read_records(path) == [*before[:3], appended]
    assert log.truncate_after(9) == 0
    assert log.truncate_after(-1) == 4 and log.read() == []
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.fixture
def file_size_limit():
    """Makes writing past a size fail in the middle of the write, as a full disk does."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(num_bytes):
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, old[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_full_disk_is_one_clear_error_and_the_log_stays_whole(tmp_path, file_size_limit):
    path = tmp_path / "metrics.jsonl"
    log = MetricLog(path)
    log.append(0, {"reward/mean": 0.0})
    whole = path.read_bytes()
    file_size_limit(len(whole) + 10)
    with pytest.raises(RunError) as caught:
        log.append(1, {"reward/mean": 1.0})
    problem = caught.value.problems[0]
    assert problem.where == str(path) and "free space" in problem.fix
    assert path.read_bytes() == whole
    file_size_limit(10_000)
    log.append(1, {"reward/mean": 1.0})
    assert [record.step for record in log.read()] == [0, 1]


def test_a_full_disk_while_truncating_leaves_the_log_as_it_was(tmp_path, file_size_limit):
    path = tmp_path / "metrics.jsonl"
    log = MetricLog(path)
    for step in range(4):
        log.append(step, {"reward/mean": step})
    whole = path.read_bytes()
    file_size_limit(40)
    with pytest.raises(RunError):
        log.truncate_after(2)
    assert path.read_bytes() == whole and os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_path_that_cannot_be_a_log_is_a_run_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="file/metrics.jsonl"):
        MetricLog(tmp_path / "file" / "metrics.jsonl")
