"""`rlrecipes explain KEY [overrides]`: what a key is, who set it, which rules look at it, what follows from it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from rlrecipes.config.compose import ComposedRecipe, compose
from rlrecipes.errors import InputError
from rlrecipes.plan.explanation import Explanation, Source, explain_key
from rlrecipes.runner.resolution import resolve_recipe

_USAGE = "usage: rlrecipes explain KEY [group=option] [key=value]\n\nKEY is a dotted path, a section or a group."
_MAX_CELL_CHARACTERS = 100


def run(arguments: list[str]) -> None:
    """Explain a key of the recipe that the overrides make.

    Args:
        arguments: the key, then overrides.

    Raises:
        InputError: there is no such key, or the recipe is wrong.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return
    path, *words = arguments
    if "=" in path or any(word.startswith("-") for word in words):
        raise InputError(
            "rlrecipes explain", "takes a key and then overrides", "write `rlrecipes explain algo.clip_high`"
        )
    recipe, defaults = compose(words), compose()
    explanation = explain_key(
        path,
        _to_source(recipe),
        _to_source(defaults),
        lambda config: resolve_recipe(dataclasses.replace(recipe, config=config)),
    )
    print("\n".join(_tell(explanation)))


def _to_source(recipe: ComposedRecipe) -> Source:
    return Source(recipe.config, recipe.origins)


def _tell(found: Explanation) -> Iterator[str]:
    yield f"{found.path}: {' or '.join(found.kinds)}"
    if found.meaning:
        yield f"  {found.meaning}"
    if not found.inside:
        yield f"value: {_short(found.value)}  ({found.origin or 'unknown'})"
        if (found.value, found.origin) != (found.default, found.default_origin):
            yield f"default: {_short(found.default)}  ({found.default_origin or 'no default sets it'})"
    yield from _list("options", (f"{found.path}={name}: {said}" for name, said in found.options))
    yield from _list("keys", (f"{key.path} ({key.kind}): {key.meaning}" for key in found.inside))
    yield from _list("rules", (f"{rule.name}: {rule.reason}" for rule in found.rules))
    if found.tried is not None:
        yield from _list(f"with {_short(found.tried)} instead", _follows(found))


def _follows(found: Explanation) -> Iterator[str]:
    yield from (f"{change.path}: {_short(change.left)} -> {_short(change.right)}" for change in found.follows)
    yield from (f"refused: {problem.where} {problem.problem}" for problem in found.refusals)
    if not found.follows and not found.refusals:
        yield "the Plan stays the same"


def _list(title: str, lines: Iterator[str]) -> Iterator[str]:
    told = [f"  {line}" for line in lines]
    if told:
        yield f"{title}:"
        yield from told


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MAX_CELL_CHARACTERS else text[: _MAX_CELL_CHARACTERS - 3] + "..."
