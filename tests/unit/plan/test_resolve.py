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


def test_shapes_that_disagree_with_config_json_name_the_field(hf_dir):
    found = problems_of(f"model.path={hf_dir}", "model.shapes.num_layers=3")
    assert set(found) == {"model.shapes.num_layers"}
    assert "4" in found["model.shapes.num_layers"].fix


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["schedule.num_train_steps=3"], "schedule.num_train_steps"),
        (["algo.group_size=1"], "algo.group_size"),
        (["algo.kl.coef=0.1"], "algo.kl.coef"),
        (["algo.kl.placement=loss", "algo.kl.estimator=k1"], "algo.kl.estimator"),
        (["algo.clip_low=1.5"], "algo.clip_low"),
        (["algo.policy_loss=gpso"], "algo.policy_loss"),
        (["algo.policy_loss=no_module:loss"], "algo.policy_loss"),
        (["algo.policy_loss=json:dumps"], "algo.policy_loss"),
        (["+algo.policy_loss_options.scale=1"], "algo.policy_loss_options"),
        (["algo=cispo", "algo.dual_clip=3"], "algo.dual_clip"),
        (["algo.aggregation_divisor=16"], "algo.aggregation_divisor"),
        (["algo.estimator=returns", "algo.normalize_std=false"], "algo.baseline"),
        (["algo.baseline=none"], "algo.normalize_std"),
        (["algo.estimator=gae", "algo.baseline=none", "algo.normalize_std=false"], "algo.critic"),
        (["algo=ppo", "algo.estimator=returns"], "algo.critic"),
        (["algo=ppo", "algo.critic.num_warmup_steps=30"], "algo.critic.num_warmup_steps"),
        (["algo=ppo", "algo.critic.path=nowhere"], "algo.critic.path"),
        (["algo=reinforce_plus_plus", "rollout.filters=[nonzero_variance]"], "rollout.filters"),
        (["algo.kl.is_unbiased=true"], "algo.kl.is_unbiased"),
        (
            ["algo.kl.placement=loss", "algo.kl.is_unbiased=true", "algo.kl.estimator=k1_straight_through"],
            "algo.kl.estimator",
        ),
        (["algo=reinforce_plus_plus", "algo.kl.placement=advantage"], "algo.kl.placement"),
        (["algo.off_policy.correction=token_tis", "algo.off_policy.low=3"], "algo.off_policy.low"),
        (["algo.off_policy.correction=icepop", "algo.old_logprobs=rollout"], "algo.off_policy.correction"),
        (["algo.off_policy.veto=0.1"], "algo.off_policy.veto"),
        (["algo.off_policy.staleness_power=1"], "algo.off_policy.staleness_power"),
        (["algo=dapo", "algo.overlong.buffer_tokens=17"], "algo.overlong.buffer_tokens"),
        (["algo=opd"], "algo.distillation.teacher_path"),
        (["algo=opd", "algo.distillation.teacher_path=nowhere"], "algo.distillation.teacher_path"),
        (["rollout.sampling.temperature=0"], "rollout.sampling.temperature"),
        (["rollout.sampling.temperature=1e-7"], "rollout.sampling.temperature"),
        (["rollout.sampling.top_p=0.9", "algo.old_logprobs=rollout"], "algo.old_logprobs"),
        (["rollout.sampling.top_k=5", "algo.old_logprobs=rollout"], "algo.old_logprobs"),
        (["rollout.sampling.top_k=1"], "rollout.sampling.top_k"),
        (["rollout.sampling.min_new_tokens=1"], "rollout.sampling.min_new_tokens"),
        (
            ["+topology.served_models.policy.server_groups.main.env.SGLANG_RETURN_ORIGINAL_LOGPROB='1'"],
            "topology.served_models.policy.server_groups.main.env.SGLANG_RETURN_ORIGINAL_LOGPROB",
        ),
        (["rollout.evaluation.sampling.top_k=0"], "rollout.evaluation.sampling.top_k"),
        (["rollout.sampling.min_new_tokens=17"], "rollout.sampling.min_new_tokens"),
        (["rollout.sampling.max_new_tokens=250"], "rollout.sampling.max_new_tokens"),
        (["parallel.max_tokens_per_micro_batch=31"], "parallel.max_tokens_per_micro_batch"),
        (["rollout.sampling.max_new_tokens=105"], "rollout.sampling.max_new_tokens"),
        (["topology.served_models.policy.is_updated=false"], "topology.served_models.policy.is_updated"),
        (["data.tasks=null"], "data.train_path"),
        (["data.eval_path=null"], "schedule.eval_interval"),
        (["rollout.evaluation.num_prompts=999"], "rollout.evaluation.num_prompts"),
        (["parallel.tensor_model_parallel_size=3"], "parallel.tensor_model_parallel_size"),
        (["parallel.pipeline_model_parallel_size=3"], "parallel.pipeline_model_parallel_size"),
        (["parallel.sequence_parallel=true"], "parallel.sequence_parallel"),
        (["optim.min_lr=1"], "optim.min_lr"),
        (["optim.num_warmup_train_steps=31"], "optim.num_warmup_train_steps"),
        (["model.path=/nowhere"], "model.path"),
        (["model.shapes=null"], "model"),
        (["model.shapes.vocab_size=5"], "model.shapes.vocab_size"),
        (["topology.device=cuda"], "topology"),
        (["topology.device=cuda"], "topology.served_models.policy.server_groups.main.engine"),
        (
            ["topology.served_models.policy.server_groups.main.python=/nowhere/python"],
            "topology.served_models.policy.server_groups.main.python",
        ),
        (
            ["topology.served_models.policy.server_groups.main.sglang.host=0.0.0.0"],
            "topology.served_models.policy.server_groups.main.sglang.host",
        ),
        (["topology.served_models.policy.router.port=99999"], "topology.served_models.policy.router.port"),
        (
            ["topology.served_models.policy.server_groups.main.sglang.max_total_tokens=10"],
            "topology.served_models.policy.server_groups.main.sglang.max_total_tokens",
        ),
        (
            ["deterministic=true", "topology=sglang_cpu"],
            "topology.served_models.policy.server_groups.main.engine",
        ),
    ],
)
def test_each_rule_refuses_with_reason_and_fix(overrides, where):
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
    apart = plan_of("topology.device=cuda", sglang, own, hosts=hosts)
    assert apart.policy.engines[0].devices[0].gpu == 1


@pytest.mark.parametrize("path", sorted(p for p in CONF.rglob("*.yaml") if p.parent != CONF), ids=lambda p: p.stem)
def test_every_shipped_option_composes(path, hf_dir):
    group, option = path.parent.name, path.stem
    main = "topology.served_models.policy.server_groups.main"
    mounted = {"gpu": "cluster.gpu", "server_group": main, "served_model": "topology.served_models.policy"}
    names = ("reference", "reward", "teacher")
    needed = {
        "model/hf": ["model.name=x", f"model.path={hf_dir}"],
        "data/jsonl": ["data.name=x", "data.train_path=x.jsonl"],
        "topology/external": [f"{main}.urls=[http://here:1]"],
        "server_group/external": [f"{main}.urls=[http://here:1]"],
        "topology/multi_model": [f"topology.served_models.{name}.path=x" for name in names],
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
