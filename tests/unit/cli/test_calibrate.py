"""`rlrecipes calibrate`: run directories in, constants out; what a run cannot tell is said."""

from __future__ import annotations

import dataclasses
import json

import pytest

from rlrecipes.cli.calibrate import run
from rlrecipes.config.compose import compose
from rlrecipes.errors import ConfigError, InputError
from rlrecipes.plan.lengths import draw_lengths
from rlrecipes.plan.memory import load_memory_constants
from rlrecipes.plan.rollout_time import compute_distribution
from rlrecipes.plan.step_inputs import read_step_inputs
from rlrecipes.plan.step_time import compute_step_time, load_time_constants
from rlrecipes.runner.resolution import resolve_recipe

GPU = (
    "model=qwen3_4b",
    "topology=colocated",
    "cluster=h200_8",
    "parallel.data_parallel_size=8",
    "data.max_prompt_tokens=1024",
    "rollout.sampling.max_new_tokens=8192",
    "parallel.max_tokens_per_micro_batch=16384",
    "schedule.prompts_per_step=64",
)
CPU_METRICS = {  # of a quickstart run
    "rollout/time_s": 0.57,
    "rollout/longest_tokens_per_s": 39.0,
    "rollout/num_rollouts": 512.0,
    "response/mean_tokens": 6.9,
    "response/max_tokens": 11.0,
    "response/truncated_fraction": 0.0,
    "prompt/mean_tokens": 6.8,
    "train/time_s": 0.3,
    "weight_sync/time_s": 0.03,
}


