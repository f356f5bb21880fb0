"""`rlrecipes train [overrides] [--format text|json]`."""

from __future__ import annotations

from rlrecipes.cli.flags import take_format
from rlrecipes.config.compose import ComposedRecipe, find_shared, run_hydra_app
from rlrecipes.errors import InputError
from rlrecipes.runner.resolution import resolve_recipe


def run(arguments: list[str]) -> None:
    """Resolve the composed recipe, or every point of a sweep (``-m``), and run it.

    Args:
        arguments: overrides, Hydra's flags, and ``--format json``, which tells problems as JSON.

    Raises:
        InputError: a sweeper is named, and nothing is swept.
    """
    words = list(arguments)
    take_format(words, ("text", "json"), "text")
    shared = find_shared(words)
    if shared is None:
        if any(word.startswith("hydra/sweeper=") for word in words):
            raise InputError("hydra/sweeper", "is only for a sweep", "add -m, or leave it out")
        run_hydra_app(_train, words, can_submit="submit")
        return
    from rlrecipes.cli.sweep import run_sweep

    run_sweep(words, shared)


def _train(recipe: ComposedRecipe) -> None:
    plan = resolve_recipe(recipe)
    from rlrecipes.cli.run import run_and_tell

    run_and_tell(plan)
