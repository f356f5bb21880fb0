"""What a trainer rank holds on its GPU, phase by phase. Owns what is held how long; the counts come from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlrecipes.config.schema import ParallelConfig, RlConfig
from rlrecipes.plan.activations import compute_layer_activations
from rlrecipes.plan.memory_constants import MemoryConstants
from rlrecipes.plan.memory_nodes import Phase
from rlrecipes.plan.parameters import (
    RankCounts,
    compute_critic_parameters,
    compute_num_parameters,
    compute_padded_vocab_size,
    compute_rank_parameters,
    compute_stage_layers,
)
from rlrecipes.plan.passes import find_logprob_passes
from rlrecipes.plan.step_inputs import StepInputs
from rlrecipes.plan.train_time import compute_host_fraction, compute_num_shards

type Parts = dict[str, float]

_FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class StageMemory:
    """A trainer rank of one pipeline stage.

    Attributes:
        stage: from 0.
        fixed: phase -> part -> bytes, whatever the micro-batch.
        per_token: phase -> part -> bytes a token of the micro-batch.
        host: part -> bytes that it keeps in the host's memory.
    """

    stage: int
    fixed: Mapping[Phase, Parts]
    per_token: Mapping[Phase, Parts]
    host: Parts

    def compute_parts(self, phase: Phase, num_tokens: int) -> Parts:
        """Bytes of every part.

        Args:
            phase: which.
            num_tokens: of a micro-batch on this rank.
        """
        grown = {name: value * num_tokens for name, value in self.per_token.get(phase, {}).items()}
        return {**self.fixed[phase], **grown}


def compute_gradient_bytes(parallel: ParallelConfig, dtype_bytes: int) -> int:
    """Of one parameter's gradient, which every rank keeps whole: the weights' precision, unless the recipe says fp32.

    Args:
        parallel: the trainer's layout.
        dtype_bytes: of one weight.
    """
    return _FP32_BYTES if parallel.megatron.get("grad_reduce_in_fp32") else dtype_bytes


def compute_state_bytes_per_parameter(dtype_bytes: int) -> int:
    """Of Adam's state: two fp32 moments, and an fp32 copy of weights that are kept in less.

    Args:
        dtype_bytes: of one weight.
    """
    return 8 if dtype_bytes == _FP32_BYTES else 12


def compute_gradient_copy_bytes(counts: RankCounts, parallel: ParallelConfig, dtype_bytes: int) -> float:
    """What an update adds on one rank: its share of the gradients in fp32, where they are not so already.

    Megatron's offloaded optimizer reads them as they are.

    Args:
        counts: of the rank.
        parallel: the trainer's layout.
        dtype_bytes: of one weight.
    """
    if parallel.optimizer_cpu_offload or compute_gradient_bytes(parallel, dtype_bytes) == _FP32_BYTES:
        return 0.0
    ranks, expert_ranks = compute_num_shards(parallel)
    return _FP32_BYTES * (counts.dense / ranks + counts.experts / expert_ranks)


def compute_optimizer_bytes(counts: RankCounts, parallel: ParallelConfig, dtype_bytes: int) -> float:
    """Adam's state on one rank, spread by the distributed optimizer over the ranks that hold the same parameters.

    Args:
        counts: of the rank.
        parallel: the trainer's layout.
        dtype_bytes: of one weight.
    """
    ranks, expert_ranks = compute_num_shards(parallel)
    return compute_state_bytes_per_parameter(dtype_bytes) * (counts.dense / ranks + counts.experts / expert_ranks)


def compute_stage_memory(inputs: StepInputs, constants: MemoryConstants) -> tuple[StageMemory, ...]:
    """Trainer ranks of every pipeline stage.

    Args:
        inputs: of the step.
        constants: of the model.
    """
    counts = compute_rank_parameters(inputs.shapes, inputs.parallel)
    layers = compute_stage_layers(inputs.shapes, inputs.parallel)
    none = (RankCounts(0, 0),) * len(counts)
    critic = compute_critic_parameters(inputs.shapes, inputs.parallel) if inputs.has_critic else none
    stages = enumerate(zip(counts, critic, layers, strict=True))
    return tuple(_compute_stage(inputs, constants, stage, *of_stage) for stage, of_stage in stages)


def _compute_stage(
    inputs: StepInputs,
    constants: MemoryConstants,
    stage: int,
    counts: RankCounts,
    critic: RankCounts,
    chunks: tuple[range, ...],
) -> StageMemory:
    is_last = stage == inputs.parallel.pipeline_model_parallel_size - 1
    base: Parts = {
        "context": constants.cuda_context_bytes,
        "workspace": constants.trainer_workspace_bytes,
        "nccl": constants.nccl_group_bytes * _count_groups(inputs.parallel),
    }
    state, gradients, optimizer = _compute_state(inputs, counts, critic)
    held = base | state
    frozen = _count_frozen(inputs) * counts.total * inputs.dtype_bytes
    logits = _compute_logit_numbers(inputs) * inputs.dtype_bytes if is_last else 0.0
    # The kernels of a whole distribution copy nothing.
    chunk = {"logprobs": constants.logprob_chunk_bytes} if is_last and inputs.is_distribution_cut else {}
    # Each model's stay until its own next train step: the critic's, which comes first, while the policy is trained.
    own, critics = (compute_gradient_copy_bytes(one, inputs.parallel, inputs.dtype_bytes) for one in (counts, critic))
    copies: Parts = {"gradient_copies": own + critics}
    transfer = _compute_transfer_bytes(inputs, counts)
    # What torch's allocator reserves above what is allocated grows with all that comes and goes.
    overhead = 1 + constants.activation_overhead_fraction
    kept, working, forward = (
        number * inputs.dtype_bytes for number in _compute_activation_numbers(inputs, constants, stage, chunks)
    )
    # One hidden state: around the output layer are the last norm's input, the rows that the layer takes and, while
    # nothing is trained, the norm's output.
    split = inputs.parallel.tensor_model_parallel_size if inputs.parallel.sequence_parallel else 1
    hidden = is_last * inputs.shapes.hidden_size / split * inputs.dtype_bytes
    shown = {"frozen_weights": float(counts.total * inputs.dtype_bytes)} if frozen else {}
    is_offloaded = inputs.should_offload_trainer and inputs.shares_gpus
    between = base if is_offloaded else held | copies  # which stay until the next train step
    sending = base | {"weights": state["weights"]} if is_offloaded else between
    built = state["optimizer"] * (1 - 2 * _FP32_BYTES / compute_state_bytes_per_parameter(inputs.dtype_bytes))
    # Before the optimizer is there, weights move into their buffer, a chunk at a time.
    moved = counts.total * inputs.dtype_bytes / len(chunks)
    fixed: dict[Phase, Parts] = {
        "init": held
        | {
            "optimizer": built,
            "workspace": constants.trainer_start_bytes,
            "loading": max(_compute_largest_tensor(inputs), transfer, moved - built),
        },
        "rollout": between,
        "logprobs": (held if is_offloaded else between) | shown | chunk,
        "train": held | chunk | {"gradient_copies": critics},
        "update": held | copies | ({"transfer": transfer} if transfer else {}),
        "weight_sync": sending | {"weight_sync": _compute_sync_bytes(inputs)},
    }
    # Megatron holds one micro-batch's logits while the next goes forward. Trained ones have a gradient, and no layer is
    # computed again while both are there.
    per_token: dict[Phase, Parts] = {
        "logprobs": {"activations": overhead * max(3 * hidden, forward - logits), "logits": overhead * 2 * logits},
        "train": {
            "activations": overhead * (kept + max(2 * hidden, working - 2 * logits)),
            "logits": overhead * 2 * logits,
        },
    }
    offloaded = sum(state.values()) - gradients if is_offloaded else 0.0  # these are not kept
    host: Parts = {"optimizer": optimizer, "offloaded": offloaded, "frozen_weights": frozen}
    return StageMemory(stage, fixed, per_token, host)


def compute_bucket_bytes(inputs: StepInputs) -> float:
    """Of the largest bucket of a weight sync: no tensor is split, and there are no more than all.

    Args:
        inputs: of the step.
    """
    whole = compute_num_parameters(inputs.shapes) * inputs.dtype_bytes
    return float(min(whole, max(inputs.weight_sync.bucket_bytes, _compute_largest_tensor(inputs))))


def _compute_largest_tensor(inputs: StepInputs) -> float:
    """The embedding: there once more while it is loaded, and never split between buckets."""
    return float(inputs.shapes.vocab_size * inputs.shapes.hidden_size * inputs.dtype_bytes)


def _compute_transfer_bytes(inputs: StepInputs, counts: RankCounts) -> float:
    """Of a tensor on its way to or from an optimizer in the host: torch makes it fp32, and back, on the GPU."""
    if not compute_host_fraction(inputs.parallel) or inputs.dtype_bytes == _FP32_BYTES:
        return 0.0
    rows = compute_padded_vocab_size(inputs.shapes.vocab_size, inputs.parallel.tensor_model_parallel_size)
    largest = rows / inputs.parallel.tensor_model_parallel_size * inputs.shapes.hidden_size
    return _FP32_BYTES * min(largest, counts.dense / compute_num_shards(inputs.parallel)[0])


def _compute_sync_bytes(inputs: StepInputs) -> float:
    """A bucket of gathered tensors where they are split, and the flat copy of it that engines read or are sent."""
    parallel = inputs.parallel
    is_split = parallel.tensor_model_parallel_size * parallel.expert_model_parallel_size > 1
    return (is_split + (inputs.weight_sync.transport != "disk")) * compute_bucket_bytes(inputs)


def _compute_state(inputs: StepInputs, counts: RankCounts, critic: RankCounts) -> tuple[Parts, float, float]:
    """Weights, gradients and optimizer state of policy and critic; gradients of both; what lies in the host instead."""
    parallel, dtype_bytes = inputs.parallel, inputs.dtype_bytes
    gradient = compute_gradient_bytes(parallel, dtype_bytes)
    optimizer = compute_optimizer_bytes(counts, parallel, dtype_bytes)
    on_host = compute_host_fraction(parallel)
    parts: Parts = {
        "weights": float(counts.total * dtype_bytes),
        "gradients": float(counts.total * gradient),
        "optimizer": (1 - on_host) * optimizer,
    }
    gradients, host = parts["gradients"], on_host * optimizer
    optimizer = compute_optimizer_bytes(critic, parallel, dtype_bytes)
    parts["critic"] = critic.total * (dtype_bytes + gradient) + (1 - on_host) * optimizer
    return parts, gradients + critic.total * gradient, host + on_host * optimizer


def _count_frozen(inputs: StepInputs) -> int:
    """Copies of the weights that wait in the host's memory: reference and teacher, where the trainer holds them."""
    if not isinstance(inputs.algo, RlConfig):
        return 0
    passes = find_logprob_passes(inputs.algo, inputs.schedule.num_train_steps)
    return sum(name in passes for name in ("reference", "teacher"))


