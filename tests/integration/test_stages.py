"""The quickstart's two stages in small: SFT, GRPO from its weights, MLflow, and the closing words."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from rlrecipes.tracking.logged_runs import load_runs
from rlrecipes.tracking.metrics import find_metric, iterate_metrics
from tests.integration.command_line import CommandLine

pytestmark = pytest.mark.timeout(600)
SMALL = [
    "schedule.prompts_per_step=4",
    "schedule.save_interval=2",
    "optim.num_warmup_train_steps=0",
    "rollout.evaluation.num_prompts=8",
    "rollout.evaluation.num_samples_per_prompt=2",
    "rollout.evaluation.sampling.temperature=1.0",
    "rollout.sampling.max_new_tokens=8",
    "data.tasks.num_train_rows=64",
    "data.tasks.num_eval_rows=8",
]
TINY = [
    "model.shapes.num_layers=2",
    "model.shapes.hidden_size=32",
    "model.shapes.ffn_hidden_size=64",
    "model.shapes.kv_channels=8",
    "data.max_train_rows=32",
]
PPO = [
    "algo=ppo",
    "algo.group_size=2",
    "algo.distillation={teacher_path: runs/quickstart_grpo/hf, teacher_model: null, form: topk, top_k: 4, coef: 0.1,"
    " is_alone: false}",
    "algo.overlong={buffer_tokens: 4, penalty_coef: 0.5, should_filter: true}",
    "algo.off_policy.correction=token_tis",
    "algo.off_policy.opsm_delta=0.5",
    "schedule.num_train_steps=2",
]
"""Everything that adds metrics of its own, at once."""


@pytest.fixture(scope="module")
def stages(tmp_path_factory, warm):
    shell = CommandLine(tmp_path_factory.mktemp("stages"), warm)
    shell.run("train", "recipe=quickstart_sft", "schedule.num_steps=3", *SMALL, *TINY)
    kl = ["algo.kl.placement=reward", "algo.kl.coef=0.01", "algo.kl.estimator=k1"]
    shell.run("train", "recipe=quickstart", "schedule.num_steps=2", *kl, *SMALL)
    shell.run("train", "recipe=quickstart", "schedule.num_steps=2", *PPO, *SMALL)
    yield shell
    shell.close()


def raw_metrics(shell, name):
    lines = (shell.cwd / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["metrics"]) for record in map(json.loads, lines)]


def test_sft_learns_and_measures(stages):
    metrics = stages.metrics("quickstart_sft")
    assert sorted(metrics) == [0, 1, 2, 3]
    assert metrics[3]["sft/loss"] < metrics[1]["sft/loss"]
    assert "eval/spell_backward/pass_at_2" in metrics[3]
    assert stages.leftovers() == []


def test_every_metric_of_the_catalogue_is_logged_by_some_run(stages):
    runs = ("quickstart_sft", "quickstart_grpo", "quickstart_ppo")
    logged = {name for run in runs for _, m in raw_metrics(stages, run) for name in m}
    found = {metric.name for name in logged if (metric := find_metric(name))}
    expected = {metric.name for metric in iterate_metrics()} - found
    assert all("/gpu_" in name for name in expected), expected  # of GPUs, which are not here


@pytest.mark.parametrize("name", ["quickstart_sft", "quickstart_grpo"])
def test_mlflow_has_one_run_with_the_numbers_of_the_file(stages, name):
    metric = "eval/spell_backward/accuracy"
    (run,) = load_runs(f"sqlite:///{stages.cwd / 'runs' / 'mlflow.db'}", [name], metrics=[metric])
    assert run.status == "FINISHED"
    assert run.params["schedule.prompts_per_step"] == "4"
    expected = {step: metrics[metric] for step, metrics in raw_metrics(stages, name) if metric in metrics}
    found = {record.step: record.metrics[metric] for record in run.records if metric in record.metrics}
    assert found == pytest.approx(expected)


def test_the_closing_words_tell_what_was_learned(stages):
    done = subprocess.run(
        [sys.executable, "-m", "rlrecipes.cli.quickstart"], cwd=stages.cwd, capture_output=True, text=True, check=True
    )
    assert "GRPO" in done.stdout
    assert "after 2 steps" in done.stdout
    assert (stages.cwd / "runs" / "quickstart.png").exists()


@pytest.mark.slow
def test_sft_ends_the_step_that_a_signal_meets_and_goes_on_after_it(stages, tmp_path, warm):
    """The last step is taken again from the checkpoint before it, on the same samples."""
    shell = CommandLine(tmp_path, warm)
    command = ["train", "recipe=quickstart_sft", "schedule.num_steps=3", "tracking=local", *SMALL, *TINY]
    try:
        shutil.copytree(stages.cwd / "runs", shell.cwd / "runs")
        shutil.rmtree(shell.cwd / "runs" / "quickstart_sft" / "checkpoints" / "step_00000003")
        output = shell.run(*command, fate="rlrecipes.runner.loop:Loop._learn_from_samples:1:SIGINT", code=130)
        assert "after step 2" in output
        assert "rerun the same command" in output
        assert shell.leftovers() == []
        output = shell.run(*command)
        assert "after step 3" in output
        assert "step 3: held-out accuracy" in output
        expected = stages.metrics("quickstart_sft")[3]
        assert shell.metrics("quickstart_sft")[3]["sft/loss"] == pytest.approx(expected["sft/loss"], abs=1e-5)
    finally:
        shell.close()


@pytest.mark.slow
def test_a_sweep_trains_each_of_its_runs(stages, tmp_path, warm):
    shell = CommandLine(tmp_path, warm)
    try:
        shutil.copytree(stages.cwd / "runs" / "quickstart_sft", shell.cwd / "runs" / "quickstart_sft")
        recipe = ["recipe=quickstart", "schedule.num_steps=1", "tracking=local", "schedule.should_export_hf=false"]
        shell.run("train", "-m", "seed=1,2", *recipe, *SMALL)
        first, second = shell.metrics("quickstart_grpo-0"), shell.metrics("quickstart_grpo-1")
        assert sorted(first) == sorted(second) == [0, 1]
        assert first[1] != second[1]
        assert shell.leftovers() == []
    finally:
        shell.close()
