"""Every shipped recipe resolves and fits its cluster, with every pair of group options that a user may put into it."""

from __future__ import annotations

import itertools
import json

import pytest

from rlrecipes.config.compose import compose
from rlrecipes.errors import ConfigError
from rlrecipes.plan.cluster import read_cluster
from rlrecipes.plan.resolve import resolve

GPU_RECIPES = (
    "qwen2_5_0_5b",
    "qwen3_4b",
    "qwen3_4b_sft",
    "glm4_9b",
    "qwen3_30b_a3b",
    "glm4_7_30b_a3b",
    "glm4_5_355b_a32b",
    "deepseek_r1",
    "glm5_2_744b_a40b",
)
ALGOS = (
    "grpo",
    "dr_grpo",
    "rloo",
    "gspo",
    "cispo",
    "dapo",
    "ppo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "sft",
)
TOPOLOGIES = ("colocated", "disaggregated", "pd", "pd_colocated", "mixed")
SCHEDULES = ("short", "long")


def plan_of(*overrides):
    recipe = compose(list(overrides))
    problems = []
    cluster = read_cluster(recipe.config.cluster, recipe.config.runs_dir, problems, lambda address: ())
    return resolve(recipe.config, cluster.hosts, recipe.origins, recipe.problems, problems, cluster=cluster.node)


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_a_recipe_fits_the_cluster_it_names(name):
    plan = plan_of(f"recipe={name}")
    assert plan.memory.is_fitting
    assert plan.memory.max_sample_tokens >= plan.batch.max_sample_tokens
    assert plan.step_time.step_s > 0
    used = {(device.node, device.gpu) for device in plan.trainer.devices}
    assert len(used) == sum(host.num_gpus for host in plan.hosts)


def test_the_recipe_with_a_teacher_fits_when_the_teacher_is_named(tmp_path):
    shapes = compose(["model=qwen3_32b"]).config.model.shapes
    facts = {
        "model_type": "qwen3",
        "num_hidden_layers": shapes.num_layers,
        "hidden_size": shapes.hidden_size,
        "intermediate_size": shapes.ffn_hidden_size,
        "num_attention_heads": shapes.num_attention_heads,
        "num_key_value_heads": shapes.num_query_groups,
        "head_dim": shapes.kv_channels,
        "vocab_size": shapes.vocab_size,
        "max_position_embeddings": shapes.max_position_embeddings,
        "rms_norm_eps": shapes.norm_epsilon,
        "rope_theta": shapes.rotary_base,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(facts))
    plan = plan_of("recipe=qwen3_4b_opd", f"topology.served_models.teacher.path={tmp_path}")
    assert [model.name for model in plan.served_models] == ["policy", "teacher"]
    assert any("teacher" in role.name for role in plan.memory.roles)
    assert plan.memory.is_fitting


def pairs():
    yield from (((f"algo={algo}", f"topology={topology}")) for algo, topology in itertools.product(ALGOS, TOPOLOGIES))
    yield from (((f"algo={algo}", f"schedule={schedule}")) for algo, schedule in itertools.product(ALGOS, SCHEDULES))
    yield from (((f"topology={a}", f"schedule={b}")) for a, b in itertools.product(TOPOLOGIES, SCHEDULES))


@pytest.mark.parametrize(("first", "second"), list(pairs()), ids=lambda word: word.partition("=")[2])
def test_every_pair_of_options_works_as_it_reads(first, second):
    """On one node of 8 GPUs; what a pair cannot do is refused in words, and none of these is refused at all."""
    shared = ["model=qwen3_4b", "cluster=h200_8", "parallel=dp2", "data=reasoning_mix", "reward=reasoning_answer"]
    plan = plan_of(*shared, first, second)
    assert plan.trainer.num_ranks == 2


def test_a_pair_that_contradicts_itself_is_refused_in_words():
    with pytest.raises(ConfigError) as caught:
        plan_of("model=qwen3_4b", "cluster=h200_8", "topology=colocated", "weight_sync=distributed")
    assert any(problem.where == "weight_sync.transport" for problem in caught.value.problems)
