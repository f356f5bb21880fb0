"""What other packages' options are called and take, as files kept here say. Owns reading and judging; no package.

``tools/inventory.py`` writes the files from the pinned versions (`make inventory`), and a test compares them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal

from rlrecipes.suggest import did_you_mean

type InventoryName = Literal["sglang", "router", "megatron", "embedded", "reasoning_gym"]

_DIRECTORY = Path(__file__).parent / "inventories"


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_json(value: Any) -> bool:
    try:
        json.loads(value)
    except (TypeError, ValueError):
        return False
    return isinstance(value, str)


_TYPES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("an integer", _is_int),
    "positive_int": ("an integer of at least 1", lambda value: _is_int(value) and value >= 1),
    "float": ("a number", lambda value: type(value) in (int, float)),
    "str": ("a string", lambda value: isinstance(value, str)),
    "json": ("JSON in a string", _is_json),
    "mapping": ("a mapping", lambda value: isinstance(value, Mapping)),
    "any": ("anything", lambda value: True),
    "null": ("null", lambda value: value is None),
}
"""Word of an inventory -> how it is told, and whether a value is one. ``null`` leaves a flag at its default."""


_SUFFIXES = {
    **{"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12},
    **{"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40},
}


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        types: words of the table above; none where only code can give a value.
        items: the types of what a list may hold; None where it takes no list.
        choices: the only values, also inside a list; empty where all are allowed.
        default: None also where it is not known.
    """

    types: tuple[str, ...]
    items: tuple[str, ...] | None = None
    choices: tuple[Any, ...] = ()
    default: Any = None

    def find_problem(self, value: Any) -> tuple[str, str] | None:
        """What is wrong with a value, and what to do about it; None when nothing is.

        Args:
            value: plain data.
        """
        is_list = self.items is not None and isinstance(value, list | tuple)
        for part in value if is_list else [value]:
            types = self.items or () if is_list else self.types
            if not any(_TYPES[word][1](part) for word in types):
                return f"is {_short(value)}", self._expected()
            if self.choices and part is not None and part not in self.choices:
                return f"is {_short(part)}", did_you_mean(str(part), map(str, self.choices))
        return None

    def _expected(self) -> str:
        words = [_TYPES[word][0] for word in self.types if word != "null"]
        if self.items:
            words.append("a list, each entry " + " or ".join(_TYPES[word][0] for word in self.items))
        return "write " + " or ".join(words) if words else "remove it: only code can give it a value"


@dataclass(frozen=True, slots=True)
class Inventory:
    """The options of one package.

    Attributes:
        package: its distribution; None for a part of this one.
        version: that was read; None for a part of this one.
        groups: name of the class that holds them -> option name -> option.
        aliases: other names of options -> their first one.
    """

    package: str | None
    version: str | None
    groups: Mapping[str, Mapping[str, Option]]
    aliases: Mapping[str, str]


@cache
def load_inventory(name: InventoryName) -> Inventory:
    """Read an inventory.

    Args:
        name: of its file.
    """
    data = json.loads((_DIRECTORY / f"{name}.json").read_text(encoding="utf-8"))
    aliases: dict[str, str] = {}
    groups: dict[str, dict[str, Option]] = {}
    for group, entries in data["groups"].items():
        aliases |= {option: entry["same_as"] for option, entry in entries.items() if "same_as" in entry}
        own = {option: _to_option(entry) for option, entry in entries.items() if option not in aliases}
        groups[group] = own | {alias: own[first] for alias, first in aliases.items()}
    return Inventory(data["package"], data["version"], groups, aliases)


def _to_option(entry: Mapping[str, Any]) -> Option:
    items = entry.get("items")
    return Option(
        types=tuple(entry["types"]),
        items=None if items is None else tuple(items),
        choices=tuple(entry.get("choices", ())),
        default=entry.get("default"),
    )


def to_count(value: Any) -> int | None:
    """A whole number as SGLang's command line reads it; ``32k`` is 32000, ``32Ki`` is 32768. None for what is none.

    Args:
        value: of an option.
    """
    if _is_int(value):
        return int(value)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)?", value.strip()) if isinstance(value, str) else None
    return int(float(match[1]) * _SUFFIXES.get(match[2], 1)) if match else None


def read_figures(native: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's options with their numbers as numbers; what it would refuse is left out, and told elsewhere.

    Args:
        native: options under its own names.
    """
    options = load_inventory("sglang").groups["ServerArgs"] if native else {}
    figures = {}
    for name, value in native.items():
        option = options.get(name)
        if option is not None and option.find_problem(value) is None:
            is_count = isinstance(value, str) and "int" in option.types
            figures[name] = to_count(value) if is_count else value
    return figures


@cache
def read_installed_version(package: str, python: str | None) -> str | None:
    """Version of a package where it will run, read from its metadata without starting anything, once.

    Args:
        package: the distribution.
        python: interpreter of a virtual environment that holds it; None for this one.

    Returns:
        None when it is not installed there, as on a laptop that plans for a cluster.
    """
    paths = sys.path
    if python is not None:
        paths = [str(path) for path in Path(python).absolute().parent.parent.glob("lib/python3*/site-packages")]
    found = next(iter(distributions(name=package, path=paths)), None)
    return None if found is None else found.version


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
