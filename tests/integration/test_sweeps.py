"""Sweeps: judged before anything starts, interrupted and continued, with a point that fails, side by side."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.integration.command_line import SMALL, CommandLine

pytestmark = pytest.mark.timeout(600)
RUN = ["name=swept", "schedule.num_steps=2", "schedule.should_export_hf=false", *SMALL]
PRUNED = ["pruner=median", "pruner.min_points=1"]
STEP = "rlrecipes.runner.loop:Loop._learn_from_rollouts"
OTHERS = """
def breaks(rollout):
    raise ValueError("it is broken")

def count_half(rollout):
    return count_vowels(rollout) / 2
"""


@pytest.fixture
def shell(tmp_path, warm):
    found = CommandLine(tmp_path, warm)
    yield found
    found.close()


def states(shell: CommandLine) -> dict[str, str]:
    """Run -> how its point stands, from the sweep's files."""
    points = [json.loads(path.read_text()) for path in (shell.cwd / "runs/sweeps/swept/points").glob("*.json")]
    return {point["run_name"]: point["state"] for point in points}


def test_all_points_are_judged_before_the_first_starts(shell):
    output = shell.run("train", "-m", *RUN, "seed=1,-2", "optim.lr=2e-3,-1", code=2)
    assert "seed (set in override seed=-2): is -2" in output
    assert "(point optim.lr=0.002 seed=-2 and 1 more)" in output
    assert "(point optim.lr=-1 seed=1 and 1 more)" in output
    assert not (shell.cwd / "runs").exists()
    assert "all points would share it" in shell.run("train", "-m", "seed=1,2", *RUN, "run_dir=there", code=2)


def test_a_sweep_is_interrupted_goes_on_survives_a_failure_and_stops_bad_points_early(shell):
    with (shell.cwd / "letters.py").open("a") as file:
        file.write(OTHERS)
    rewards = "reward.name=letters:count_vowels,letters:count_half"
    fate = f"{STEP}:3:SIGINT"  # the first step of the second point
    shell.run("train", "-m", *RUN, *PRUNED, rewards, fate=fate, code=130)
    assert states(shell) == {"swept-0": "finished", "swept-1": "interrupted"}
    first = (shell.cwd / "runs/swept-0/metrics.jsonl").read_bytes()
    assert shell.leftovers() == []

    # Another order: a point is its recipe, not its place.
    rewards = "reward.name=letters:breaks,letters:count_half,letters:count_vowels"
    output = shell.run("train", "-m", *RUN, *PRUNED, rewards, code=1)
    assert "swept-0: finished, skipped" in output and "swept-2 failed: " in output
    assert "swept-1 is stopped early: reward/mean was" in output and "of what 1 others had at step 1" in output
    assert states(shell) == {"swept-0": "finished", "swept-1": "pruned", "swept-2": "failed"}
    told = output.rpartition("rlrecipes: ")[2]
    assert "1 of 3 points failed" in told and "it is broken" in told
    assert sorted(shell.metrics("swept-1")) == [0, 1]
    assert "reward/mean was" in (shell.cwd / "runs/swept-1/report.html").read_text()

    rewards = "reward.name=letters:count_half,letters:count_vowels"
    assert "swept-1: pruned, skipped" in shell.run("train", "-m", *RUN, *PRUNED, rewards)
    output = shell.run("train", "-m", *RUN, rewards)  # without the pruner it goes on
    assert "swept-0: finished, skipped" in output and "after step 1" in output
    assert states(shell) == {"swept-0": "finished", "swept-1": "finished", "swept-2": "failed"}
    assert (shell.cwd / "runs/swept-0/metrics.jsonl").read_bytes() == first
    assert sorted(shell.metrics("swept-1")) == [0, 1, 2]
    assert shell.metrics("swept-0")[1] != shell.metrics("swept-1")[1]
    told = json.loads(shell.run("compare", "--sweep", "swept", "--format", "json"))
    assert "swept-0" in json.dumps(told) and "swept-1" in json.dumps(told)
    assert shell.leftovers() == []


def test_optuna_asks_for_points_and_goes_on(shell):
    asked = ["hydra/sweeper=optuna", "hydra.sweeper.metric=reward/mean"]
    command = ["train", "-m", *RUN, *asked, "optim.lr=tag(log,interval(1e-5,1e-3))"]
    assert "only for a sweep" in shell.run("train", *RUN, *asked, code=2)
    assert "waits for each" in shell.run(*command, "hydra/launcher=slurm", code=2)
    fate = f"{STEP}:3:SIGINT"  # the first step of the second point
    assert "swept-0: reward/mean" in shell.run(*command, "hydra.sweeper.num_points=2", fate=fate, code=130)
    assert states(shell) == {"swept-0": "finished", "swept-1": "interrupted"}
    output = shell.run(*command, "hydra.sweeper.num_points=2")
    assert "swept-1: reward/mean" in output and "swept-0: step" not in output
    assert states(shell) == {"swept-0": "finished", "swept-1": "finished"}
    assert "step 2/2" not in shell.run(*command, "hydra.sweeper.num_points=2")  # there are as many as were asked for
    assert shell.leftovers() == []


@pytest.mark.slow
def test_points_run_side_by_side(shell):
    side_by_side = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    output = shell.run("train", "-m", "seed=1,2", *RUN, *side_by_side)
    assert states(shell) == {"swept-0": "finished", "swept-1": "finished"}
    steps = [output.index(f"swept-{number}: step {step}/2") for number in (0, 1) for step in (1, 2)]
    assert steps[2] < steps[1] or steps[0] < steps[3]  # neither ended before the other began
    assert shell.metrics("swept-0")[1] != shell.metrics("swept-1")[1]
    assert shell.leftovers() == []


@pytest.mark.slow
@pytest.mark.parametrize("num_jobs", [1, 2])
def test_points_side_by_side_are_interrupted_in_order(shell, num_jobs):
    side_by_side = ["hydra/launcher=joblib", f"hydra.launcher.n_jobs={num_jobs}"]
    command = ["train", "-m", "seed=1,2,3", *RUN, "schedule.save_interval=500", *side_by_side]
    process = shell.start(*command, "schedule.num_steps=500")
    for number in range(num_jobs):
        shell.wait_for_step(f"swept-{number}", 2, process)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    expected = ["interrupted"] * num_jobs + ["waiting"] * (3 - num_jobs)
    assert states(shell) == {f"swept-{number}": state for number, state in enumerate(expected)}
    for number in range(num_jobs):
        assert list((shell.cwd / f"runs/swept-{number}/checkpoints").glob("step_*/state.json"))
    assert shell.leftovers() == []
