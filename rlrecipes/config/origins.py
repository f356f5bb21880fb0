"""Where each value of a recipe was set: file and line, or the override. Reads what Hydra loaded; decides nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Origins = dict[str, str]
"""Dotted path -> ``conf/algo/grpo.yaml:3`` or ``override``."""
Choices = dict[str, str]
"""Group -> option, e.g. ``algo`` -> ``grpo``; a part mounted elsewhere is named ``group@path``."""


def read_origins(
    defaults: Sequence[Any], known_choices: Mapping[str, Any], roots: Sequence[Path], overrides: Sequence[str]
) -> tuple[Origins, Choices]:
    """Trace every key of every file Hydra composed, in its order, then the overrides.

    Args:
        defaults: Hydra's final defaults list.
        known_choices: group -> option, or None where nothing is chosen.
        roots: directories in which Hydra searches, in its order.
        overrides: as Hydra got them.

    Returns:
        The last place that set each path, and the option chosen of each group.
    """
    origins: Origins = {}
    choices = {
        group: option
        for group, option in sorted(known_choices.items())
        if option is not None and not group.startswith("hydra/")
    }
    for default in defaults:
        if default.config_path is None or default.config_path.startswith("hydra"):
            continue
        file = next((found for root in roots if (found := to_file(root, default.config_path)).is_file()), None)
        if file is None:
            continue
        package = default.package or ""
        shown = show_file(file)
        for path, line in _keys(file.read_text(encoding="utf-8")):
            origins[f"{package}.{path}" if package else path] = f"{shown}:{line}"
    for word in overrides:
        key = word.lstrip("+~").partition("=")[0]
        origins[key] = f"override {word.lstrip('+')}"
    return origins, choices


def origin_of(origins: Origins, path: str) -> str:
    """Where ``path``, or the nearest part around it, was set; empty when unknown."""
    while path:
        if path in origins:
            return origins[path]
        path = path.rpartition(".")[0]
    return ""


@cache
def read_default_files() -> frozenset[str]:
    """Files that set a value when a recipe chooses nothing: conf/config.yaml, the options it names, and theirs."""
    found: set[str] = set()
    waiting = ["config.yaml"]
    while waiting:
        name = waiting.pop()
        file = Path(__file__).parent.parent / "conf" / name
        if f"conf/{name}" not in found and file.is_file():
            found.add(f"conf/{name}")
            waiting += _read_chosen_files(file, name.rpartition("/")[0])
    return frozenset(found)


def _read_chosen_files(file: Path, group: str) -> Iterator[str]:
    """Files below conf/ that the defaults list of a file names."""
    for entry in (yaml.load(file.read_text(encoding="utf-8"), _Loader) or {}).get("defaults", ()):
        if isinstance(entry, str):
            yield f"{group}/{entry}.yaml"
            continue
        for key, option in entry.items():
            name = key.removeprefix("override ").partition("@")[0]
            here = name.removeprefix("/") if name.startswith("/") or not group else f"{group}/{name}"
            if option is not None:
                yield f"{here}/{option}.yaml"


def find_roots(sources: Iterable[str]) -> list[Path]:
    """Directories of Hydra's sources, e.g. of ``pkg://rlrecipes.conf``; its schemas are in no file."""
    return [root for source in sources if (root := _find_root(source)) is not None]


@cache
def _find_root(source: str) -> Path | None:
    scheme, _, rest = source.partition("://")
    if scheme != "pkg":
        return Path(rest) if scheme == "file" else None
    spec = importlib.util.find_spec(rest)
    locations = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(locations))) if locations else None


def to_file(root: Path, config_path: str) -> Path:
    """The file of one of Hydra's configs below a root, whether it is there or not."""
    return root / (config_path if config_path.endswith(".yaml") else config_path + ".yaml")


def show_file(file: Path) -> str:
    """A file as people know it: from conf/ on, where it stands below one."""
    parts = file.parts
    return "/".join(parts[parts.index("conf") :]) if "conf" in parts else str(file)


@lru_cache(maxsize=1024)
def _keys(text: str) -> tuple[tuple[str, int], ...]:
    return tuple(_walk(yaml.compose(text, Loader=_Loader), ""))


def _walk(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        if not prefix and key.value == "defaults":
            continue
        path = f"{prefix}.{key.value}" if prefix else str(key.value)
        yield path, key.start_mark.line + 1
        yield from _walk(value, path)
