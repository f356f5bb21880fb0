"""JSON lines of a prompt file. Owns reading them and reporting every bad one; refuses tokenizing and order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from rlrecipes.errors import DataError, Problem

MAX_REPORTED_PROBLEMS = 20
"""Bad lines listed in one error; the rest are counted."""


@dataclass(frozen=True, slots=True)
class RowKeys:
    """Under which keys of a row its parts stand.

    Attributes:
        prompt: a string, or a list of chat messages.
        label: what a verifier compares with: a string or a number.
        metadata: an object; may be absent.
        response: the answer to imitate (SFT).
    """

    prompt: str = "prompt"
    label: str = "label"
    metadata: str = "metadata"
    response: str = "response"


@dataclass(slots=True)
class ProblemList:
    """The bad lines of one file, collected so that all are reported together.

    Attributes:
        path: the file.
        problems: what was found so far.
    """

    path: Path
    problems: list[Problem] = field(default_factory=list)

    def add(self, line: int, problem: str, fix: str) -> None:
        """Note one bad line.

        Args:
            line: 1-based line number.
            problem: what is wrong with it.
            fix: what to do about it.
        """
        self.problems.append(Problem(f"{self.path}:{line}", problem, fix))

    def check(self) -> None:
        """Fail when anything was noted.

        Raises:
            DataError: with the first ``MAX_REPORTED_PROBLEMS`` lines in file order.
        """
        if not self.problems:
            return
        ordered = sorted(self.problems, key=lambda problem: int(problem.where.rpartition(":")[2]))
        shown = ordered[:MAX_REPORTED_PROBLEMS]
        if len(ordered) > len(shown):
            rest = f"{len(ordered) - len(shown)} more lines are bad"
            shown.append(Problem(str(self.path), rest, f"repair the first {MAX_REPORTED_PROBLEMS} and run again"))
        raise DataError.from_problems(shown)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the file.

    Attributes:
        line: 1-based line number.
        fields: the parsed object.
    """

    line: int
    fields: Mapping[str, Any]


def build_rows(path: Path, problems: ProblemList) -> list[Row]:
    """Read every line of a JSON-lines file; blank lines are skipped, bad ones noted.

    Args:
        path: the file, UTF-8.
        problems: where malformed lines are noted.

    Raises:
        DataError: the file is missing, unreadable or holds no line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        fix = "give the path of a JSONL file" if not path.exists() else "make it a readable file"
        raise DataError(str(path), f"cannot read the prompt file: {error.strerror or error}", fix) from error
    rows: list[Row] = []
    is_empty = True
    for line, text in enumerate(content.split(b"\n"), start=1):
        if not text.strip():
            continue
        is_empty = False
        fields = _parse(text, line, problems)
        if fields is not None:
            rows.append(Row(line, fields))
    if is_empty:
        raise DataError(str(path), "the prompt file is empty", "write one JSON object per line into it")
    return rows


def _parse(text: bytes, line: int, problems: ProblemList) -> dict[str, Any] | None:
    fix = "write one JSON object per line, in UTF-8 without a byte order mark"
    try:
        fields = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        problems.add(line, f"not JSON: {error.msg} (column {error.colno})", fix)
        return None
    if not isinstance(fields, dict):
        problems.add(line, f"is a {_type_name(fields)}, not an object", fix)
        return None
    return fields


def to_field(row: Row, key: str, kinds: tuple[type, ...], wanted: str, problems: ProblemList) -> Any:
    """Take one field of a row, noting when it is missing or of a wrong type.

    Args:
        row: the row.
        key: the field.
        kinds: allowed types.
        wanted: how a person calls them.
        problems: where a problem is noted.

    Returns:
        The value, or None when a problem was noted.
    """
    if key not in row.fields:
        known = ", ".join(repr(name) for name in row.fields) or "none"
        problems.add(row.line, f"has no key {key!r}", f"add it, or name the right key (this line has: {known})")
        return None
    value = row.fields[key]
    # A bool is an int to isinstance, but never a label or a prompt.
    if isinstance(value, bool) or not isinstance(value, kinds):
        problems.add(row.line, f"{key!r} is a {_type_name(value)}", f"make it {wanted}")
        return None
    return value


def _type_name(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", int: "number", float: "number", bool: "boolean"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def run_checked[T](
    rows: Sequence[Row], convert: Callable[[Row, ProblemList], T | None], problems: ProblemList
) -> list[tuple[Row, T]]:
    """Convert every row, then fail with all problems together when any was noted.

    Args:
        rows: what ``build_rows`` gave.
        convert: gives None after noting a problem.
        problems: the file's, with what ``build_rows`` noted.

    Raises:
        DataError: any problem was noted.
    """
    converted = [(row, value) for row in rows if (value := convert(row, problems)) is not None]
    problems.check()
    return converted
