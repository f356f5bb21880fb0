"""Two plans told apart by meaning: what was chosen, what is learned, how it runs, and who said so."""

from __future__ import annotations

from rlrecipes.config.compose import compose
from rlrecipes.plan.comparison import compare_plans, to_meaning
from rlrecipes.plan.difference import MISSING
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.resolve import resolve

HOSTS = (HostNode(name="here", num_cpus=2, num_gpus=8, memory_bytes=1 << 34),)
GROUP = "topology.served_models.policy.server_groups.main"


def plan_of(*overrides):
    recipe = compose(list(overrides))
    return resolve(recipe.config, HOSTS, recipe.origins, choices=recipe.choices)


def differences_of(left, right):
    return {difference.path: difference for difference in compare_plans(plan_of(*left), plan_of(*right))}


def test_a_plan_does_not_differ_from_itself_by_its_name_or_place():
    assert compare_plans(plan_of("algo=dapo"), plan_of("algo=dapo", "name=other", "run_dir=/elsewhere")) == []


def test_an_override_is_one_difference_with_its_origin():
    found = differences_of([], ["optim.lr=3e-6"])
    assert list(found) == ["trainer.optim.lr"]
    (difference,) = found.values()
    assert (difference.kind, difference.left, difference.right) == ("learning", 1e-6, 3e-6)
    assert difference.left_origin.startswith("conf/optim/adam.yaml:")
    assert difference.right_origin == "override optim.lr=3e-6"


def test_what_follows_from_an_override_has_no_origin_of_its_own():
    found = differences_of([], ["algo.group_size=4"])
    assert (found["batch.rollouts_per_step"].left, found["batch.rollouts_per_step"].right) == (128, 64)
    assert found["batch.rollouts_per_step"].right_origin == ""
    assert found["batch.group_size"].right_origin == "override algo.group_size=4"


def test_choices_come_first_and_layout_is_execution():
    found = differences_of([], ["parallel=tp2", "algo=dr_grpo"])
    kinds = [difference.kind for difference in found.values()]
    assert kinds == sorted(kinds, key=["choice", "learning", "execution", "prediction"].index)
    assert (found["parallel"].kind, found["parallel"].left, found["parallel"].right) == ("choice", "single", "tp2")
    assert found["trainer.tensor_model_parallel_size"].kind == "execution"
    assert found["algo.normalize_std"].kind == "learning"
    assert found["trainer.devices"].right == "2 CPU processes"


def test_a_section_that_one_side_lacks_is_one_difference():
    found = differences_of([], ["algo=ppo"])
    assert found["algo.critic"].left in (None, MISSING)
    assert not [path for path in found if path.startswith("algo.critic.")]
    assert found["algo.critic"].right["optim.lr"] == 1e-5


def test_engines_are_told_as_counts_and_options():
    found = differences_of([], [f"{GROUP}.num_engines=2", f"{GROUP}.sglang.max_total_tokens=4096"])
    prefix = "served_models.policy.server_groups.main"
    assert found[f"{prefix}.num_engines"].right == 2
    assert found[f"{prefix}.sglang.max_total_tokens"].left == "65536"
    assert f"{prefix}.sglang.random_seed" not in found


def test_devices_are_told_by_number_and_place():
    meaning = to_meaning(plan_of("topology=disaggregated", "parallel.data_parallel_size=2"))
    assert meaning["trainer"]["devices"] == "2 GPUs on here"
    assert meaning["served_models"]["policy"]["server_groups"]["main"]["devices"] == "6 GPUs on here"
