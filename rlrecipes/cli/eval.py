"""`rlrecipes eval [overrides]`: the recipe's model on its held-out prompts, as it is."""

from __future__ import annotations

from rlrecipes.config.compose import ComposedRecipe, run_hydra_app
from rlrecipes.runner.resolution import resolve_recipe


def run(arguments: list[str]) -> None:
    """Evaluate each composed recipe's model.

    Args:
        arguments: overrides and Hydra's flags.
    """
    run_hydra_app(_evaluate, arguments)


def _evaluate(recipe: ComposedRecipe) -> None:
    plan = resolve_recipe(recipe)
    from rlrecipes.runner.run import run_held_out_evaluation

    result = run_held_out_evaluation(plan)
    for name, value in result.to_metrics(plan.data.name).items():
        print(f"{name}: {value:.4f}")
