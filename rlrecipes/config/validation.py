"""Plain data judged by the schema. Owns how a schema violation is told: path, value, origin, nearest right name."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rlrecipes.config.origins import Origins, origin_of
from rlrecipes.config.schema import RunConfig, Section
from rlrecipes.errors import ConfigError, Problem, name_rule
from rlrecipes.suggest import did_you_mean, nearest

SCHEMA = "schema"
"""What refuses a value by itself, in ``Problem.rule``."""
_UNSET = "???"


def validate(data: Mapping[str, Any], origins: Origins) -> tuple[RunConfig | None, list[Problem]]:
    """Judge a composed recipe.

    Args:
        data: plain data, interpolations resolved; ``"???"`` stands for a value nobody gave.
        origins: where each value was set.

    Returns:
        The recipe and no problems, or None and every problem.
    """
    problems = [
        Problem(path, "has no value", f"give {path}=...", origin_of(origins, path), SCHEMA) for path in _unset(data, "")
    ]
    try:
        config = RunConfig.model_validate_json(json.dumps(data))
    except ValidationError as error:
        unset = {problem.where for problem in problems}
        found = to_problems(error, data, origins)
        return None, problems + [problem for problem in found if problem.where not in unset]
    return (None, problems) if problems else (config, [])


def to_problems(
    error: ValidationError, data: Mapping[str, Any], origins: Origins, root: type[Section] = RunConfig
) -> list[Problem]:
    """Everything a schema found, in words for people.

    Args:
        error: of the schema.
        data: what it judged.
        origins: where each value was set.
        root: the schema.
    """
    return name_rule((_to_problem(details, data, origins, root) for details in error.errors()), SCHEMA)


def read_options[S: Section](schema: type[S], options: Mapping[str, Any], where: str) -> S:
    """Options of one of our Hydra plugins, judged.

    Args:
        schema: what they may be.
        options: as the recipe has them, ``_target_`` among them.
        where: dotted path of the plugin.

    Raises:
        ConfigError: every option that is wrong.
    """
    data = {name: value for name, value in options.items() if name != "_target_"}
    try:
        return schema.model_validate_json(json.dumps(data))
    except ValidationError as error:
        found = to_problems(error, data, {}, schema)
        raise ConfigError.from_problems([replace(one, where=f"{where}.{one.where}") for one in found]) from error


def _unset(value: Any, path: str) -> Iterator[str]:
    if value == _UNSET:
        yield path
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from _unset(child, f"{path}.{key}" if path else str(key))


def _to_problem(details: ErrorDetails, data: Mapping[str, Any], origins: Origins, root: type[Section]) -> Problem:
    path = _plain_path(details["loc"], data)
    where = ".".join(path)
    origin = origin_of(origins, where)
    value = details.get("input")
    if details["type"] == "extra_forbidden":
        choices = fields_at(path[:-1], data, root)
        near = nearest(path[-1], choices)
        elsewhere = (
            None if near else next((p for p in recipe_paths(data, root) if p.rpartition(".")[2] == path[-1]), None)
        )
        fix = f"did you mean {elsewhere!r}?" if elsewhere else did_you_mean(path[-1], choices)
        return Problem(where, f"is not a key of a {'recipe' if root is RunConfig else root.__name__}", fix, origin)
    if details["type"] == "missing":
        return Problem(where, "has no value", f"give {where}=...", origin)
    if details["type"] in ("union_tag_invalid", "union_tag_not_found"):
        choices = [word.strip("' ") for word in str(details.get("ctx", {}).get("expected_tags", "")).split(",")]
        kind = value.get("kind") if isinstance(value, Mapping) else value
        return Problem(f"{where}.kind", f"is {kind!r}", did_you_mean(str(kind), choices), origin)
    return Problem(where, f"is {_short(value)}: {details['msg'].lower()}", _fix(details, value), origin)


def _fix(details: ErrorDetails, value: Any) -> str:
    if details["type"] == "literal_error":
        expected = str(details.get("ctx", {}).get("expected", ""))
        return did_you_mean(str(value), [w.strip("' ") for w in expected.replace(" or ", ", ").split(",")])
    if details["type"] == "string_type":
        return "quote it to make it a string, as in key='\"12\"'"
    if details["type"] in ("int_type", "float_type", "bool_type", "int_from_float"):
        return f"write a bare {details['type'].partition('_')[0]}, without quotes"
    return "choose a value in range; docs/config.md lists units and ranges"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _plain_path(loc: tuple[int | str, ...], data: Mapping[str, Any]) -> list[str]:
    """Pydantic names the chosen member of a union inside the path; a user knows no such step."""
    path: list[str] = []
    value: Any = data
    for step in loc:
        is_tag = isinstance(value, Mapping) and step not in value and value.get("kind") == step
        if is_tag:
            continue
        path.append(str(step))
        if isinstance(value, Mapping):
            value = value.get(str(step))
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
    return path


def fields_at(path: Sequence[str], data: Mapping[str, Any], root: type[Section] = RunConfig) -> list[str]:
    """Names allowed directly under a path of the recipe."""
    found = set()
    for candidate in recipe_paths(data, root):
        steps = candidate.split(".")
        if len(steps) == len(path) + 1 and all(s in ("*", p) for s, p in zip(steps, path, strict=False)):
            found.add(steps[-1])
    return sorted(found - {"*"})


def recipe_paths(data: Mapping[str, Any], root: type[Section] = RunConfig) -> list[str]:
    """Every dotted path a recipe like ``data`` may have, ``*`` standing for a name the user chooses or a number."""
    return list(_paths(root, "", data))


def _paths(section: type[Section], prefix: str, data: Any, around: tuple[type[Section], ...] = ()) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        value = data.get(name) if isinstance(data, Mapping) else None
        nested, is_named = _sections(field.annotation)
        kind = value.get("kind") if isinstance(value, Mapping) else None
        chosen = [inner for inner in nested if kind in _kinds(inner)] or nested
        for inner in chosen:
            if inner not in (section, *around):  # a section may hold others of its kind, to any depth
                below = f"{prefix}{name}.*." if is_named else f"{prefix}{name}."
                yield from _paths(inner, below, value, (section, *around))


def _kinds(section: type[Section]) -> tuple[Any, ...]:
    return typing.get_args(section.model_fields["kind"].annotation) if "kind" in section.model_fields else ()


def _sections(annotation: Any) -> tuple[list[type[Section]], bool]:
    """The sections inside an annotation, and whether a mapping or a sequence holds them."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation], False
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType, typing.Annotated):
        return [section for argument in arguments for section in _sections(argument)[0]], False
    if origin in (dict, tuple):
        return _sections(arguments[origin is dict])[0], True
    return [], False
