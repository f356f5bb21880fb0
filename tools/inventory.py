"""Writes the inventory of one package's options, as the installed version has them.

    python tools/inventory.py NAME > rlrecipes/plan/inventories/NAME.json

NAME is sglang, router, megatron, embedded or reasoning_gym; `make inventory` writes all. It runs where the package is
installed and needs nothing else of this project. The Plan judges recipes by these files, without the packages.

An option holds ``types`` (words of rlrecipes/plan/inventory.py; none: a recipe cannot write such a value), and where
they apply ``items`` (it takes a list of these), ``choices`` and ``default``; or ``same_as``, another of its names.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

Option = dict[str, Any]
Groups = dict[str, dict[str, Option]]

_ARGUMENT_TYPES = {
    "None": ["str"],
    "str": ["str"],
    "int": ["int"],
    "float": ["float"],
    "_positive": ["positive_int"],
    "human_readable_int": ["int", "str"],  # 32k
    "nullable_str": ["str"],
    "parse_cuda_graph_config_arg": ["str"],
    "loads": ["json"],
    "json_list_type": ["json"],
    "Path": ["str"],
}
_FIELD_TYPES = {type(None): "null", bool: "bool", int: "int", float: "float", str: "str", Any: "any"}


def read_parser(parser: argparse.ArgumentParser) -> dict[str, Option]:
    """Options of a command line, by long flag with underscores for dashes."""
    options: dict[str, Option] = {}
    for action in parser._actions:
        names = [flag.removeprefix("--") for flag in action.option_strings if flag.startswith("--")]
        if any("_" in name for name in names):
            raise SystemExit(f"{action.option_strings}: a flag with an underscore cannot be written in a recipe")
        if names and names[0] not in ("help", "version"):
            first, *others = (name.replace("-", "_") for name in names)
            options[first] = _read_action(action)
            is_switch = isinstance(action, argparse.BooleanOptionalAction)
            for other in others:
                is_negation = is_switch and other.startswith("no_")
                options[other] = {"types": ["bool", "null"], "default": False} if is_negation else {"same_as": first}
    return options


def _read_action(action: argparse.Action) -> Option:
    kind = getattr(action.type, "__name__", str(action.type))
    if kind not in _ARGUMENT_TYPES:
        raise SystemExit(f"{action.option_strings}: say in tools/inventory.py what the type {kind!r} takes")
    words = _ARGUMENT_TYPES[kind]
    option: Option = {"types": [*words, "null"]}
    if action.nargs == 0:
        option["types"] = ["bool", "null"]
    elif action.nargs == "?":
        option["types"] = [*words, "bool", "null"]
    elif action.nargs is not None:
        option["items"] = words
    if action.choices is not None:
        option["choices"] = sorted(action.choices, key=str)
    return option | _default(action.default)


def _default(value: Any) -> Option:
    """The default, where there is one that JSON can hold."""
    if value in (argparse.SUPPRESS, dataclasses.MISSING):
        return {}
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return {}
    return {"default": value}


def read_dataclass(kind: Any) -> dict[str, Option]:
    """Options of a configuration class, by field."""
    hints = typing.get_type_hints(kind)
    return {
        field.name: _read_field(field, hints[field.name]) for field in dataclasses.fields(kind) if _is_option(field)
    }


def _is_option(field: dataclasses.Field[Any]) -> bool:
    return field.init and not field.name.startswith("_")


def _read_field(field: dataclasses.Field[Any], hint: Any) -> Option:
    members = list(_members(hint))
    option: Option = {"types": sorted({_FIELD_TYPES[m] for m in members if m in _FIELD_TYPES})}
    choices = [choice for m in members if typing.get_origin(m) is typing.Literal for choice in typing.get_args(m)]
    if choices:
        option["choices"] = choices
        option["types"] = sorted({*option["types"], *(_FIELD_TYPES[type(choice)] for choice in choices)})
    if any(typing.get_origin(m) is dict or m is dict for m in members):
        option["types"].append("mapping")
    lists = [m for m in members if (typing.get_origin(m) or m) in (list, tuple, set, Sequence)]
    if lists:
        items = [inner for m in lists for argument in typing.get_args(m) for inner in _members(argument)]
        option["items"] = sorted({_FIELD_TYPES.get(item, "any") for item in items if item is not ...}) or ["any"]
    if type(field.default) in _FIELD_TYPES and not (field.default is None and not option["types"]):
        option["types"] = sorted({*option["types"], _FIELD_TYPES[type(field.default)]})  # some say `int = None`
    is_code = any(isinstance(m, type) and issubclass(m, enum.Enum) for m in members)
    return option | ({} if is_code else _default(field.default))


def _members(hint: Any) -> Iterator[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        for argument in typing.get_args(hint):
            yield from _members(argument)
    else:
        yield hint


def _sglang() -> Groups:
    from sglang.srt.server_args import ServerArgs

    return {"ServerArgs": _of_parser(ServerArgs.add_cli_args)}


def _router() -> Groups:
    from sglang_router.router_args import RouterArgs

    return {"RouterArgs": _of_parser(RouterArgs.add_cli_args)}


def _of_parser(add_arguments: Callable[[argparse.ArgumentParser], object]) -> dict[str, Option]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return read_parser(parser)


def _embedded() -> Groups:
    from rlrecipes.engines.embedded.arguments import build_parser

    return {"ServerArguments": read_parser(build_parser())}


def _megatron() -> Groups:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    kinds = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    return {kind.__name__: read_dataclass(kind) for kind in kinds}


def _reasoning_gym() -> Groups:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        from reasoning_gym.factory import DATASETS
    return {name: read_dataclass(config) for name, (_, config) in sorted(DATASETS.items())}


SOURCES: dict[str, tuple[str | None, Callable[[], Groups]]] = {
    "sglang": ("sglang", _sglang),
    "router": ("sglang-router", _router),
    "megatron": ("megatron-core", _megatron),
    "embedded": (None, _embedded),
    "reasoning_gym": ("reasoning-gym", _reasoning_gym),
}
"""Inventory -> the package whose version it is of (None: part of this one), and what reads it."""


def render(name: str) -> str:
    """The text of an inventory: JSON, a line an option, so that a new version shows as a readable difference."""
    package, read = SOURCES[name]
    head = {"package": package, "version": None if package is None else version(package)}
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    groups = [f"    {json.dumps(group)}: {{\n{_rows(options)}\n    }}" for group, options in read().items()]
    return "{\n" + "\n".join(lines) + '\n  "groups": {\n' + ",\n".join(groups) + "\n  }\n}\n"


def _rows(options: dict[str, Option]) -> str:
    return ",\n".join(f"      {json.dumps(name)}: {json.dumps(option)}" for name, option in sorted(options.items()))


def main(arguments: Iterable[str]) -> None:
    """Print the inventory named; whatever the package prints while it is imported goes to stderr."""
    (name,) = arguments
    target, sys.stdout = sys.stdout, sys.stderr
    text = render(name)
    target.write(text)


if __name__ == "__main__":
    main(sys.argv[1:])
