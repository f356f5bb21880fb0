"""A key explained: its meaning, who set it, the rules that look at it, and what really follows from it."""

from __future__ import annotations

import pytest

from rlrecipes.config.compose import compose
from rlrecipes.errors import InputError
from rlrecipes.plan.explanation import Source, explain_key
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.resolve import resolve

HOSTS = (HostNode(name="here", num_cpus=2, num_gpus=0, memory_bytes=1 << 34),)


def explain(path, *overrides):
    recipe, defaults = compose(list(overrides)), compose()
    return explain_key(
        path,
        Source(recipe.config, recipe.origins),
        Source(defaults.config, defaults.origins),
        lambda config: resolve(config, HOSTS, recipe.origins),
    )


def test_a_key_says_what_it_is_and_who_set_it():
    found = explain("algo.clip_high", "algo=dapo")
    assert found.kinds == ("float > 0",)
    assert found.meaning == "The ratio is clipped above at 1 + clip_high."
    assert (found.value, found.default) == (0.28, 0.2)
    assert found.origin.startswith("conf/algo/dapo.yaml:")
    assert found.default_origin.startswith("conf/algo/grpo.yaml:")
    assert explain("optim.lr", "optim.lr=3e-4").origin == "override optim.lr=3e-4"


def test_what_follows_is_found_by_resolving_again():
    found = explain("algo.group_size")
    changed = {change.path: (change.left, change.right) for change in found.follows}
    assert found.tried == 16
    assert changed["batch.rollouts_per_step"] == (128, 256)
    assert "batch.prompts_per_step" not in changed
    assert any("group" in rule.name for rule in found.rules)


def test_a_value_that_the_rules_refuse_is_told_with_their_words():
    found = explain("schedule.num_train_steps", "schedule.prompts_per_step=1")
    assert found.tried == 2
    assert found.refusals[0].where == "schedule.num_train_steps"
    assert not found.follows


def test_a_group_shows_its_options_and_a_section_its_keys():
    topology = explain("topology")
    assert "pd" in dict(topology.options)
    kl = explain("algo.kl")
    assert [key.path for key in kl.inside][:2] == ["algo.kl.placement", "algo.kl.coef"]
    assert kl.options == ()
    assert kl.tried is None


def test_names_of_the_users_own_are_found():
    found = explain("topology.served_models.policy.server_groups.main.num_engines")
    assert found.value == 1
    assert found.meaning.startswith("Engines; null: as many as fill the GPUs")


@pytest.mark.parametrize("path", ["algo.grup_size", "algo.critic.optim.lr", "nothing", "algo.kl.coef.more"])
def test_an_unknown_key_is_refused_with_near_ones(path):
    with pytest.raises(InputError) as caught:
        explain(path)
    (problem,) = caught.value.problems
    assert problem.where == path
    assert "is no key of this recipe" in problem.problem
    if path == "algo.grup_size":
        assert "'algo.group_size'" in problem.fix
