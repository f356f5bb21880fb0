"""`rlrecipes train [overrides]`."""

from __future__ import annotations

from rlrecipes.config.compose import ComposedRecipe, run_hydra_app
from rlrecipes.runner.resolution import resolve_recipe


def run(arguments: list[str]) -> None:
    """Resolve each composed recipe and run it.

    Args:
        arguments: overrides and Hydra's flags.
    """
    run_hydra_app(_train, arguments)


def _train(recipe: ComposedRecipe) -> None:
    plan = resolve_recipe(recipe)
    from rlrecipes.cli.run import run_and_tell

    run_and_tell(plan)