def _count_groups(parallel: ParallelConfig) -> int:
    sizes = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
        parallel.data_parallel_size * parallel.context_parallel_size,
        parallel.expert_model_parallel_size,
    )
    return sum(size > 1 for size in sizes) + (math.prod(sizes[:2]) * sizes[3] > 1)


def _compute_logit_numbers(inputs: StepInputs) -> float:
    """Of one token on a rank of the last stage; every prediction layer has logits of its own."""
    tp = inputs.parallel.tensor_model_parallel_size
    rows = compute_padded_vocab_size(inputs.shapes.vocab_size, tp) / tp
    return rows * (1 + (inputs.shapes.mtp_num_layers or 0))


def _compute_activation_numbers(
    inputs: StepInputs, constants: MemoryConstants, stage: int, chunks: tuple[range, ...]
) -> tuple[float, float, float]:
    """Numbers of one token that a stage keeps while it trains, adds while it computes again, has while it goes forward.

    With one chunk a stage has PP - stage micro-batches in flight; with v of them 2 (PP - stage - 1) + (v - 1) PP + 1
    chunks (Megatron's interleaved schedule).
    """
    shapes, parallel = inputs.shapes, inputs.parallel
    imbalance = 1 + constants.expert_imbalance_fraction
    found = [compute_layer_activations(shapes, parallel, layer, imbalance) for chunk in chunks for layer in chunk]
    if not found:
        return 0.0, 0.0, 0.0
    num_stages, num_chunks = parallel.pipeline_model_parallel_size, len(chunks)
    is_last = stage == num_stages - 1
    kept, working = _recompute(parallel, [layer.kept for layer in found], found[0].entry, num_chunks)
    behind = num_stages - stage - 1
    in_flight = behind + 1 if num_chunks == 1 else (2 * behind + (num_chunks - 1) * num_stages + 1) / num_chunks
    widest = max(layer.whole for layer in found)
    predicted = is_last * (shapes.mtp_num_layers or 0) * (found[-1].kept + 4 * found[-1].entry)
    return in_flight * kept + predicted, working * widest, widest


def _recompute(parallel: ParallelConfig, kept: list[float], entry: float, num_chunks: int) -> tuple[float, int]:
    """Numbers that all chunks of a stage keep of one token, and how many whole layers are there at once besides."""
    if parallel.recompute_granularity != "full":
        return sum(kept), 0
    size = parallel.recompute_num_layers or 1
    if parallel.recompute_method == "block":
        per_chunk = len(kept) // num_chunks
        is_kept = [number % per_chunk >= size for number in range(len(kept))]
        return sum(value if whole else entry for value, whole in zip(kept, is_kept, strict=True)), 1
    return math.ceil(len(kept) / size) * entry, size
