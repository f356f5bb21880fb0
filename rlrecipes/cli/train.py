"""`rlrecipes train [overrides] [--format text|json]`."""

from __future__ import annotations

from rlrecipes.cli.flags import take_format
from rlrecipes.config.compose import ComposedRecipe, run_hydra_app
from rlrecipes.runner.resolution import resolve_recipe


def run(arguments: list[str]) -> None:
    """Resolve each composed recipe and run it.

    Args:
        arguments: overrides, Hydra's flags, and ``--format json``, which tells problems as JSON.
    """
    words = list(arguments)
    take_format(words, ("text", "json"), "text")
    run_hydra_app(_train, words)


def _train(recipe: ComposedRecipe) -> None:
    plan = resolve_recipe(recipe)
    from rlrecipes.cli.run import run_and_tell

    run_and_tell(plan)
