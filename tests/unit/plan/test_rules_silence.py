"""What others accept without a word, and no rule of its own refuses here; docs/rules.md lists it."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

import rlrecipes.config.schema as schema
from rlrecipes.config.compose import compose
from rlrecipes.errors import ConfigError
from rlrecipes.plan.nodes import HostNode, load_plan
from rlrecipes.plan.resolve import resolve
from rlrecipes.runner.resolution import resolve_recipe

HOSTS = (HostNode(name="here", num_cpus=2, num_gpus=0, memory_bytes=1 << 34),)
POLICY = "topology.served_models.policy"


def refuse(*overrides, **kwargs):
    with pytest.raises(ConfigError) as caught:
        resolve_recipe(compose(overrides, **kwargs))
    return {problem.where: problem for problem in caught.value.problems}


def test_a_misspelt_key_of_a_served_model():
    problem = refuse(f"{POLICY}.update_weight=true")[f"{POLICY}.update_weight"]
    assert problem.rule == "schema"
    assert "is_updated" in problem.fix


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1e-04", "0.1e-3"])
def test_an_exponent_without_a_point_is_a_number_or_refused(text, tmp_path):
    for group, body in {"optim": f"lr: {text}", "parallel": f"megatron: {{hidden_dropout: {text}}}"}.items():
        base = {"optim": "adam", "parallel": "single"}[group]
        (tmp_path / group).mkdir()
        (tmp_path / group / "mine.yaml").write_text(f"defaults:\n  - {base}\n  - _self_\n{body}\n")
    plan = resolve_recipe(compose(["optim=mine", "parallel=mine", f"optim.adam_eps={text}"], tmp_path))
    assert plan.trainer.optim.lr == plan.trainer.optim.adam_eps == plan.trainer.megatron["hidden_dropout"] == 1e-4
    saved = tmp_path / "plan.yaml"
    saved.write_text(re.sub(r"\n    lr: \S+\n", f"\n    lr: {text}\n", plan.to_yaml()))
    try:
        assert load_plan(saved).trainer.optim.lr == 1e-4
    except ConfigError as error:
        (problem,) = error.problems
        assert (problem.where, problem.rule) == ("trainer.optim.lr", "schema")


def test_what_was_judged_cannot_be_changed():
    config = compose([]).config
    for section, name in ((config, "seed"), (config.algo, "group_size"), (config.schedule, "prompts_per_step")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, name, 4)


def test_every_key_that_names_a_function_is_judged_before_a_run():
    named = {
        f"{section.__name__}.{name}"
        for section in schema.Section.__subclasses__()
        if section.__module__.startswith(schema.__name__)
        for name, field in section.model_fields.items()
        if "module:function" in (field.description or "")
    }
    keys = {
        "RlConfig.policy_loss": "algo.policy_loss",
        "RewardConfig.name": "reward.name",
        "GenerateConfig.name": "rollout.generate.name",
        "EnvironmentConfig.name": "rollout.generate.environment.name",
    }
    assert named == set(keys)
    for key in keys.values():
        words = {
            "no_such_module:function": "no module",
            "json:dump_s": "has no function",
            "this_module_of_tests:takes_nothing": "positional",
        }
        for path, said in words.items():
            assert said in refuse("rollout=multi_turn", f"{key}={path}")[key].problem


@pytest.fixture(autouse=True)
def module_of_tests(tmp_path, monkeypatch):
    (tmp_path / "this_module_of_tests.py").write_text("def takes_nothing(*, option=1): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_every_updated_model_has_a_route():
    second = [f"+served_model@topology.served_models.{name}=policy" for name in ("second", "third")]
    second += [
        f"+server_group@topology.served_models.{name}.server_groups.main=embedded" for name in ("second", "third")
    ]
    recipe = compose([*second, "topology.served_models.third.is_updated=false"])
    plan = resolve(recipe.config, HOSTS, recipe.origins)
    assert [route.served_model for route in plan.sync_routes] == ["policy", "second"]
