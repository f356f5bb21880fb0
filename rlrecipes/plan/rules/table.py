"""All rules, in one table. Every one is run, and all they find is told together."""

from __future__ import annotations

from rlrecipes.errors import Problem
from rlrecipes.plan.rules import (
    batch,
    credit,
    data,
    engines,
    host,
    lengths,
    objective,
    parallel,
    precision,
    sampling,
    schedule,
    scoring,
    shapes,
    speculative,
    topology,
    weight_sync,
)
from rlrecipes.plan.rules.rule import Facts, Rule

_SUBJECTS = (
    batch,
    objective,
    credit,
    sampling,
    data,
    lengths,
    topology,
    engines,
    scoring,
    speculative,
    weight_sync,
    parallel,
    shapes,
    precision,
    schedule,
    host,
)
RULES: tuple[Rule, ...] = tuple(rule for subject in _SUBJECTS for rule in subject.RULES)


def check_recipe(facts: Facts) -> list[Problem]:
    """Every problem across the fields of a recipe.

    Args:
        facts: of the recipe.
    """
    return [problem for rule in RULES for problem in rule.judge(facts)]
