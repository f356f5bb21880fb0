"""Records of jobs: one that is damaged costs its own job, and what SLURM took is always told."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import pytest

from rlrecipes.runner import jobs, submission
from rlrecipes.runner.jobs import find_active, read_jobs


@pytest.fixture
def runs_dir(tmp_path, monkeypatch):
    """Runs ``whole`` and ``torn``, each with a job that SLURM says is running."""
    for number, name in enumerate(("whole", "torn")):
        directory = tmp_path / name / "slurm"
        directory.mkdir(parents=True)
        record = {"id": str(number), "submitted": 1.0, "name": name, "num_steps": 3}
        (directory / "job.json").write_text(json.dumps(record)[: None if name == "whole" else 20])
    said = "".join(f"{number}|RUNNING|None\n" for number in range(2))
    monkeypatch.setattr(jobs, "_run", lambda *words: subprocess.CompletedProcess(words, 0, said, ""))
    return tmp_path


def test_a_record_that_is_half_written_costs_its_own_job(runs_dir, caplog):
    assert [(job.name, job.state) for job in read_jobs(runs_dir)] == [("whole", "RUNNING")]
    whole, torn = runs_dir / "whole", runs_dir / "torn"
    assert find_active([whole, torn]) == {whole: "0 (running)"}
    assert [f"{torn}/slurm/job.json is no record" in text for text in caplog.messages] == [True, True]


def test_a_start_that_is_half_written_is_left_out(runs_dir):
    lines = ['{"job": "0", "restart_count": 2}', '{"job": "0", "resta', "7", '{"job": "1", "restart_count": 5}']
    (runs_dir / "whole" / "slurm" / "starts.jsonl").write_text("\n".join(lines))
    assert read_jobs(runs_dir)[0].num_restarts == 2


def test_what_slurm_took_is_told_when_its_record_cannot_be_written(tmp_path, monkeypatch, capsys):
    plans = [
        SimpleNamespace(name=name, hash="x", run_dir=str(tmp_path / name), schedule=SimpleNamespace(num_steps=3))
        for name in ("a", "b")
    ]
    answer = subprocess.CompletedProcess([], 0, "17\n", "")
    monkeypatch.setattr(submission, "_run_sbatch", lambda *_: answer)
    (tmp_path / "a").write_text("a file where the directory should be")
    with pytest.raises(OSError):
        submission._submit([submission._Job(plans, "", tmp_path / "job.sh")], None)
    said = capsys.readouterr().out
    assert "a: job 17_0" in said and "b: job 17_1" in said
