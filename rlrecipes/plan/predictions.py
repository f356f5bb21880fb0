"""What a Plan predicts of its steps. Read by people and by search; no part of a run, nor of the Plan's hash."""

from __future__ import annotations

from typing import Literal

from rlrecipes.config.schema import Section


class RoleNode(Section):
    """Processes of one kind, and how long they stand still."""

    role: Literal["trainer", "engines"]
    num_gpus: int
    idle_fraction: float
    """Of the step, in which they have nothing to do; a colocated role's GPUs may then work for the other."""


class StepTimeNode(Section):
    """One step: what it takes, and why. Durations in seconds."""

    rollout_s: float
    """From the first request to the last answer."""
    logprobs_s: float
    """Old, reference and teacher logprobs, and values."""
    train_s: float
    """All train steps."""
    weight_sync_s: float
    offload_s: float
    """Memory that colocated trainer and engines give back and take again."""
    step_s: float
    """The sum of these."""
    checkpoint_s: float
    """One checkpoint, which no step above has in it."""
    rollout_tail_s: float
    """Of the rollouts: after nine tenths of the slowest engine's answers."""
    longest_tokens_per_s: float
    """Speed of the longest rollout."""
    num_micro_batches: int
    """Of one rank in one train step."""
    response_tokens_mean: float
    samples_per_s: float
    tokens_per_s_per_gpu: float
    """Prompts and answers of the step, over its time and its GPUs."""
    num_gpus: int
    gpu_s: float
    """GPU-seconds of a step."""
    roles: tuple[RoleNode, ...]
    parts: dict[str, float]
    """phase.cause -> seconds; of the rollouts: the slowest engine's."""
    bottleneck: str
    """What takes longest and what would help."""
    calibration: str | None
    """File of the constants; null: the shipped one."""
