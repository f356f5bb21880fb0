"""A composed recipe resolved for this host. Owns judging what the plan room cannot see: parts by name."""

from __future__ import annotations

from rlrecipes.config.compose import ComposedRecipe
from rlrecipes.plan.cluster import read_local_hosts
from rlrecipes.plan.nodes import Plan
from rlrecipes.plan.resolve import resolve
from rlrecipes.rewards.registry import check_reward


def resolve_recipe(recipe: ComposedRecipe) -> Plan:
    """Resolve a recipe into a Plan for this host; imports no torch and starts nothing.

    Args:
        recipe: composed; its problems are told with those found here.

    Raises:
        ConfigError: every problem found.
    """
    reward = recipe.config.reward
    problems = check_reward(reward.name, reward.options)
    return resolve(recipe.config, read_local_hosts(), recipe.origins, recipe.problems, problems)
