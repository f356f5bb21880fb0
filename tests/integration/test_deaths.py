"""A run that dies at chosen moments, again and again, ends like one that was left alone; nothing outlives a death."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time

import pytest

from tests.integration.command_line import NUM_STEPS, SMALL

pytestmark = pytest.mark.timeout(900)

RECIPE = ["name=run", f"schedule.num_steps={NUM_STEPS}", *SMALL]
"""The undisturbed run's."""
STOPPED = "stopped by a signal; rerun the same command to go on from the last checkpoint"
BUCKET = "rlrecipes.weight_sync.transports:TensorTransport.send"
TRAINER_FILES = "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.finish"
STATE_FILE = "rlrecipes.runner.checkpoint:_write_durably"
EVALUATION = "rlrecipes.tracking.progress:LineProgress.update_evaluation"
EXPORT = "rlrecipes.engines.megatron.hf_directory:run_write_index"
SERVERS_START = "rlrecipes.engines.sglang.process:ServerProcess.wait_until_ready"
RAY_STARTS = "ray._private.node:Node.start_ray_processes"
RAY_HAS_STARTED = "ray._private.worker:connect"
NUM_BUCKETS = 7
"""Of a sync of that model."""


def die(shell, fate):
    """Meet a fate; returns what was printed and the checkpoints that are left."""
    number = signal.Signals[fate.rpartition(":")[2]]
    is_killed = number is signal.SIGKILL
    output = shell.run("run", "plan.yaml", fate=fate, code=-number if is_killed else 128 + number)
    assert is_killed or STOPPED in output
    assert "Traceback" not in output
    assert shell.leftovers() == []
    return output, sorted(path.name for path in (shell.cwd / "runs" / "run").glob("checkpoints/*"))


def check_like(trained, shell):
    """Numbers, cursor and weights are those of the undisturbed run, bit for bit."""
    assert shell.metrics("run") == trained.metrics("run")
    last = f"runs/run/checkpoints/step_{NUM_STEPS:08d}/state.json"
    states = [json.loads((each.cwd / last).read_text()) for each in (shell, trained)]
    for key in ("step", "weight_version", "is_evaluation_due", "collector"):
        assert states[0][key] == states[1][key]
    weights = [list((each.cwd / "runs/run/hf").glob("*.safetensors")) for each in (shell, trained)]
    assert weights[0]
    assert [file.read_bytes() for file in weights[0]] == [file.read_bytes() for file in weights[1]]
    assert not list((shell.cwd / "runs" / "run").glob("**/.draft*"))


def test_a_run_that_dies_again_and_again_ends_like_one_left_alone(trained, shell):
    plan_hash = shell.run("plan", *RECIPE, "--save", "plan.yaml").split()[1]
    assert f"plan {plan_hash}" in trained.output
    output, left = die(
        shell, f"{BUCKET}:{2 * NUM_BUCKETS + 2}:SIGKILL"
    )  # of the sync after step 2, which is to be saved
    assert "resuming" not in output
    assert left == []
    assert max(shell.metrics("run")) == 1

    _, left = die(shell, f"{TRAINER_FILES}:2:SIGKILL")
    assert left == [".draft_step_00000004", "step_00000002"]

    output, left = die(shell, f"{EXPORT}:1:SIGKILL")
    assert "resuming runs/run after step 2" in output
    assert "step 4: held-out accuracy" in output
    assert left == ["step_00000004", "step_00000006"]
    assert not (shell.cwd / "runs" / "run" / "hf").exists()

    output = shell.run("run", "plan.yaml")
    assert f"resuming runs/run after step {NUM_STEPS}" in output
    check_like(trained, shell)


@pytest.mark.slow
def test_the_same_of_every_other_moment(trained, shell):
    fates = [f"rlrecipes.runner.build:build_inputs:1:{number}" for number in ("SIGTERM", "SIGINT", "SIGKILL")]
    fates += [
        f"{RAY_HAS_STARTED}:1:SIGKILL",
        f"{RAY_STARTS}:1:SIGTERM",
        f"{RAY_STARTS}:1:SIGINT",
        f"{SERVERS_START}:1:SIGINT",
    ]
    fates += [f"{SERVERS_START}:1:SIGTERM", f"{EVALUATION}:3:SIGINT"]
    fates += [f"{EVALUATION}:3:SIGTERM", f"{EVALUATION}:3:SIGKILL", f"{EVALUATION}:11:SIGKILL"]
    fates += [f"{STATE_FILE}:{count}:SIGKILL" for count in (1, 2, 1)]
    fates += [f"{TRAINER_FILES}:1:SIGKILL", "rlrecipes.engines.megatron.hf_directory:publish:1:SIGKILL"]
    shell.run("plan", *RECIPE, "tracking=mlflow", "--save", "plan.yaml")  # which has a thread that takes signals
    for fate in fates:
        die(shell, fate)
    shell.run("run", "plan.yaml")
    check_like(trained, shell)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_the_same_of_random_moments(trained, shell, seed):
    draw = random.Random(seed)
    shell.run("plan", *RECIPE, "--save", "plan.yaml")
    started_s = time.monotonic()
    shell.run("train", *[word.replace("name=run", "name=other") for word in RECIPE])
    duration_s = time.monotonic() - started_s
    num_deaths = 0
    while num_deaths < 10:
        process = shell.start("run", "plan.yaml")
        try:
            process.wait(draw.uniform(0.0, duration_s))
            break  # it was done
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        num_deaths += 1
        assert shell.leftovers() == []
    shell.run("run", "plan.yaml")
    check_like(trained, shell)
