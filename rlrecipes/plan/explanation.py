"""One key of a recipe explained: what it is, who set it, which rules look at it, and what of the Plan follows from it.

What follows is found by trying: the recipe is resolved again with another value, and the two Plans are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rlrecipes.config.origins import Origins, origin_of
from rlrecipes.config.reference import Key, read_keys, read_options
from rlrecipes.config.schema import RunConfig
from rlrecipes.errors import ConfigError, InputError, Problem
from rlrecipes.plan.comparison import Difference, compare_plans
from rlrecipes.plan.difference import flatten
from rlrecipes.plan.nodes import Plan
from rlrecipes.plan.rules.rule import Rule
from rlrecipes.plan.rules.table import RULES
from rlrecipes.suggest import did_you_mean

_MAX_KEYS = 400
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is known of a key.

    Attributes:
        path: of the key.
        kinds: type, range and choices in words; several where a section has several forms.
        meaning: unit and what it does.
        value: in this recipe.
        origin: who set it.
        default: value when nothing is chosen.
        default_origin: who sets that.
        options: of a group: each with what it says of itself.
        inside: keys below it, of a section.
        rules: that look at it.
        tried: another value that was tried; None where none could be.
        follows: what of the Plan changes with it.
        refusals: what is wrong with the value tried.
    """

    path: str
    kinds: tuple[str, ...]
    meaning: str
    value: Any
    origin: str
    default: Any
    default_origin: str
    options: tuple[tuple[str, str], ...]
    inside: tuple[Key, ...]
    rules: tuple[Rule, ...]
    tried: Any
    follows: tuple[Difference, ...]
    refusals: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A recipe, and where each of its values was set.

    Attributes:
        config: the recipe.
        origins: dotted path -> file:line or override.
    """

    config: RunConfig
    origins: Origins


def explain_key(path: str, recipe: Source, defaults: Source, resolve: Callable[[RunConfig], Plan]) -> Explanation:
    """Explain one key.

    Args:
        path: dotted; of a key, a section or a group.
        recipe: the recipe it is explained in.
        defaults: the recipe when nothing is chosen.
        resolve: gives the Plan of a recipe, or raises ConfigError.

    Raises:
        InputError: a recipe has no such key; near ones are named.
    """
    value = _find(recipe.config, path)
    keys = read_keys()
    known = [key for key in keys if _fits(key.path, path)]
    if value is _MISSING or not known:
        paths = [name for name, _ in flatten(recipe.config.model_dump(mode="json"))]
        raise InputError(path, "is no key of this recipe", did_you_mean(path, paths))
    inside = [key for key in keys if _fits(key.path.rpartition(".")[0], path)]
    tried, follows, refusals = (None, (), ()) if inside else _try_others(path, value, recipe.config, resolve)
    default = _find(defaults.config, path)
    return Explanation(
        path=path,
        kinds=tuple(dict.fromkeys(key.kind for key in known)),
        meaning=next((key.meaning for key in known if key.meaning), ""),
        value=value,
        origin=origin_of(recipe.origins, path),
        default=None if default is _MISSING else default,
        default_origin="" if default is _MISSING else origin_of(defaults.origins, path),
        options=tuple(read_options(path)) if "." not in path else (),
        inside=tuple(inside[:_MAX_KEYS]),
        rules=tuple(rule for rule in RULES if any(_fits(key, path) for key in rule.keys)),
        tried=tried,
        follows=tuple(follows),
        refusals=tuple(refusals),
    )


def _find(config: RunConfig, path: str) -> Any:
    value: Any = config.model_dump(mode="json")
    for step in path.split("."):
        if not isinstance(value, dict) or step not in value:
            return _MISSING
        value = value[step]
    return value


def _fits(pattern: str, path: str) -> bool:
    """Whether a documented path, in which ``<name>`` stands for any name, is this one."""
    steps, others = pattern.split("."), path.split(".")
    return len(steps) == len(others) and all(a == b or a.startswith("<") for a, b in zip(steps, others, strict=True))


def _try_others(
    path: str, value: Any, config: RunConfig, resolve: Callable[[RunConfig], Plan]
) -> tuple[Any, list[Difference], list[Problem]]:
    """The first other value that resolves, and what changes with it; else the first that the rules refuse."""
    try:
        before = resolve(config)
    except ConfigError as error:
        return None, [], list(error.problems)
    refused: tuple[Any, list[Difference], list[Problem]] = (None, [], [])
    for other in _others(value):
        changed = _change(config, path, other)
        if changed is None:
            continue
        try:
            after = resolve(changed)
        except ConfigError as error:
            refused = refused if refused[0] is not None else (other, [], list(error.problems))
            continue
        return other, compare_plans(before, after), []
    return refused


def _others(value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (other for other in (2 * value, value + 1, value // 2, 1) if other != value)
    elif isinstance(value, float):
        yield from (other for other in (2 * value, value / 2, value + 0.1) if other != value)
    elif value is None:
        yield from (2, 0.5)


def _change(config: RunConfig, path: str, value: Any) -> RunConfig | None:
    """The recipe with another value; None where the schema refuses it."""
    data: dict[str, Any] = config.model_dump(mode="json")
    *parents, leaf = path.split(".")
    section = data
    for step in parents:
        section = section[step]
    section[leaf] = value
    try:
        return RunConfig.model_validate(data, strict=False)
    except ValidationError:
        return None
