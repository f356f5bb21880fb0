"""Where each value of a recipe was set: file and line, or the override. Reads what Hydra loaded; decides nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Origins = dict[str, str]
"""Dotted path -> ``conf/algo/grpo.yaml:3`` or ``override``."""
Choices = dict[str, str]
"""Group -> option, e.g. ``algo`` -> ``grpo``; a part mounted elsewhere is named ``group@path``."""


def read_origins(
    loader: Any, config_name: str, overrides: list[str], run_mode: Any, config_dirs: Sequence[Path] = ()
) -> tuple[Origins, Choices]:
    """Trace every key of every file Hydra composed, in its order, then the overrides.

    Args:
        loader: Hydra's config loader.
        config_name: the primary config.
        overrides: as Hydra got them.
        run_mode: Hydra's.
        config_dirs: directories that Hydra searches beside the loader's own.

    Returns:
        The last place that set each path, and the option chosen of each group.
    """
    origins: Origins = {}
    defaults = loader.compute_defaults_list(config_name, overrides, run_mode)
    choices = {
        group: option
        for group, option in sorted(defaults.overrides.known_choices.items())
        if option is not None and not group.startswith("hydra/")
    }
    roots = [f"file://{directory.absolute()}" for directory in config_dirs]
    roots += [source.full_path() for source in loader.get_sources()]  # in the order in which Hydra searches them
    for default in defaults.defaults:
        if default.config_path is None or default.config_path.startswith("hydra"):
            continue
        file = next((found for root in roots if (found := _locate(root, default.config_path))), None)
        if file is None:
            continue
        package = default.package or ""
        shown = show_file(file)
        for path, line in _keys(file):
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


def _locate(source: str, config_path: str) -> Path | None:
    scheme, _, rest = source.partition("://")
    root = Path(rest)
    if scheme == "pkg":
        spec = importlib.util.find_spec(rest)
        if spec is None or not spec.submodule_search_locations:
            return None
        root = Path(next(iter(spec.submodule_search_locations)))
    file = root / (config_path if config_path.endswith(".yaml") else config_path + ".yaml")
    return file if file.is_file() else None


def show_file(file: Path) -> str:
    """A file as people know it: from conf/ on, where it stands below one."""
    parts = file.parts
    return "/".join(parts[parts.index("conf") :]) if "conf" in parts else str(file)


def _keys(file: Path) -> Iterator[tuple[str, int]]:
    root = yaml.compose(file.read_text(encoding="utf-8"), Loader=_Loader)
    yield from _walk(root, "")


def _walk(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        if not prefix and key.value == "defaults":
            continue
        path = f"{prefix}.{key.value}" if prefix else str(key.value)
        yield path, key.start_mark.line + 1
        yield from _walk(value, path)
