"""Batch arithmetic: prompts x group = rollouts per train step x train steps, exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlrecipes.config.schema import RunConfig
from rlrecipes.plan.rules.rule import Found, list_divisors_near, rule


@rule("schedule.num_train_steps", fix="use a divisor of prompts_per_step, or a multiple of it as prompts_per_step")
def train_steps_divide_prompts(config: RunConfig) -> Iterator[Found]:
    """Every train step of a step gets the same number of whole groups; no rollout is left over."""
    prompts, parts = config.schedule.prompts_per_step, config.schedule.num_train_steps
    if prompts % parts:
        fix = (
            f"use one of {list_divisors_near(parts, prompts)}, or prompts_per_step={math.ceil(prompts / parts) * parts}"
        )
        yield Found("schedule.num_train_steps", f"is {parts}, which does not divide prompts_per_step={prompts}", fix)


RULES = (train_steps_divide_prompts,)
