"""A run whose trainer and engines take turns on their memory learns what one without turns does, bit for bit."""

from __future__ import annotations

import json

import pytest

from tests.integration.command_line import SMALL

pytestmark = pytest.mark.timeout(600)
TURNS = ["topology.should_offload_trainer=true", "topology.should_offload_engines=true"]
NUM_STEPS = 4


def test_a_run_in_turns_is_stopped_resumed_and_ends_as_one_without(trained, shell):
    """Checkpoints and evaluations come every second step; a signal comes while the fourth is collected."""
    command = ["train", "name=run", f"schedule.num_steps={NUM_STEPS}", *SMALL, *TURNS]
    shell.run(*command, fate="rlrecipes.rollout.collector:Collector.collect:4:SIGINT", code=130)
    assert shell.leftovers() == []
    assert "resuming runs/run after step 3" in shell.run(*command)
    lines = (shell.cwd / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    spent_s = [m["time/offload_s"] for m in (json.loads(line)["metrics"] for line in lines) if "time/offload_s" in m]
    assert len(spent_s) == NUM_STEPS and min(spent_s) > 0
    found, expected = shell.metrics("run"), trained.metrics("run")
    assert sorted(found) == list(range(NUM_STEPS + 1))
    for step in range(NUM_STEPS):  # the last one of a shorter run is evaluated and saved where the other is not
        assert found[step] == expected[step], step
    assert found[NUM_STEPS]["train/loss"] == expected[NUM_STEPS]["train/loss"]
    assert (shell.cwd / "runs" / "run" / "hf" / "model.safetensors.index.json").exists()
    assert shell.leftovers() == []
