"""A recipe changed value by value and judged by the rules alone: composing each anew would take minutes."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

from rlrecipes.config.compose import compose
from rlrecipes.config.validation import validate
from rlrecipes.plan.cluster import to_cluster_node
from rlrecipes.plan.facts import read_shapes
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.placement import Placement, place
from rlrecipes.plan.rules.rule import Facts
from rlrecipes.plan.rules.table import RULES

BY_NAME = {rule.name: rule for rule in RULES}


@dataclass(frozen=True)
class Case:
    """One rule shown firing, and its neighbour value passing.

    Attributes:
        rule: its name.
        where: the key it names.
        broken: dotted path -> value that breaks it.
        kept: what differs where it is kept.
        base: group choices.
        gpus: of each machine; none: one machine without.
        told: a part of problem or fix.
    """

    rule: str
    where: str
    broken: dict[str, Any]
    kept: dict[str, Any]
    base: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()
    told: str = ""

    def __str__(self) -> str:
        return f"{self.rule}-{self.where.rpartition('.')[2]}-{'-'.join(map(str, self.broken.values()))}"[:80]


@functools.cache
def _compose(base: tuple[str, ...]) -> dict[str, Any]:
    return compose(base).config.model_dump(mode="json")


def facts_of(values: dict[str, Any], base: tuple[str, ...] = (), gpus: tuple[int, ...] = ()) -> Facts:
    """What rules see of a recipe with some values changed."""
    data = copy.deepcopy(_compose(base))
    for path, value in values.items():
        *parents, leaf = path.split(".")
        here = data
        for step in parents:
            here = here.setdefault(step, {})
        here[leaf] = value
    config, problems = validate(data, {})
    assert config is not None, problems
    hosts = tuple(
        HostNode(name=f"n{number}", num_cpus=8, num_gpus=num_gpus, memory_bytes=1 << 38)
        for number, num_gpus in enumerate(gpus or (0,))
    )
    shapes, _ = read_shapes(config.model, [])
    placement = place(config, hosts, problems)
    return Facts(config, shapes, hosts, to_cluster_node(config.cluster), Placement() if problems else placement)
