"""Every shipped recipe resolves; every rule refuses what it should; a Plan survives its YAML."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlrecipes.config.compose import compose
from rlrecipes.errors import ConfigError
from rlrecipes.plan.difference import compute_difference
from rlrecipes.plan.nodes import HostNode, load_plan
from rlrecipes.plan.resolve import resolve

HOSTS = (HostNode(name="here", num_cpus=2, num_gpus=0, memory_bytes=1 << 34),)
CONF = Path(__file__).parents[3] / "conf"


def plan_of(*overrides, hosts=HOSTS):
    recipe = compose(overrides)
    return resolve(recipe.config, hosts, recipe.origins)


def problems_of(*overrides, hosts=HOSTS):
    with pytest.raises(ConfigError) as caught:
        plan_of(*overrides, hosts=hosts)
    return {problem.where: problem for problem in caught.value.problems}


@pytest.fixture
def hf_dir(tmp_path):
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 128,
        "rope_parameters": {"rope_theta": 10000.0},
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_shapes_come_from_config_json(hf_dir):
    random = plan_of().model
    read = plan_of("model=hf", "model.name=x", f"model.path={hf_dir}").model
    assert read.shapes == random.shapes
    assert (
        read.num_parameters
        == random.num_parameters
        == 4 * (128 * (4 + 2 * 2) * 32 + 4 * 32 * 128 + 2 * 32 + 3 * 128 * 384 + 2 * 128) + 128 * 128 + 128
    )


@pytest.mark.parametrize(
    ("overrides", "is_told"),
    [
        ([], False),
        (["gpus_per_engine=2"], True),
        (["gpus_per_engine=2", "worker_type=placeholder"], False),
        (["gpus_per_engine=2", "data.eval_path=null", "schedule.eval_interval=0", "algo=sft"], False),
    ],
)
def test_a_plan_says_that_shards_are_not_verified(overrides, is_told):
    main = "topology.served_models.policy.server_groups.main"
    topology = ("topology=colocated", "parallel.data_parallel_size=2", f"{main}.num_engines=1")
    words = [word if word.startswith(("data", "schedule", "algo")) else f"{main}.{word}" for word in overrides]
    plan = plan_of(*topology, *words, hosts=(HostNode(name="gpu", num_cpus=8, num_gpus=2, memory_bytes=1 << 38),))
    assert any("hashes its shards" in note for note in plan.notes) == is_told


def test_shapes_that_disagree_with_config_json_name_the_field(hf_dir):
    found = problems_of(f"model.path={hf_dir}", "model.shapes.num_layers=3")
    assert set(found) == {"model.shapes.num_layers"}
    assert "4" in found["model.shapes.num_layers"].fix


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["model.path=/nowhere"], "model.path"),
        (["model.shapes=null"], "model"),
        (["model.shapes.vocab_size=5"], "model.shapes.vocab_size"),
        (["topology.device=cuda"], "topology"),
        (
            ["topology.served_models.policy.server_groups.main.sglang.host=0.0.0.0"],
            "topology.served_models.policy.server_groups.main.sglang.host",
        ),
    ],
)
def test_each_judge_beside_the_rules_refuses_with_reason_and_fix(overrides, where):
    problem = problems_of(*overrides)[where]
    assert problem.problem
    assert problem.fix


def test_problems_of_all_rules_come_together_with_their_origin():
    found = problems_of("algo.group_size=1", "rollout.sampling.temperature=0", "schedule.num_train_steps=3")
    assert {"algo.group_size", "rollout.sampling.temperature", "schedule.num_train_steps"} <= set(found)
    assert found["algo.group_size"].origin == "override algo.group_size=1"


def test_batch_arithmetic_is_exact():
    batch = plan_of("schedule.prompts_per_step=12", "schedule.num_train_steps=3", "algo.group_size=4").batch
    assert batch.rollouts_per_step == 48 == batch.rollouts_per_train_step * batch.num_train_steps
    assert batch.prompts_per_train_step == 4


def test_a_plan_survives_its_yaml(tmp_path):
    plan = plan_of("recipe=quickstart_sft", "optim.lr=1e-5")
    path = tmp_path / "plan.yaml"
    path.write_text(plan.to_yaml())
    again = load_plan(path)
    assert again == plan
    assert again.hash == plan.hash


def test_the_hash_sees_every_choice_but_not_where_it_was_made():
    base = plan_of()
    assert plan_of("optim.lr=1e-6").hash == base.hash
    assert plan_of("optim.lr=2e-6").hash != base.hash
    difference = compute_difference(base.to_data(), plan_of("optim.lr=2e-6").to_data())
    assert difference["trainer.optim.lr"] == (1e-6, 2e-6)


@pytest.mark.parametrize("text", ["", "[1]", "version: 1\nname: x\n", "a: [", "version: 99\n"])
def test_what_is_no_plan_is_said(tmp_path, text):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"plan\.yaml"):
        load_plan(path)


def test_gpus_are_placed_colocated_or_apart():
    hosts = (HostNode(name="gpu", num_cpus=8, num_gpus=2, memory_bytes=1 << 38),)
    sglang = "topology.served_models.policy.server_groups.main.engine=sglang"
    colocated = plan_of("topology.device=cuda", sglang, hosts=hosts)
    assert colocated.trainer.devices[0].gpu == 0
    assert colocated.policy.engines[0].devices[0].gpu == 0
    own = "topology.served_models.policy.server_groups.main.placement=disaggregated"
    apart = plan_of("topology.device=cuda", sglang, own, "weight_sync=distributed", hosts=hosts)
    assert apart.policy.engines[0].devices[0].gpu == 1


@pytest.mark.parametrize("path", sorted(p for p in CONF.rglob("*.yaml") if p.parent != CONF), ids=lambda p: p.stem)
def test_every_shipped_option_composes(path, hf_dir):
    group, option = path.parent.relative_to(CONF).as_posix(), path.stem
    main = "topology.served_models.policy.server_groups.main"
    mounted = {"gpu": "cluster.gpu", "server_group": main, "served_model": "topology.served_models.policy"}
    names = ("reference", "reward", "teacher")
    needed = {
        "model/hf": ["model.name=x", f"model.path={hf_dir}"],
        "data/jsonl": ["data.name=x", "data.train_path=x.jsonl"],
        "topology/external": [f"{main}.urls=[http://here:1]"],
        "server_group/external": [f"{main}.urls=[http://here:1]"],
        "topology/multi_model": [f"topology.served_models.{name}.path=x" for name in names],
        "topology/embedded_teacher": ["topology.served_models.teacher.path=x"],
        "topology/served_teacher": ["topology.served_models.teacher.path=x"],
        "recipe/qwen3_4b_opd": ["topology.served_models.teacher.path=x"],
        "served_model/frozen": ["topology.served_models.policy.path=x"],
    }.get(f"{group}/{option}", [])
    if group in mounted:
        group = f"{group}@{mounted[group]}"
    compose([f"{group}={option}", *needed])


def test_changes_are_what_the_defaults_did_not_set(hf_dir):
    assert plan_of().changes == {}
    plan = plan_of("model=hf", "model.name=x", f"model.path={hf_dir}", "optim.lr=3e-6", "parallel=tp2")
    assert plan.changes["optim.lr"] == 3e-6
    assert plan.changes["parallel.tensor_model_parallel_size"] == 2
    assert plan.changes["model.alphabet"] is None
    assert "parallel.num_threads" not in plan.changes  # single.yaml, which tp2 extends, is a default
    assert "optim.lr: 3e-06  # override optim.lr=3e-6" in plan.describe_changes()


def test_the_trainer_samples_as_the_engines_do():
    plan = plan_of("rollout.sampling.temperature=0.7", "rollout.sampling.top_p=0.9", "rollout.sampling.top_k=40")
    assert (plan.trainer.temperature, plan.trainer.top_p, plan.trainer.top_k) == (0.7, 0.9, 40)
    assert any("a sampled token always counts as kept" in note for note in plan.notes)
    assert not any("counts as kept" in note for note in plan_of().notes)
    # what is imitated was not sampled
    sft = plan_of("recipe=quickstart_sft", "rollout.sampling.top_p=0.9", "rollout.sampling.min_new_tokens=1").trainer
    assert (sft.temperature, sft.top_p, sft.top_k) == (1.0, 1.0, -1)
