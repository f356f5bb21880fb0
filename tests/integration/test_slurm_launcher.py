"""Runs and sweeps as jobs of a real SLURM with fake GPUs; skipped where its daemons are not installed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from tests.integration.command_line import SMALL, CommandLine
from tests.integration.slurm_cluster import NEEDS_SLURM, run_slurm

pytestmark = [*NEEDS_SLURM, pytest.mark.timeout(900)]
NODES = {"n1": "gpu:8", "n2": "gpu:8"}
PARTITIONS = (
    "PartitionName=gpu Nodes=ALL Default=YES State=UP PriorityTier=10 PreemptMode=REQUEUE",
    "PartitionName=high Nodes=ALL State=UP PriorityTier=20 PreemptMode=OFF",
)
QUICK = [
    *(word for word in SMALL if not word.startswith(("schedule.eval", "schedule.save", "deterministic"))),
    "schedule.eval_interval=0",
    "schedule.should_eval_before=false",
    "schedule.should_export_hf=false",
    "schedule.save_interval=1000",
]
ONE = ["cluster=slurm", "cluster.num_nodes=1", "cluster.partition=gpu", "hydra/launcher=slurm"]
TWO = ["cluster=slurm", "weight_sync=distributed", "hydra/launcher=slurm"]
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
README = Path(__file__).parents[2] / "README.md"
MAIN = "topology.served_models.policy.server_groups.main"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with run_slurm(tmp_path_factory.mktemp("slurm"), NODES, PARTITIONS):
        yield


@pytest.fixture
def here(slurm, shell):
    yield shell
    subprocess.run(["scancel", "-u", "root"], timeout=30, check=False)


def read_jobs(shell: CommandLine, *names: str) -> list[dict]:
    return json.loads(shell.run("jobs", *names, "--format", "json"))


def wait_for(shell: CommandLine, name: str, is_there, timeout_s: float = 400) -> dict:
    """Wait until the job of a run is as wanted; one that ends otherwise fails the test with its log."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        (job,) = read_jobs(shell, name)
        if is_there(job):
            return job
        assert job["state"] not in OVER, job
        time.sleep(3)
    raise AssertionError(f"not in {timeout_s} s: {job}")


def in_state(state: str):
    return lambda job: job["state"] == state


def squeue() -> str:
    done = subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, timeout=30, check=True)
    return done.stdout


def find_processes(word: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if word in process.environ().get("PYTHONPATH", "") and "slurm" not in process.name():
                found.append(" ".join(process.cmdline())[:200])
        except psutil.Error:
            continue
    return [line for line in found if "rlrecipes" in line or "ray" in line]


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([], id="job"),
        pytest.param(["hydra.launcher.engine_nodes.comment=x"], id="hetjob", marks=pytest.mark.slow),
    ],
)
def test_trainer_and_engine_on_two_nodes(here, parts):
    said = here.run("train", "name=two", "schedule.num_steps=2", *QUICK, *TWO, *parts)
    assert "two: job" in said
    job = wait_for(here, "two", in_state("COMPLETED"))
    assert job["step"] == job["num_steps"] == 2
    assert here.metrics("two")[2]["weight_sync/is_verified"] == 1.0
    plan = (here.cwd / "runs" / "two" / "slurm" / "plan.yaml").read_text()
    assert "node: 1" in plan  # the engine's
    assert "Ray runtime started" in (here.cwd / "runs" / "two" / "slurm" / "node-1.log").read_text()
    assert find_processes(str(here.cwd)) == []


def test_a_sweep_is_one_array_with_a_cap_and_a_failing_point_is_reported(here):
    sweep = ["optim.lr=1e30,1e-3", "hydra.launcher.max_parallel=1"]
    here.run(
        "train", "-m", "name=sweep", "schedule.num_steps=2", *(w for w in QUICK if "optim.lr" not in w), *ONE, *sweep
    )
    first, second = read_jobs(here)
    assert first["id"].partition("_")[0] == second["id"].partition("_")[0]
    assert (first["name"], second["name"]) == ("sweep-0", "sweep-1")
    waiting = wait_for(here, "sweep-1", lambda job: job["reason"] not in ("", "None", "Priority"))
    assert waiting["state"] == "PENDING" and waiting["reason"] == "JobArrayTaskLimit"
    failed = wait_for(here, "sweep-0", in_state("FAILED"))
    assert "grad_norm" in failed["log_tail"] and failed["step"] == 0
    assert wait_for(here, "sweep-1", in_state("COMPLETED"))["step"] == 2
    table, _, log = here.run("jobs", "sweep-0").partition("job.log:")
    assert "failed" in table and "gradient norm" in " ".join(table.split()) and "Exited with exit code 1" in log


