"""Batch arithmetic: prompts x group = rollouts per train step x train steps, exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlrecipes.config.schema import RlConfig, RunConfig
from rlrecipes.plan.rules.rule import Found, list_divisors_near, rule

MAX_ROLLOUTS_PER_STEP = 1 << 20


@rule("schedule.num_train_steps", fix="use a divisor of prompts_per_step, or a multiple of it as prompts_per_step")
def train_steps_divide_prompts(config: RunConfig) -> Iterator[Found]:
    """Every train step of a step gets the same number of whole groups; no rollout is left over."""
    prompts, parts = config.schedule.prompts_per_step, config.schedule.num_train_steps
    if prompts % parts:
        fix = (
            f"use one of {list_divisors_near(parts, prompts)}, or prompts_per_step={math.ceil(prompts / parts) * parts}"
        )
        yield Found("schedule.num_train_steps", f"is {parts}, which does not divide prompts_per_step={prompts}", fix)


@rule("schedule.prompts_per_step", fix="lower schedule.prompts_per_step or algo.group_size")
def rollouts_of_a_step_can_be_listed(config: RunConfig) -> Iterator[Found]:
    """Collector, batches and predictions hold every rollout of a step at once."""
    group_size = config.algo.group_size if isinstance(config.algo, RlConfig) else 1
    num_rollouts = config.schedule.prompts_per_step * group_size
    if num_rollouts > MAX_ROLLOUTS_PER_STEP:
        yield Found(
            "schedule.prompts_per_step",
            f"times the group size is {num_rollouts} rollouts of one step; {MAX_ROLLOUTS_PER_STEP} are the most",
        )


RULES = (train_steps_divide_prompts, rollouts_of_a_step_can_be_listed)
