"""How long a step takes, phase by phase, and what holds it up: predicted before a GPU is touched.

Owns the sum by schedule (today's one loop: collect, train, sync, nothing overlaps) and the words for the bottleneck.
docs/step_time.md says what is measured and what assumed.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlrecipes.plan.calibration import load_calibration
from rlrecipes.plan.predictions import RoleNode, StepTimeNode
from rlrecipes.plan.rollout_time import RolloutTime, compute_distribution, compute_rollout_time
from rlrecipes.plan.step_inputs import StepInputs
from rlrecipes.plan.sync_time import compute_checkpoint_time, compute_offload_time, compute_sync_time
from rlrecipes.plan.time_constants import TimeConstants
from rlrecipes.plan.train_time import compute_train_time

WORDS = {
    "rollout.weights": "decoding reads weights: larger batches (more rollouts an engine) or larger TP help",
    "rollout.kv_cache": "decoding reads the KV cache: shorter answers, larger TP or an fp8 cache help",
    "rollout.compute": "decoding computes: more GPUs or fp8 help",
    "rollout.overhead": "decoding waits for the engine's scheduler: larger models or batches use the GPU better",
    "rollout.exchange": "decoding exchanges activations: a smaller TP of the engines helps",
    "rollout.prefill": "engines read prompts: shorter prompts or engines for prefill help",
    "rollout.waiting": "decode engines wait for prefill: more prefill engines help",
    "train.compute": "training computes: more GPUs or less recomputing help",
    "train.launch": "training waits for its CPU to start kernels: larger micro-batches help",
    "train.exchange": "training exchanges activations: smaller TP, CP or EP, or groups inside a node help",
    "train.bubble": "training waits in the pipeline: more micro-batches, model chunks or a smaller PP help",
    "train.reduction": "training sums gradients: fewer train steps or overlap_grad_reduce help",
    "train.optimizer": "the optimizer updates: larger DP, or no offload to the host, helps",
    "sync.pause": "a weight sync waits for engines to stop: weight_sync.pause_mode=in_place helps",
    "sync.gather": "a weight sync gathers tensors: a smaller TP of the trainer helps",
    "sync.transfer": "a weight sync moves weights: a faster transport or link helps",
    "sync.buckets": "a weight sync hands over buckets: a larger weight_sync.bucket_bytes helps",
    "sync.verify": "a weight sync compares checksums: a larger weight_sync.verify_interval helps",
    "offload.offload": "memory goes to the host and back: engines on GPUs of their own need none of it",
}
"""phase.cause -> what it means and what helps against it."""


def load_time_constants(path: str | None) -> TimeConstants:
    """The constants of a calibration file.

    Args:
        path: the file; None: the shipped one.

    Raises:
        ConfigError: the file is no calibration.
    """
    return TimeConstants(**load_calibration(path).values("time"))


def compute_step_time(inputs: StepInputs, constants: TimeConstants, calibration: str | None = None) -> StepTimeNode:
    """Predict a step.

    Args:
        inputs: of the step.
        constants: of the model.
        calibration: file that the constants are from, for the record; None: the shipped one.
    """
    distribution = compute_distribution(inputs, constants)
    rollout = compute_rollout_time(inputs, constants) if inputs.has_rollouts else None
    train = compute_train_time(inputs, constants, distribution)
    sync = compute_sync_time(inputs, constants) if rollout else {}
    offload_s = compute_offload_time(inputs, constants) if rollout else 0.0
    rollout_s, sync_s = rollout.duration_s if rollout else 0.0, sum(sync.values())
    step_s = rollout_s + train.logprobs_s + train.train_s + sync_s + offload_s
    parts = {f"rollout.{name}": seconds for name, seconds in (rollout.parts if rollout else {}).items()}
    parts |= {f"train.{name}": seconds for name, seconds in train.parts.items()}
    parts |= {f"sync.{name}": seconds for name, seconds in sync.items()}
    parts |= {"offload.offload": offload_s} if offload_s else {}
    num_prompt_tokens = inputs.num_samples * distribution.prompt_tokens
    num_response_tokens = (
        rollout.num_response_tokens if rollout else round(inputs.num_samples * distribution.mean_tokens)
    )
    return StepTimeNode(
        rollout_s=rollout_s,
        logprobs_s=train.logprobs_s,
        train_s=train.train_s,
        weight_sync_s=sync_s,
        offload_s=offload_s,
        step_s=step_s,
        checkpoint_s=compute_checkpoint_time(inputs, constants),
        rollout_tail_s=rollout.tail_s if rollout else 0.0,
        longest_tokens_per_s=rollout.longest_tokens_per_s if rollout else 0.0,
        num_micro_batches=train.num_micro_batches,
        response_tokens_mean=num_response_tokens / inputs.num_samples,
        samples_per_s=inputs.num_samples / step_s,
        tokens_per_s_per_gpu=(num_prompt_tokens + num_response_tokens) / step_s / inputs.num_gpus,
        num_gpus=inputs.num_gpus,
        gpu_s=inputs.num_gpus * step_s,
        roles=_roles(inputs, rollout, step_s, train.logprobs_s + train.train_s, sync_s),
        parts=parts,
        bottleneck=_find_bottleneck(parts, step_s, rollout),
        calibration=calibration,
    )


def _roles(
    inputs: StepInputs, rollout: RolloutTime | None, step_s: float, train_s: float, sync_s: float
) -> tuple[RoleNode, ...]:
    """Share of the step that each role's processes have nothing to do, whether or not another role uses their GPUs."""
    roles = [
        RoleNode(role="trainer", num_gpus=len(inputs.trainer_devices), idle_fraction=1 - (train_s + sync_s) / step_s)
    ]
    if rollout is not None:
        busy_s = rollout.duration_s * rollout.busy_fraction + sync_s
        num_gpus = sum(group.num_engines * group.num_gpus for group in inputs.engine_groups)
        roles.append(RoleNode(role="engines", num_gpus=num_gpus, idle_fraction=1 - busy_s / step_s))
    return tuple(roles)


def _find_bottleneck(parts: Mapping[str, float], step_s: float, rollout: RolloutTime | None) -> str:
    """The phase that takes longest, and within it what does."""
    phases: dict[str, float] = {}
    for name, seconds in parts.items():
        phase = name.partition(".")[0]
        phases[phase] = phases.get(phase, 0.0) + seconds
    phase = max(phases, key=phases.__getitem__)
    part = max((name for name in parts if name.startswith(phase + ".")), key=parts.__getitem__)
    words = f"{phase} is {phases[phase] / step_s:.0%} of the step; {WORDS[part]}"
    if phase == "rollout" and rollout is not None and rollout.tail_s > rollout.duration_s / 2:
        share = rollout.tail_s / rollout.duration_s
        words += f"; the last tenth of the answers takes {share:.0%} of it: a lower max_new_tokens helps"
    return words
