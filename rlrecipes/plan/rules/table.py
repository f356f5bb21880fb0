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
    turns,
    weight_sync,
)
from rlrecipes.plan.rules.rule import Facts, Rule

_SUBJECTS = (
    batch,
    objective,
    credit,
    sampling,
    turns,
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
JUDGES = {
    "schema": "each value by itself: unknown and missing keys, types, ranges, choices",
    "composition": "the words of the command line and the groups they choose",
    "model_facts": "`model`: config.json, shapes, and whether they agree",
    "cluster_facts": "`cluster`: what is described or found, and whether it agrees",
    "native_options": "`sglang`, `router`, `megatron` and tasks: their own names and types, of the pinned versions",
    "reward": "`reward`: a verifier's name and options, or a function of your own",
    "placement": "`topology`: whether trainer ranks and engines find their GPUs",
    "memory": "whether every GPU holds what lies on it, every machine what waits in its memory, and every KV cache one "
    "longest rollout (docs/memory.md)",
    "calibration": "`calibration`: a file of constants of your own",
}
"""Who refuses a recipe beside the rules, by the name in ``Problem.rule``."""


def check_recipe(facts: Facts) -> list[Problem]:
    """Every problem across the fields of a recipe.

    Args:
        facts: of the recipe.
    """
    return [problem for rule in RULES for problem in rule.judge(facts)]
