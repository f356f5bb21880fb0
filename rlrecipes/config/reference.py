"""The text of docs/config.md: every key a recipe may have, and every option of every conf/ group.

Owns nothing: keys, types and meanings come from the schema, options from the first comment of their files.

    python -m rlrecipes.config.reference > docs/config.md
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlrecipes.config.schema import RunConfig

_CONF_DIR = Path(__file__).parent.parent / "conf"
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_TYPES = {"integer": "int", "number": "float", "boolean": "bool", "string": "string", "null": "null"}
_Schema = Mapping[str, Any]


def render_docs() -> str:
    """The text of docs/config.md: one chapter a conf/ group."""
    schema = RunConfig.model_json_schema()
    sections = schema["$defs"]
    properties: Mapping[str, _Schema] = schema["properties"]
    plain = {name: value for name, value in properties.items() if not (_CONF_DIR / name).is_dir()}
    lines = [
        "# Configuration",
        "",
        "Generated from the schema by `python -m rlrecipes.config.reference > docs/config.md`; do not edit.",
        "",
        "`group=option` chooses a file of conf/, `key=value` sets one key. A name in `<...>` is yours to choose.",
        "",
        "## The run",
        *_table(row for name, value in plain.items() for row in _rows(name, value, sections)),
    ]
    for group in [name for name in properties if name not in plain]:
        lines += ["", f"## {group}", "", *_options(group)]
        for section in _sections_of(properties[group], sections):
            rows = _section_rows(group, section, sections)
            lines += ["", _escape(section["description"]), *_table(rows)]
    parts = sorted(directory.name for directory in _CONF_DIR.iterdir() if directory.is_dir())
    for group in [name for name in parts if name not in properties and name not in ("recipe", "hydra", "__pycache__")]:
        lines += ["", f"## {group}", "", "What options of other groups are put together from.", "", *_options(group)]
    lines += ["", "## recipe", "", "Choices for all of the above that belong together.", "", *_options("recipe")]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Key:
    """One key that a recipe may have.

    Attributes:
        path: dotted; ``<name>`` stands for a name of the user's.
        kind: type, range and choices in words.
        meaning: unit and what it does.
    """

    path: str
    kind: str
    meaning: str


def read_keys() -> list[Key]:
    """Every key a recipe may have; where a section has several forms, a key may come more than once."""
    schema = RunConfig.model_json_schema()
    rows = (row for name, value in schema["properties"].items() for row in _rows(name, value, schema["$defs"]))
    return [Key(*row) for row in rows]


def read_options(group: str) -> list[tuple[str, str]]:
    """Options of a conf/ group and what each says of itself; none where there is no such group.

    Args:
        group: e.g. ``algo``.
    """
    found = []
    for file in sorted((_CONF_DIR / group).glob("*.yaml")):
        comments = [line[1:].strip() for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
        found.append((file.stem, next(comment for comment in comments if not comment.startswith("@package"))))
    return found


def _options(group: str) -> Iterator[str]:
    yield from (f"- `{group}={option}`: {_escape(said)}" for option, said in read_options(group))


def _escape(text: str) -> str:
    return text.replace("|", r"\|").replace("<", r"\<")


def _table(rows: Iterator[tuple[str, str, str]]) -> Iterator[str]:
    yield from ("", "| key | value | meaning |", "|---|---|---|")
    yield from (f"| `{path}` | {kind} | {meaning} |" for path, kind, meaning in rows)


def _section_rows(prefix: str, section: _Schema, sections: _Schema) -> Iterator[tuple[str, str, str]]:
    for name, value in section["properties"].items():
        yield from _rows(f"{prefix}.{name}", value, sections)


def _rows(path: str, value: _Schema, sections: _Schema) -> Iterator[tuple[str, str, str]]:
    yield path, _kind(value), _escape(" ".join(value.get("description", "").split()))
    named = value.get("additionalProperties")
    for section in _sections_of(value, sections):
        yield from _section_rows(path, section, sections)
    if isinstance(named, Mapping):
        for section in _sections_of(named, sections):
            yield from _section_rows(f"{path}.<name>", section, sections)


def _sections_of(value: _Schema, sections: _Schema) -> list[_Schema]:
    """The sections a value may be: itself, or members of a union."""
    members = [value, *value.get("anyOf", ()), *value.get("oneOf", ())]
    return [sections[member["$ref"].rpartition("/")[2]] for member in members if "$ref" in member]


def _kind(value: _Schema) -> str:
    """Type, range and choices in words, such as ``int >= 1`` or ``float > 1 or null``."""
    members = value.get("anyOf") or value.get("oneOf")
    if members:
        return " or ".join(dict.fromkeys(map(_kind, members)))
    if "$ref" in value:
        return "section"
    choices = value.get("enum", [value["const"]] if "const" in value else [])
    if choices:
        return "one of " + ", ".join(f"`{choice}`" for choice in choices) if len(choices) > 1 else f"`{choices[0]}`"
    if value["type"] == "array":
        return f"list of {_kind(value['items'])}"
    if value["type"] == "object":
        named = value.get("additionalProperties")
        return f"name -> {_kind(named)}" if isinstance(named, Mapping) else "name -> anything"
    bounds = [f"{sign} {value[bound]}" for bound, sign in _BOUNDS.items() if bound in value]
    return " ".join([_TYPES[value["type"]], ", ".join(bounds)]).strip()


if __name__ == "__main__":
    print(render_docs(), end="")
