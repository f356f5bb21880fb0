"""`rlrecipes train [overrides]`."""

from __future__ import annotations

from rlrecipes.config.compose import ComposedRecipe, run_hydra_app
from rlrecipes.plan.cluster import read_local_hosts
from rlrecipes.plan.resolve import resolve


def run(arguments: list[str]) -> None:
    """Resolve each composed recipe and run it.

    Args:
        arguments: overrides and Hydra's flags.
    """
    run_hydra_app(_train, arguments)


def _train(recipe: ComposedRecipe) -> None:
    plan = resolve(recipe.config, read_local_hosts(), recipe.origins, recipe.problems)
    from rlrecipes.cli.run import run_and_tell

    run_and_tell(plan)