def wait_for_start(shell: CommandLine, number: int, timeout_s: float = 300) -> int:
    """Wait until the job of the run has started so often and has gone three steps on; returns where it began."""
    run_dir = shell.cwd / "runs" / "low"
    started = run_dir / "slurm" / "starts.jsonl"  # written by the job, not by who submits it
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        starts = started.read_text().splitlines() if started.exists() else []
        saved = max((int(path.name[5:]) for path in run_dir.glob("checkpoints/step_*")), default=0)
        steps = shell.metrics("low") if (run_dir / "metrics.jsonl").exists() else {0: {}}
        if len(starts) == number and max(steps, default=0) >= saved + 3:
            return saved
        assert len(starts) <= number, starts
        time.sleep(0.5)
    raise AssertionError((run_dir / "slurm" / "job.log").read_text()[-3000:])


@pytest.mark.parametrize("comes_to_its_limit", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_preempted_run_goes_on_at_its_step_and_so_does_one_at_its_time_limit(here, comes_to_its_limit):
    here.run("train", "name=low", "schedule.num_steps=3000", *QUICK, *ONE)
    (job,) = read_jobs(here)
    assert wait_for_start(here, 1) == 0
    high = ["sbatch", "--partition=high", "--exclusive", "--nodes=2", "--wrap=sleep 1", "--output=/dev/null"]
    subprocess.run(high, check=True, capture_output=True, timeout=30)
    saved = [wait_for_start(here, 2)]
    if comes_to_its_limit:  # what SLURM itself sends so long before the limit, to the batch shell alone
        subprocess.run(["scancel", "--batch", "--signal=USR1", job["id"]], check=True, timeout=30)
        saved.append(wait_for_start(here, 3))
    log = (here.cwd / "runs" / "low" / "slurm" / "job.log").read_text()
    for before, step in zip([0, *saved], saved, strict=False):
        assert before + 3 <= step and f"resuming runs/low after step {step}" in log
    assert log.count("queued again") == comes_to_its_limit  # when it was preempted SLURM did
    starts = (here.cwd / "runs" / "low" / "slurm" / "starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["restart_count"] for line in starts] == list(range(len(saved) + 1))
    here.run("jobs", "--cancel", "low")
    over = wait_for(here, "low", in_state("CANCELLED"))
    assert over["num_restarts"] == len(saved)
    steps = sorted(here.metrics("low"))
    assert steps == list(range(steps[-1] + 1))
    assert max(path.name for path in here.cwd.glob("runs/low/checkpoints/*")) == f"step_{steps[-1]:08d}"
    assert find_processes(str(here.cwd)) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["cluster.partition=gpuu"], ["SLURM has no 'gpuu'", "did you mean 'gpu'?"]),
        (["hydra.launcher.sbatch.reservation=nothing"], ["sbatch refuses it", "eservation"]),
        (["hydra.launcher.prview=true"], ["hydra.launcher.prview", "did you mean 'preview'?"]),
        (["hydra.launcher.sbatch.partition=high"], ["is high; cluster.partition is gpu", "cluster.partition=high"]),
        (["hydra.launcher.engine_nodes.comment=x"], ["asks for machines that hold engines alone"]),
    ],
)
def test_what_cannot_run_is_told_and_nothing_is_submitted(here, words, says):
    output = here.run("train", "name=wrong", *QUICK, *ONE, *words, code=2)
    for text in says:
        assert text in " ".join(output.split())
    assert "wrong" not in squeue() and not (here.cwd / "runs" / "wrong" / "slurm" / "job.json").exists()


def test_all_problems_of_all_jobs_of_a_sweep_come_at_once(here):
    words = ["algo.group_size=4,1", "optim.lr=1e-3,-1", "hydra.launcher.sbatch.tiem=5"]
    output = here.run("train", "-m", "name=wrong", *ONE, *words, code=2)
    assert "optim.lr" in output and "algo.group_size" in output and "hydra.launcher.sbatch.tiem" in output
    assert "wrong" not in squeue()


def test_a_described_cluster_is_held_against_the_partition(here):
    words = ["cluster=h100_8x4", "topology=disaggregated", "model=qwen3_4b", "parallel.data_parallel_size=24"]
    output = here.run("train", "name=wrong", "hydra/launcher=slurm", *words, code=2)
    assert "needs 4 nodes of 8 GPUs; partition (default) has 2 of 2 usable nodes" in " ".join(output.split())
    words = [*words[:-1], "parallel.data_parallel_size=8", f"{MAIN}.num_engines=8"]
    output = here.run("train", "name=wrong", "hydra/launcher=slurm", *words, code=2)
    assert "asks for 4 nodes; 2 would be idle" in " ".join(output.split()) and "cluster.num_nodes=2" in output


