"""Every error a user can meet. Owns the tree and its exit codes; refuses to format for any one output.

    RecipeError                     where (dotted path), problem, fix
    |-- InputError                  exit code 2: what was asked for cannot be done
    |   |-- ConfigError             one or more problems in a recipe, a Plan or an override
    |   `-- DataError               one or more problems in a prompt file: missing, empty, malformed
    `-- RunError                    exit code 1: a run that was fine to start has failed
        |-- EngineError             a serving engine or router did not start, died or answered wrongly
        |-- TrainerError            a trainer rank died, or its numbers are not finite
        |-- WeightSyncError         weights did not arrive, or arrived different
        |-- CheckpointError         a checkpoint cannot be written or read
        `-- ContractError           a part (ours or a plugin's) broke the protocol it implements

A failed rollout is data (``Rollout.status``), never one of these. Beside the tree stand ``Interrupted``, a signal asked
the run to stop, and ``Pruned``, other points of its sweep are better: the run stopped in order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        where: dotted path of the value (``algo.group_size``), or ``file:line``.
        problem: what is wrong, with the offending value.
        fix: what to do about it; the nearest right spelling or value where there is one.
        origin: where the value was set (``override``, ``conf/algo/grpo.yaml``); empty when unknown.
        rule: what refuses it, as docs/rules.md names it; empty for what only a run can find.
    """

    where: str
    problem: str
    fix: str
    origin: str = ""
    rule: str = ""

    def __str__(self) -> str:
        origin = f" (set in {self.origin})" if self.origin else ""
        return f"{self.where}{origin}: {self.problem}\n    fix: {self.fix}"


def name_rule(problems: Iterable[Problem], rule: str) -> list[Problem]:
    """Say what refused problems that do not say it themselves.

    Args:
        problems: of one judge.
        rule: its name in docs/rules.md.
    """
    return [problem if problem.rule else replace(problem, rule=rule) for problem in problems]


class RecipeError(Exception):
    """Base of all errors meant for a user.

    Args:
        where: dotted path or ``file:line`` of the fault.
        problem: what is wrong.
        fix: what to do about it.
    """

    exit_code = 1

    def __init__(self, where: str, problem: str, fix: str) -> None:
        super().__init__(where, problem, fix)
        self.problems: tuple[Problem, ...] = (Problem(where, problem, fix),)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)

    def to_json(self) -> str:
        """``{"problems": [{"where", "problem", "fix", "origin", "rule"}, ...]}``, indented."""
        return json.dumps({"problems": [asdict(problem) for problem in self.problems]}, indent=2)


class InputError(RecipeError):
    """What was asked for cannot be done; nothing was started."""

    exit_code = 2

    @classmethod
    def from_problems(cls, problems: Sequence[Problem]) -> Self:
        """Build one error from every problem found.

        Args:
            problems: at least one.

        Raises:
            ValueError: ``problems`` is empty.
        """
        if not problems:
            raise ValueError(f"{cls.__name__} needs at least one problem")
        error = cls(problems[0].where, problems[0].problem, problems[0].fix)
        error.problems = tuple(problems)
        return error

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self).from_problems, (self.problems,))


class ConfigError(InputError):
    """All problems found in a recipe, a Plan or an override, reported together."""


class DataError(InputError):
    """All problems found in a prompt file (missing, empty, malformed), reported together."""


class RunError(RecipeError):
    """A run that was fine to start has failed."""


class EngineError(RunError):
    """A serving engine or router did not start, died or answered wrongly."""


class TrainerError(RunError):
    """A trainer rank died, or its numbers are not finite."""


class WeightSyncError(RunError):
    """Weights did not arrive at an engine, or arrived different."""


class CheckpointError(RunError):
    """A checkpoint cannot be written or read."""


class ContractError(RunError):
    """A part broke the protocol it implements."""


class Interrupted(BaseException):
    """SIGINT or SIGTERM asked the run to stop: it checkpoints, stops its children and exits.

    Args:
        signal_number: the signal received; the exit code is 128 plus it.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


class Pruned(Exception):
    """A point of a sweep is worse than others: it checkpoints, stops its children and ends with code 0.

    Args:
        reason: by which metric, at which step.
    """
