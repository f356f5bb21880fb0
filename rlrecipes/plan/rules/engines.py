"""How engines are split."""

from __future__ import annotations

from collections.abc import Iterator

from rlrecipes.config.schema import RunConfig, ServerGroupConfig
from rlrecipes.plan.rules.rule import GROUP, Found, list_divisors_near, list_groups, rule


def compute_tp(group: ServerGroupConfig) -> int:
    """TP of one engine.

    Args:
        group: its group.
    """
    return max(1, group.gpus_per_engine // group.pipeline_parallel_size)


@rule(f"{GROUP}.pipeline_parallel_size", fix="use a divisor")
def engine_pp_divides_gpus(config: RunConfig) -> Iterator[Found]:
    """An engine's GPUs are TP x PP; none is left over."""
    for where, _, group in list_groups(config):
        if group.gpus_per_engine % group.pipeline_parallel_size:
            problem = (
                f"is {group.pipeline_parallel_size}, which does not divide gpus_per_engine={group.gpus_per_engine}"
            )
            yield Found(f"{where}.pipeline_parallel_size", problem)


@rule(f"{GROUP}.attention_data_parallel_size", f"{GROUP}.expert_parallel_size", fix="use a divisor")
def engine_tp_is_split_evenly(config: RunConfig) -> Iterator[Found]:
    """Replicas of attention and parts of the experts share the engine's TP ranks evenly."""
    for where, _, group in list_groups(config):
        tp = compute_tp(group)
        for name in ("attention_data_parallel_size", "expert_parallel_size"):
            if tp % getattr(group, name):
                problem = f"is {getattr(group, name)}, which does not divide the engine's TP of {tp}"
                yield Found(f"{where}.{name}", problem, f"use {list_divisors_near(getattr(group, name), tp)}")


RULES = (engine_pp_divides_gpus, engine_tp_is_split_evenly)
