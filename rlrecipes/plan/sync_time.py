"""How long weights take to the engines, and memory to change hands. Owns which link each transport uses."""

from __future__ import annotations

import math

from rlrecipes.plan.links import compute_link_bytes_per_s, compute_spread
from rlrecipes.plan.parameters import (
    RankCounts,
    compute_critic_parameters,
    compute_num_parameters,
    compute_rank_parameters,
)
from rlrecipes.plan.step_inputs import StepInputs
from rlrecipes.plan.time_constants import TimeConstants
from rlrecipes.plan.train_time import compute_host_fraction, compute_num_shards

_STATE_BYTES = 12
"""A parameter's weight and two moments, fp32."""


def compute_sync_time(inputs: StepInputs, constants: TimeConstants) -> dict[str, float]:
    """Seconds of one weight sync by what they go into.

    The stages of the trainer take turns; each gathers its tensors over TP and hands them on in buckets.

    Args:
        inputs: of the step.
        constants: of the model.

    Returns:
        pause, gather, transfer, buckets, verify -> seconds.
    """
    sync = inputs.weight_sync
    num_bytes = compute_num_parameters(inputs.shapes) * inputs.dtype_bytes
    tp = inputs.parallel.tensor_model_parallel_size
    is_spread, together = compute_spread(inputs.trainer_devices, tp, 1)
    gather = compute_link_bytes_per_s(inputs, constants, together, is_spread=is_spread)
    is_disk = sync.transport == "disk"
    return {
        "pause": _pause_s(inputs, constants),
        "gather": num_bytes * (tp - 1) / tp / gather,
        "transfer": num_bytes * _transfer_s_per_byte(inputs, constants),
        "buckets": 0.0 if is_disk else math.ceil(num_bytes / sync.bucket_bytes) * constants.sync_bucket_s,
        "verify": _verify_s(inputs, constants, num_bytes),
    }


def _pause_s(inputs: StepInputs, constants: TimeConstants) -> float:
    """Engines that gave their memory back are paused already; that was part of giving it back."""
    if inputs.should_offload_engines and all(group.placement == "colocated" for group in inputs.engine_groups):
        return 0.0
    return constants.pause_abort_s if inputs.weight_sync.pause_mode == "abort" else constants.pause_in_place_s


def _verify_s(inputs: StepInputs, constants: TimeConstants, num_bytes: float) -> float:
    """Checksums of all tensors, stage by stage, spread over the syncs that do without.

    None where an engine has several ranks: their shards cannot be compared.
    """
    interval = 0 if inputs.has_sharded_receivers else inputs.weight_sync.verify_interval
    return num_bytes / constants.checksum_bytes_per_s / interval if interval else 0.0


def _transfer_s_per_byte(inputs: StepInputs, constants: TimeConstants) -> float:
    """tensor: read and written in one GPU's memory. distributed: over the slowest link. disk: written, then read."""
    transport = inputs.weight_sync.transport
    if transport == "disk":
        return 2 / constants.disk_bytes_per_s
    if transport == "tensor":
        return 2 / (inputs.gpu.hbm_bytes_per_s * constants.sync_link_fraction)
    nodes = {device.node for group in inputs.engine_groups for engine in group.devices for device in engine}
    nodes |= {device.node for device in inputs.trainer_devices}
    link = inputs.nic_bytes_per_s if len(nodes) > 1 else inputs.gpu.nvlink_bytes_per_s
    return 1 / (link * constants.sync_link_fraction)


def compute_offload_time(inputs: StepInputs, constants: TimeConstants) -> float:
    """Seconds a step in which colocated trainer and engines give their memory back and take it again.

    The trainer's weights and optimizer states go to the host and return; engines drop their weights and cache, since a
    sync brings new ones. Nothing where no engine is colocated.

    Args:
        inputs: of the step.
        constants: of the model.
    """
    if not inputs.shares_gpus:
        return 0.0
    seconds = constants.engine_release_s if inputs.should_offload_engines else 0.0
    if inputs.should_offload_trainer:
        seconds += 2 * _held_bytes(inputs) / constants.host_link_bytes_per_s
    return seconds


def _held_bytes(inputs: StepInputs) -> float:
    """Of the rank with most parameters: weights, and its share of the states that are here, of policy and critic."""
    parallel = inputs.parallel
    ranks, expert_ranks = compute_num_shards(parallel)
    state = _STATE_BYTES * (1 - compute_host_fraction(parallel))

    def held(one: RankCounts) -> float:
        return one.total * inputs.dtype_bytes + state * (one.dense / ranks + one.experts / expert_ranks)

    policy = compute_rank_parameters(inputs.shapes, parallel)
    if not inputs.has_critic:
        return max(map(held, policy))
    critic = compute_critic_parameters(inputs.shapes, parallel)
    return max(held(one) + held(other) for one, other in zip(policy, critic, strict=True))


def compute_checkpoint_time(inputs: StepInputs, constants: TimeConstants) -> float:
    """Seconds to write one checkpoint: weights in fp32 with their moments, each once, by all nodes of the trainer.

    A critic is taken to be as large as the policy.

    Args:
        inputs: of the step.
        constants: of the model.
    """
    num_nodes = len({device.node for device in inputs.trainer_devices})
    num_bytes = compute_num_parameters(inputs.shapes) * _STATE_BYTES * (1 + inputs.has_critic)
    return num_bytes / (num_nodes * constants.disk_bytes_per_s)