@pytest.fixture
def make_run(tmp_path):
    def build(name, overrides, metrics):
        path = tmp_path / name
        path.mkdir()
        (path / "plan.yaml").write_text(resolve_recipe(compose(overrides)).to_yaml())
        steps = [({key: 10 * value for key, value in metrics.items()}), metrics, metrics, metrics]  # the first warms up
        lines = [json.dumps({"step": n, "time": float(n), "metrics": step}) for n, step in enumerate(steps, 1)]
        (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return path

    return build


def measure(overrides, **true):
    """Metrics of a step that takes what other constants predict."""
    constants = dataclasses.replace(load_time_constants(None), **true)
    inputs = read_step_inputs(resolve_recipe(compose(overrides)))
    step = compute_step_time(inputs, constants)
    distribution = compute_distribution(inputs, constants)
    lengths = draw_lengths(distribution, inputs.num_samples, inputs.seed)
    return {
        "rollout/time_s": step.rollout_s,
        "rollout/longest_tokens_per_s": step.longest_tokens_per_s,
        "rollout/num_rollouts": float(len(lengths)),
        "rollout/num_filtered_groups": 0.0,
        "response/mean_tokens": sum(lengths) / len(lengths),
        "response/max_tokens": float(max(lengths)),
        "response/truncated_fraction": lengths.count(8192) / len(lengths),
        "prompt/mean_tokens": float(distribution.prompt_tokens),
        "train/time_s": step.train_s * (1 - 0.3 * 2 / 3),
        "train/forward_only_fraction": 0.3,
        "weight_sync/time_s": step.weight_sync_s,
    }


TRUE = {"decode_bandwidth_fraction": 0.6, "train_flops_fraction": 0.35, "checksum_bytes_per_s": 6e8}


def test_a_run_is_fitted_saved_and_used(make_run, tmp_path, capsys):
    path, file = make_run("a", GPU, measure(GPU, **TRUE)), tmp_path / "own.yaml"
    run([str(path), "--save", str(file)])
    text = capsys.readouterr().out
    fitted = load_time_constants(str(file))
    for name, value in TRUE.items():
        assert getattr(fitted, name) == pytest.approx(value, rel=0.05)
        assert name in text
    assert "kept sync_link_fraction" in text
    plan = resolve_recipe(compose([*GPU, f"calibration={file}"]))
    metrics = measure(GPU, **TRUE)
    assert plan.step_time.rollout_s == pytest.approx(metrics["rollout/time_s"], rel=0.03)
    assert plan.step_time.train_s == pytest.approx(metrics["train/time_s"] / 0.8, rel=0.03)
    assert plan.step_time.weight_sync_s == pytest.approx(metrics["weight_sync/time_s"], rel=0.03)


def test_old_new_and_residuals_as_json(make_run, capsys):
    path = make_run("a", GPU, measure(GPU, **TRUE))
    run([str(path), "--format", "json"])
    data = json.loads(capsys.readouterr().out)
    shipped = load_time_constants(None)
    assert data["fitted"]["train_flops_fraction"]["old"] == shipped.train_flops_fraction
    assert data["fitted"]["train_flops_fraction"]["new"] == pytest.approx(0.35, rel=0.05)
    for residual in data["residuals"]:
        assert residual["after"] == pytest.approx(residual["measured"], rel=0.03)
    assert data["notes"] == []


def test_filtered_groups_keep_the_rollouts_time_out(make_run, capsys):
    metrics = measure(GPU, **TRUE) | {"rollout/num_filtered_groups": 3.0}
    run([str(make_run("a", GPU, metrics)), "--format", "json"])
    assert "rollout_s" not in {residual["name"] for residual in json.loads(capsys.readouterr().out)["residuals"]}


def test_a_run_on_a_cpu_tells_of_lengths_alone(make_run, capsys):
    run([str(make_run("cpu", [], CPU_METRICS))])
    text = capsys.readouterr().out
    assert "response_sigma" in text
    assert "no GPU is described" in text
    assert "kept train_flops_fraction: no run measured" in text


@pytest.mark.parametrize("missing", ["plan.yaml", "metrics.jsonl"])
def test_what_is_no_run_is_said(make_run, missing):
    path = make_run("cpu", [], CPU_METRICS)
    (path / missing).unlink()
    with pytest.raises(InputError, match=f"has no {missing}"):
        run([str(path)])


@pytest.mark.parametrize("change", [{"response/mean_tokens": float("nan")}, {"response/mean_tokens": 0.0}])
def test_lengths_that_are_none_are_passed_over(make_run, change):
    with pytest.raises(InputError, match="tell of no constant"):
        run([str(make_run("cpu", [], CPU_METRICS | change))])


def test_a_run_that_tells_of_nothing_is_said(make_run):
    with pytest.raises(InputError, match="tell of no constant"):
        run([str(make_run("cpu", [], {"train/time_s": 1.0}))])


def test_a_broken_plan_and_a_full_disk_are_said(make_run, tmp_path):
    path = make_run("cpu", [], CPU_METRICS)
    with pytest.raises(InputError, match="cannot be written"):
        run([str(path), "--save", str(tmp_path / "no" / "where.yaml")])
    (path / "plan.yaml").write_text("version: 1")
    with pytest.raises(ConfigError):
        run([str(path)])


def test_memory_that_was_measured_is_fitted_and_saved(make_run, tmp_path, capsys):
    path = make_run("m", GPU, {})
    (path / "metrics.jsonl").unlink()
    lines = [("context", "trainer", 5e8), ("train", "engine", 1.5e9), ("rollout", "trainer", 2.8e9)]
    text = "\n".join(json.dumps({"phase": p, "owner": o, "num_bytes": b}) for p, o, b in lines)
    (path / "memory.jsonl").write_text(text)
    run([str(path), "--save", str(tmp_path / "own.yaml")])
    saved = load_memory_constants(str(tmp_path / "own.yaml"))
    assert saved.cuda_context_bytes == pytest.approx(5e8, rel=1e-3)
    assert saved.trainer_workspace_bytes == pytest.approx(2.8e9 - 5e8 - 2 * saved.nccl_group_bytes, rel=1e-3)
    graphs = 256 * saved.engine_graph_request_bytes
    assert saved.engine_workspace_bytes == pytest.approx(1.5e9 - 5e8 - graphs, rel=1e-3)
    assert "rollout, trainer: bytes" in capsys.readouterr().out
    run([str(path), "--format", "json"])
    fitted = {"cuda_context_bytes", "trainer_workspace_bytes", "engine_workspace_bytes"}
    assert {*json.loads(capsys.readouterr().out)["fitted"]} == fitted
    for wrong in ('{"phase": "sleep", "owner": "engine", "num_bytes": 1}', "{", '{"phase": "train"}'):
        (path / "memory.jsonl").write_text(wrong)
        with pytest.raises(InputError, match=r"memory\.jsonl"):
            run([str(path)])