def test_a_preview_prints_the_scripts_and_leaves_nothing(here):
    output = here.run("train", "-m", "seed=1,2", "name=seen", *QUICK, *ONE, "hydra.launcher.preview=true")
    assert "#SBATCH --array=0-1" in output and "runs=(runs/seen-0 runs/seen-1)" in output
    assert "seen" not in squeue() and not (here.cwd / "runs").exists()


def test_without_sbatch_it_is_said(shell, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    words = ["cluster=h100_8", "topology=colocated", "model=qwen3_4b", "parallel.data_parallel_size=8"]
    output = shell.run("train", "name=none", "hydra/launcher=slurm", *words, code=2)
    assert "this machine has no sbatch" in output
    shell.run("train", "name=none", "hydra/launcher=slurm", "hydra.launcher.preview=true", *words)
    assert shell.run("jobs").startswith("no jobs under runs")


def test_only_train_is_submitted(here):
    assert "seen  plan" in here.run("plan", "name=seen", *QUICK, *ONE)
    assert "only `train` is submitted" in here.run("plan", "-m", "name=seen", "seed=1,2", *QUICK, *ONE, code=2)
    assert "hydra" not in here.run("train", "name=seen", *QUICK, *ONE, "--cfg", "job")
    assert "seen" not in squeue()


def test_jobs_that_are_not_there_are_told(here):
    here.run("train", "name=real", *QUICK, *ONE, "schedule.num_steps=1", "hydra.launcher.sbatch.hold=true")
    (job,) = read_jobs(here)
    assert job["state"] == "PENDING" and job["reason"] == "JobHeldUser"
    again = here.run("train", "name=real", *QUICK, *ONE, code=2)
    assert f"is in use by job {job['id']} (pending)" in " ".join(again.split())
    assert "did you mean 'real'?" in here.run("jobs", "reel", code=2)
    here.run("jobs", "--cancel", job["id"])
    assert wait_for(here, "real", in_state("CANCELLED"))["step"] is None


def test_an_environment_of_squeue_changes_nothing(here, monkeypatch):
    monkeypatch.setenv("SQUEUE_FORMAT", "%A")
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    assert "SLURM_CONF" in os.environ
    here.run("train", "name=real", *QUICK, *ONE, "schedule.num_steps=1", "hydra.launcher.sbatch.hold=true")
    assert read_jobs(here)[0]["state"] == "PENDING"


def read_commands(heading: str) -> list[list[str]]:
    """Commands of a section of the README, as a shell would split them."""
    section = README.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^    rlrecipes (.*)$", section, flags=re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_readme_is_followed(here):
    preview, train, sweep, jobs, cancel = read_commands("On a cluster")
    assert "#SBATCH" in here.run(*preview) and squeue() == ""
    assert "quickstart_sft: job" in here.run(*train)
    here.run(*sweep)
    table = here.run(*jobs)
    assert all(name in table for name in ("quickstart_sft", *(f"quickstart_sft-{number}" for number in range(3))))
    wait_for(here, "quickstart_sft", lambda job: (job["step"] or 0) >= 3)
    here.run(*cancel)
    step = wait_for(here, "quickstart_sft", in_state("CANCELLED"))["step"]
    assert step >= 3
    here.run(*train)  # the same train command goes on
    done = wait_for(here, "quickstart_sft", in_state("COMPLETED"), timeout_s=900)
    assert done["step"] == done["num_steps"] == 100
    log = (here.cwd / "runs" / "quickstart_sft" / "slurm" / "job.log").read_text()
    (resumed,) = re.findall(r"resuming runs/quickstart_sft after step (\d+)", log)
    assert 3 <= int(resumed) <= step
    for number in range(3):
        assert wait_for(here, f"quickstart_sft-{number}", in_state("COMPLETED"), timeout_s=900)["step"] == 100
    client = MlflowClient(f"sqlite:///{here.cwd / 'runs' / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'rlrecipes'")
    found = sorted((run.info.run_name, run.info.status) for run in client.search_runs([experiment.experiment_id]))
    names = [
        "quickstart_sft",
        "quickstart_sft",
        *(f"quickstart_sft-{number}" for number in range(3)),
    ]  # and the sweep
    assert found == [(name, "FINISHED") for name in names]
    assert find_processes(str(here.cwd)) == []
