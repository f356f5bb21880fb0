"""The multi-turn recipe as a user runs it, in small: two turns, GRPO over both, the same again after a resume."""

from __future__ import annotations

import shutil

import pytest

from tests.integration.command_line import CommandLine

pytestmark = pytest.mark.timeout(600)
COMMON = [
    "schedule.prompts_per_step=4",
    "optim.num_warmup_train_steps=0",
    "data.tasks.num_train_rows=64",
    "data.tasks.num_eval_rows=8",
    "rollout.evaluation.num_prompts=8",
    "tracking=local",
    "deterministic=true",
]
TURNS = [
    "recipe=quickstart_multi_turn",
    "model=qwen3_tiny",
    "model.path=null",
    "model.shapes.num_layers=2",
    "model.shapes.hidden_size=32",
    "model.shapes.ffn_hidden_size=64",
    "model.shapes.kv_channels=8",
    "schedule.save_interval=2",
    "schedule.eval_interval=0",
    "schedule.num_train_steps=2",
    "algo.group_size=4",
    # A model that has not learned seldom ends an answer by itself.
    f"rollout.sampling.stop_token_ids={list(range(20))}",
    "rollout.sampling.max_new_tokens=8",
    "reward.name=lengths:is_short",
]
_REWARD = """
def is_short(rollout):
    return 1.0 if len(rollout.text) < 3 else 0.5 if len(rollout.text) < 5 else 0.0
"""


@pytest.fixture(scope="module")
def turns(tmp_path_factory, warm):
    shell = CommandLine(tmp_path_factory.mktemp("turns"), warm)
    (shell.cwd / "lengths.py").write_text(_REWARD)
    shell.run("train", *TURNS, "schedule.num_steps=4", *COMMON)
    yield shell
    shell.close()


def test_both_turns_are_sampled_and_trained(turns):
    metrics = turns.metrics("quickstart_multi_turn")
    assert sorted(metrics) == [0, 1, 2, 3, 4]
    for step in range(1, 5):
        assert 1 < metrics[step]["rollout/mean_turns"] <= metrics[step]["rollout/max_turns"] == 2
        assert metrics[step]["rollout/failed_fraction"] == 0
        assert metrics[step]["train/grad_norm"] > 0
    # The trainer sees the sequence that the engine saw, observation and all, or their logprobs would differ.
    assert metrics[1]["train/rollout_logprob_abs_diff_max"] < 1e-4
    assert turns.leftovers() == []


@pytest.mark.slow
def test_a_resumed_run_repeats_every_turn(turns, shell):
    shutil.copytree(turns.cwd / "runs", shell.cwd / "runs")
    shutil.copy(turns.cwd / "lengths.py", shell.cwd)
    shutil.rmtree(shell.cwd / "runs" / "quickstart_multi_turn" / "checkpoints" / "step_00000004")
    output = shell.run("train", *TURNS, "schedule.num_steps=4", *COMMON)
    assert "resuming runs/quickstart_multi_turn after step 2" in output
    assert shell.metrics("quickstart_multi_turn") == turns.metrics("quickstart_multi_turn")
