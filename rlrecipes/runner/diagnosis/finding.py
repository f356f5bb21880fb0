"""One line of a diagnosis. Imports nothing, so that a machine without any package can still be told what it lacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rlrecipes.errors import Problem

State = Literal["ok", "warning", "missing"]
_HEADINGS = ("", "what", "found", "needed for", "fix")


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked for, and what was found.

    Attributes:
        what: was looked for.
        found: in its place.
        needed_for: which part of a run asks for it.
        fix: what to do; empty where nothing lacks.
        is_needed: by what was asked about; what is not only warns.
    """

    what: str
    found: str
    needed_for: str
    fix: str = ""
    is_needed: bool = True

    @property
    def state(self) -> State:
        """ok: nothing lacks; warning: what was asked about does without; missing: it does not."""
        if not self.fix:
            return "ok"
        return "missing" if self.is_needed else "warning"

    def to_data(self) -> dict[str, str]:
        """Plain data."""
        columns = {"what": self.what, "found": self.found, "needed_for": self.needed_for, "fix": self.fix}
        return {"state": self.state, **columns}


def to_findings(problems: Iterable[Problem], needed_for: str) -> list[Finding]:
    """Problems that others have found with this machine.

    Args:
        problems: theirs.
        needed_for: what cannot run because of them.
    """
    return [Finding(problem.where, problem.problem, needed_for, problem.fix) for problem in problems]


def to_table(findings: Sequence[Finding]) -> str:
    """One line a finding, in columns; no library draws it, since that may be what is missing.

    Args:
        findings: in order.
    """
    rows = [_HEADINGS, *((one.state, one.what, one.found, one.needed_for, one.fix) for one in findings)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
