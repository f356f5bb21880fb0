"""`rlrecipes search`: what it prints can be run as printed, and nothing it could have chosen is better."""

from __future__ import annotations

import json
import shlex

import pytest

from rlrecipes.cli.search import run
from rlrecipes.config.compose import compose
from rlrecipes.errors import ConfigError, InputError
from rlrecipes.runner.resolution import resolve_recipe

MAIN = "topology.served_models.policy.server_groups.main"
TASK = (
    "model=qwen2_5_1_5b",
    "cluster=h200_2",
    "rollout.sampling.max_new_tokens=2048",
    "data.max_prompt_tokens=512",
    "schedule.prompts_per_step=32",
)


def search(capsys, *words):
    run([*words, "--format", "json"])
    return json.loads(capsys.readouterr().out)


def predict(*overrides):
    return resolve_recipe(compose(overrides)).step_time


def test_every_layout_resolves_as_printed_and_predicts_what_was_printed(capsys):
    found = search(capsys, *TASK, "top=4")
    assert found["num_candidates"] > 100
    assert len(found["candidates"]) == 4
    rates = [candidate["samples_per_s"] for candidate in found["candidates"]]
    assert rates == sorted(rates, reverse=True)
    for candidate in found["candidates"]:
        step = predict(*candidate["overrides"])
        assert step.model_dump(mode="json") == candidate["step_time"]
        assert candidate["samples_per_s"] == pytest.approx(step.samples_per_s)
        assert candidate["gpu_s_per_sample"] == pytest.approx(step.gpu_s / 256)


def test_the_table_ends_with_a_command_that_gives_the_first_layout(capsys):
    run([*TASK, "top=2"])
    text = capsys.readouterr().out
    command = text.splitlines()[-1]
    assert command.startswith("rlrecipes plan model=qwen2_5_1_5b")
    step = predict(*shlex.split(command)[2:])
    assert f"{step.step_s:.1f}" in text
    assert step.bottleneck.split(";")[0] in text


@pytest.mark.parametrize(
    "layout",
    [
        ("topology=colocated", "parallel.data_parallel_size=2", "parallel.max_tokens_per_micro_batch=2560"),
        ("topology=colocated", "parallel.data_parallel_size=2", "parallel.max_tokens_per_micro_batch=10240"),
        ("topology=colocated", "parallel=tp2", "parallel.sequence_parallel=true", f"{MAIN}.gpus_per_engine=2"),
        ("topology=colocated", "parallel=pp2", "parallel.max_tokens_per_micro_batch=5120"),
        ("topology=disaggregated", "weight_sync=distributed", "parallel.max_tokens_per_micro_batch=10240"),
    ],
)
def test_no_layout_that_could_be_chosen_is_better(capsys, layout):
    best = search(capsys, *TASK, "top=1")["candidates"][0]
    other = predict(*TASK, "parallel.max_tokens_per_micro_batch=5120", *layout)
    assert best["samples_per_s"] >= other.samples_per_s * (1 - 1e-9)


def test_cost_counts_gpus(capsys):
    fast = search(capsys, *TASK, "top=1")["candidates"][0]
    cheap = search(capsys, *TASK, "top=1", "objective=cost")["candidates"][0]
    assert cheap["gpu_s_per_sample"] <= fast["gpu_s_per_sample"]
    assert cheap["step_time"]["num_gpus"] == 1


def test_a_topology_can_be_fixed_and_one_that_the_recipe_contradicts_is_told(capsys):
    fixed = search(capsys, *TASK, "top=3", "topology=disaggregated")
    assert all("topology=disaggregated" in candidate["overrides"] for candidate in fixed["candidates"])
    told = search(capsys, *TASK, "top=1", f"{MAIN}.sglang.mem_fraction_static=0.8")
    assert set(told["skipped_topologies"]) == {"pd", "pd_colocated"}
    assert "server_groups.main" in told["skipped_topologies"]["pd"]


def test_engines_of_another_size_split_their_experts_accordingly(capsys):
    found = search(capsys, "recipe=qwen3_30b_a3b", "top=60")  # whose engines have TP 8 and EP 8
    split = [
        word for candidate in found["candidates"] for word in candidate["overrides"] if ".expert_parallel_size" in word
    ]
    assert split
    resolved = resolve_recipe(compose(next(c["overrides"] for c in found["candidates"] if split[0] in c["overrides"])))
    (group,) = resolved.policy.server_groups
    assert group.gpus_per_engine == group.expert_parallel_size < 8


def test_demonstrations_need_a_trainer_alone(capsys):
    found = search(capsys, *TASK, "algo=sft", "top=3")
    for candidate in found["candidates"]:
        step = predict(*candidate["overrides"])
        assert (step.rollout_s, step.weight_sync_s) == (0, 0)
        assert candidate["samples_per_s"] == pytest.approx(step.samples_per_s)
        assert step.num_gpus == 2


def test_memory_decides_what_is_recomputed(capsys):
    long = ("model=qwen3_8b", "cluster=h200_2", "rollout.sampling.max_new_tokens=30000", "data.max_prompt_tokens=2000")
    found = search(capsys, *long, "top=1")
    assert found["num_too_large"] > 0
    words = found["candidates"][0]["overrides"]
    assert any(word.startswith(("parallel.recompute", "parallel.optimizer", "parallel.context")) for word in words)
    assert resolve_recipe(compose(words)).step_time is not None


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["objective=speed"], "objective"),
        (["top=0"], "top"),
        (["top=few"], "top"),
        (["topology=multi_model"], "topology"),
        (["--format", "xml"], "rlrecipes search"),
        (["cluster=host"], "cluster"),
        (["model=kimi_k2", "cluster=h200_1"], "search"),
    ],
)
def test_what_cannot_be_searched_is_said(words, where):
    with pytest.raises(InputError) as caught:
        run([*TASK, *words])
    problem = caught.value.problems[0]
    assert problem.where == where
    assert problem.fix


def test_a_wrong_recipe_is_told_like_everywhere():
    with pytest.raises(ConfigError, match="group_sze"):
        run([*TASK, "algo.group_sze=4"])
