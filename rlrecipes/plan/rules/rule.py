"""What a rule is, what it may look at, and how it tells what it found."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rlrecipes.config.schema import ModelShapes, RlConfig, RunConfig, ServedModelConfig, ServerGroupConfig
from rlrecipes.errors import Problem
from rlrecipes.plan.nodes import ClusterNode, HostNode
from rlrecipes.plan.placement import Placement

MODEL = "topology.served_models.<name>"
GROUP = f"{MODEL}.server_groups.<name>"


@dataclass(frozen=True, slots=True)
class Facts:
    """What rules judge.

    Attributes:
        config: the recipe.
        shapes: of the model; None when they could not be known, and rules about them are passed over.
        hosts: machines of the cluster; none where they could not be told.
        cluster: what is said of it beside its machines.
        placement: who lies where; empty where something does not fit.
    """

    config: RunConfig
    shapes: ModelShapes | None
    hosts: tuple[HostNode, ...]
    cluster: ClusterNode
    placement: Placement


class Found(NamedTuple):
    """One thing a rule found.

    Attributes:
        where: dotted path of the value to change.
        problem: what is wrong, with the value.
        fix: what to do about it here; None: what the rule always advises.
    """

    where: str
    problem: str
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of the table.

    Attributes:
        name: what must hold, in a word; stands in ``Problem.rule``.
        subject: file it stands in.
        keys: where it may find something; ``<name>`` stands for a name of the user's.
        reason: why it must hold.
        fix: what mends it.
        find: yields what breaks it.
    """

    name: str
    subject: str
    keys: tuple[str, ...]
    reason: str
    fix: str
    find: Callable[[Facts], Iterator[Found]]

    def judge(self, facts: Facts) -> Iterator[Problem]:
        """What breaks this rule.

        Args:
            facts: of the recipe.
        """
        for where, problem, fix in self.find(facts):
            yield Problem(where, problem, fix or self.fix, rule=self.name)


def _build_rule(
    function: Callable[..., Iterator[Found]],
    find: Callable[[Facts], Iterator[Found]],
    keys: tuple[str, ...],
    fix: str,
) -> Rule:
    reason = " ".join((inspect.getdoc(function) or "").split())
    return Rule(function.__name__, function.__module__.rpartition(".")[2], keys, reason, fix, find)


def fact_rule(*keys: str, fix: str) -> Callable[[Callable[[Facts], Iterator[Found]]], Rule]:
    """Make a rule of a function of all facts; its docstring is the reason.

    Args:
        keys: where it may find something.
        fix: what mends it.
    """
    return lambda function: _build_rule(function, function, keys, fix)


def rule(*keys: str, fix: str) -> Callable[[Callable[[RunConfig], Iterator[Found]]], Rule]:
    """Make a rule of a function of the recipe alone.

    Args:
        keys: where it may find something.
        fix: what mends it.
    """
    return lambda function: _build_rule(function, lambda facts: function(facts.config), keys, fix)


def rl_rule(*keys: str, fix: str) -> Callable[[Callable[[RunConfig, RlConfig], Iterator[Found]]], Rule]:
    """Make a rule of reinforcement learning: a function of the recipe and its algorithm.

    Args:
        keys: where it may find something.
        fix: what mends it.
    """

    def build(function: Callable[[RunConfig, RlConfig], Iterator[Found]]) -> Rule:
        def find(facts: Facts) -> Iterator[Found]:
            if isinstance(facts.config.algo, RlConfig):
                yield from function(facts.config, facts.config.algo)

        return _build_rule(function, find, keys, fix)

    return build


def shape_rule(*keys: str, fix: str) -> Callable[[Callable[[RunConfig, ModelShapes], Iterator[Found]]], Rule]:
    """Make a rule of a function of the recipe and the model's shapes, passed over where these are unknown.

    Args:
        keys: where it may find something.
        fix: what mends it.
    """

    def build(function: Callable[[RunConfig, ModelShapes], Iterator[Found]]) -> Rule:
        def find(facts: Facts) -> Iterator[Found]:
            if facts.shapes is not None:
                yield from function(facts.config, facts.shapes)

        return _build_rule(function, find, keys, fix)

    return build


def list_models(config: RunConfig) -> Iterator[tuple[str, str, ServedModelConfig]]:
    """Path, name and section of every served model.

    Args:
        config: the recipe.
    """
    for name, model in config.topology.served_models.items():
        yield f"topology.served_models.{name}", name, model


def list_groups(config: RunConfig) -> Iterator[tuple[str, ServedModelConfig, ServerGroupConfig]]:
    """Path, model and section of every server group.

    Args:
        config: the recipe.
    """
    for where, _, model in list_models(config):
        for name, group in model.server_groups.items():
            yield f"{where}.server_groups.{name}", model, group


def list_divisors_near(value: int, of: int) -> str:
    """The three divisors of a number that are nearest to a value, in words.

    Args:
        value: what was asked for.
        of: the number.
    """
    divisors = sorted((d for d in range(1, of + 1) if of % d == 0), key=lambda divisor: abs(divisor - value))
    return ", ".join(map(str, divisors[:3]))
