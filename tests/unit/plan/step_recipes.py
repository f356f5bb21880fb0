"""Recipes on described GPUs, as inputs of the step-time model."""

from __future__ import annotations

import dataclasses
import functools

from rlrecipes.config.compose import compose
from rlrecipes.plan.cluster import read_cluster
from rlrecipes.plan.facts import read_shapes
from rlrecipes.plan.placement import place
from rlrecipes.plan.step_inputs import StepInputs, to_step_inputs
from rlrecipes.plan.step_time import load_time_constants

CONSTANTS = load_time_constants(None)
MAIN = "topology.served_models.policy.server_groups.main"
LONG = (
    "data.max_prompt_tokens=1024",
    "rollout.sampling.max_new_tokens=8192",
    "parallel.max_tokens_per_micro_batch=16384",
    "schedule.prompts_per_step=64",
    "rollout.max_concurrent_requests=1024",
)
COLOCATED = ("model=qwen3_4b", "topology=colocated", "cluster=h200_8", "parallel.data_parallel_size=8", *LONG)
APART = (
    "model=qwen3_4b",
    "topology=disaggregated",
    "cluster=h100_8x2",
    "weight_sync=distributed",
    "parallel.data_parallel_size=8",
    *LONG,
)


@functools.cache
def maybe_inputs_of(*overrides: str) -> StepInputs | None:
    """None where the model says nothing; fails where the recipe cannot be placed."""
    config = compose(overrides).config
    problems: list = []
    cluster = read_cluster(config.cluster, config.runs_dir, problems, lambda address: ())
    shapes, _ = read_shapes(config.model, problems)
    placement = place(config, cluster.hosts, problems)
    assert not problems, problems
    return to_step_inputs(config, shapes, cluster.node, cluster.hosts, placement)


def inputs_of(*overrides: str) -> StepInputs:
    """Fails where the model says nothing."""
    inputs = maybe_inputs_of(*overrides)
    assert inputs is not None
    return inputs


def with_gpu(inputs: StepInputs, **figures: float) -> StepInputs:
    """The same on other GPUs."""
    return dataclasses.replace(inputs, gpu=inputs.gpu.model_copy(update=figures))


def with_constants(**values: float):
    """The shipped constants with others in their place."""
    return dataclasses.replace(CONSTANTS, **values)
