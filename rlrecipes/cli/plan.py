"""`rlrecipes plan [overrides] [--format table|yaml|json|html] [--save FILE]`: what would run, without running it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from rlrecipes.cli.flags import take_flag, take_format
from rlrecipes.config.compose import ComposedRecipe, run_hydra_app
from rlrecipes.errors import InputError
from rlrecipes.plan.lock import build_lock, write_lock
from rlrecipes.plan.nodes import Plan
from rlrecipes.runner.resolution import resolve_recipe


def run(arguments: list[str]) -> None:
    """Show each composed recipe's plan.

    Args:
        arguments: overrides, Hydra's flags, and our own: ``--format table|yaml|json|html``, of which table is the
            default, and ``--save FILE``, which writes the YAML. A sweep prints YAML documents, or lines of JSON.

    Raises:
        InputError: a flag has no value or a wrong one, the file cannot be written, or a sweep asks for one.
    """
    words = list(arguments)
    form = take_format(words, ("table", "yaml", "json", "html"), "table")
    target = take_flag(words, "--save", "plan.yaml")
    is_sweep = "-m" in words or "--multirun" in words
    if target is not None and is_sweep:
        raise InputError(
            "--save", "one file cannot hold the plans of a sweep", "leave out -m, or print with --format yaml"
        )

    def show(recipe: ComposedRecipe) -> None:
        plan = resolve_recipe(recipe)
        if target is not None:
            _save(plan, Path(target))
        elif form == "json":
            print(json.dumps(plan.to_data()))
        elif form == "yaml":
            print("---\n" if is_sweep else "", end="")
            print(plan.to_yaml(), end="")
        else:
            from rlrecipes.plan.rendering import print_plan, to_html

            print(to_html(plan)) if form == "html" else print_plan(plan)

    with tempfile.TemporaryDirectory() as scratch:  # Hydra writes a sweep's record; showing plans leaves nothing behind
        run_hydra_app(show, [*words, f"hydra.sweep.dir={scratch}"] if is_sweep else words)


def _save(plan: Plan, target: Path) -> None:
    try:
        target.write_text(plan.to_yaml(), encoding="utf-8")
        write_lock(build_lock(plan), target)
    except OSError as error:
        raise InputError(str(target), f"cannot be written: {error.strerror}", "name a writable file") from error
    print(f"plan {plan.hash} saved; run it with: rlrecipes run {target}")
