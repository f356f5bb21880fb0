"""A composed recipe resolved for its cluster. Owns judging what the plan room cannot see: parts by name, Ray."""

from __future__ import annotations

from collections.abc import Sequence

from rlrecipes.config.compose import ComposedRecipe
from rlrecipes.errors import Problem, name_rule
from rlrecipes.plan.cluster import Cluster, read_cluster
from rlrecipes.plan.hosts import FoundHost
from rlrecipes.plan.nodes import Plan
from rlrecipes.plan.resolve import resolve
from rlrecipes.rewards.registry import check_reward


def resolve_recipe(recipe: ComposedRecipe) -> Plan:
    """Resolve a recipe into a Plan for its cluster; imports no torch and starts nothing.

    Args:
        recipe: composed; its problems are told with those found here.

    Raises:
        ConfigError: every problem found.
    """
    config = recipe.config
    problems = name_rule(
        check_reward(config.reward.name, config.reward.options, config.topology.served_models), "reward"
    )
    cluster = read_recipe_cluster(recipe, problems)
    return resolve(
        config,
        cluster.hosts,
        recipe.origins,
        recipe.problems,
        name_rule(problems, "cluster_facts"),
        cluster=cluster.node,
        notes=cluster.notes,
        choices=recipe.choices,
    )


def read_recipe_cluster(recipe: ComposedRecipe, problems: list[Problem]) -> Cluster:
    """The cluster that a recipe names, settled.

    Args:
        recipe: composed.
        problems: what is wrong with it is appended.
    """
    return read_cluster(recipe.config.cluster, recipe.config.runs_dir, problems, _read_ray_hosts)


def _read_ray_hosts(address: str) -> Sequence[FoundHost]:
    from rlrecipes.runner.cluster import read_ray_hosts

    return read_ray_hosts(address)
