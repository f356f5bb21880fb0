"""Several turns make rollouts longer, everywhere that a length is planned for."""

import pytest
from step_recipes import COLOCATED, inputs_of

from rlrecipes.config.compose import compose
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.resolve import resolve
from rlrecipes.plan.step_inputs import read_step_inputs
from rlrecipes.runner.resolution import resolve_recipe

HOSTS = (HostNode(name="here", num_cpus=2, num_gpus=0, memory_bytes=1 << 34),)
TURNS = ("rollout=multi_turn", "rollout.generate.max_turns=3", "rollout.generate.max_observation_tokens=10")


@pytest.mark.parametrize(("words", "num_tokens"), [((), 16 + 16), (TURNS, 16 + 3 * 16 + 2 * 10)])
def test_the_longest_sample_has_all_turns(words, num_tokens):
    recipe = compose(words)
    assert resolve(recipe.config, HOSTS, recipe.origins).batch.max_sample_tokens == num_tokens


def test_predictions_have_all_turns():
    words = (*COLOCATED, *TURNS, "rollout.sampling.max_new_tokens=4096", "parallel=recompute")
    assert inputs_of(*words).max_new_tokens == 3 * 4096 + 2 * 10
    assert read_step_inputs(resolve_recipe(compose(words))).max_new_tokens == 3 * 4096 + 2 * 10
