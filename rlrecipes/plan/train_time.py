"""How long the trainer's passes take: logprobs, train steps, optimizer. Owns what a micro-batch costs on a stage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rlrecipes.config.schema import ParallelConfig, RlConfig
from rlrecipes.plan.lengths import LengthDistribution, draw_lengths
from rlrecipes.plan.links import compute_link_bytes_per_s, compute_spread
from rlrecipes.plan.model_costs import LayerCosts, compute_attended_tokens, compute_layer_costs
from rlrecipes.plan.parameters import compute_rank_parameters, compute_stage_layers
from rlrecipes.plan.passes import find_logprob_passes
from rlrecipes.plan.step_inputs import StepInputs
from rlrecipes.plan.time_constants import TimeConstants

_ADAM_BYTES = 30
"""Read and written a parameter: gradient 4, weights and two moments in fp32 read and written 24, bf16 weights 2."""
_GRADIENT_BYTES = 4
"""Gradients are summed in fp32."""
_HOST_ADAM_BYTES = 28
"""The same on a CPU: gradient 4, weights and two moments 24."""


@dataclass(frozen=True, slots=True)
class TrainTime:
    """The trainer's part of a step.

    Attributes:
        logprobs_s: passes that only read: old, reference, teacher logprobs and values.
        train_s: all train steps, of policy and critic.
        num_micro_batches: of one rank in one train step.
        parts: cause -> seconds of ``logprobs_s + train_s``: compute, launch, exchange, bubble, reduction, optimizer.
    """

    logprobs_s: float
    train_s: float
    num_micro_batches: int
    parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Batch:
    """What one rank trains on.

    Attributes:
        num_micro_batches: a train step.
        tokens: of one micro-batch on one CP rank.
        attended_tokens: that a token attends to, on average over tokens.
    """

    num_micro_batches: int
    tokens: float
    attended_tokens: float


@dataclass(frozen=True, slots=True)
class _Pass:
    """One micro-batch through the slowest stage, or several such passes.

    Attributes:
        compute_s: arithmetic, and the memory traffic of logprobs.
        launch_s: what the CPU needs beyond it to start the kernels.
        exchange_s: between ranks of TP, CP, EP and PP.
    """

    compute_s: float
    launch_s: float
    exchange_s: float

    @property
    def total_s(self) -> float:
        """All of it; nothing is taken to overlap."""
        return self.compute_s + self.launch_s + self.exchange_s

    def times(self, number: float) -> _Pass:
        """So many of it."""
        return _Pass(number * self.compute_s, number * self.launch_s, number * self.exchange_s)

    def __add__(self, other: _Pass) -> _Pass:
        return _Pass(
            self.compute_s + other.compute_s, self.launch_s + other.launch_s, self.exchange_s + other.exchange_s
        )


def compute_train_time(inputs: StepInputs, constants: TimeConstants, distribution: LengthDistribution) -> TrainTime:
    """Price the trainer's part of a step.

    Args:
        inputs: of the step.
        constants: of the model.
        distribution: of lengths.
    """
    batch = _compute_batch(inputs, constants, distribution)
    algo, steps = inputs.algo, inputs.schedule.num_train_steps
    passes = find_logprob_passes(algo, steps) if isinstance(algo, RlConfig) else ()
    has_critic = "critic" in passes
    links = _Links(inputs, constants)
    forward, both = _slowest_stage(inputs, constants, batch, links)
    reading = _pipeline(inputs, batch, forward)
    training = _pipeline(inputs, batch, both)
    reduction_s = max(0.0, _reduction_s(inputs, links) - _hidden_s(inputs, both))
    optimizer_s = _optimizer_s(inputs, constants)
    num_read, num_trained = len(passes) * steps, steps * (1 + has_critic)
    parts = {
        name: num_read * reading[name] + num_trained * training[name]
        for name in ("compute", "launch", "exchange", "bubble")
    }
    parts |= {"reduction": num_trained * reduction_s, "optimizer": num_trained * optimizer_s}
    logprobs_s = num_read * sum(reading.values())
    return TrainTime(logprobs_s, sum(parts.values()) - logprobs_s, batch.num_micro_batches, parts)


def _compute_batch(inputs: StepInputs, constants: TimeConstants, distribution: LengthDistribution) -> _Batch:
    """Packing fills micro-batches up to a constant share; model chunks take turns in groups of PP."""
    parallel = inputs.parallel
    lengths = [n + distribution.prompt_tokens for n in draw_lengths(distribution, inputs.num_samples, inputs.seed)]
    total = sum(lengths)
    per_rank = total / inputs.schedule.num_train_steps / parallel.data_parallel_size
    cp = parallel.context_parallel_size
    room = parallel.max_tokens_per_micro_batch * cp * constants.packing_fraction
    num = max(1, math.ceil(per_rank / room))
    if (parallel.virtual_pipeline_model_parallel_size or 1) > 1:
        num = math.ceil(num / parallel.pipeline_model_parallel_size) * parallel.pipeline_model_parallel_size
    attended = sum(n * compute_attended_tokens(inputs.shapes, n / 2) for n in lengths) / total
    return _Batch(num, per_rank / num / cp, attended)


class _Links:
    """Bytes a second of the trainer's groups, by where their ranks lie."""

    def __init__(self, inputs: StepInputs, constants: TimeConstants) -> None:
        self._inputs, self._constants = inputs, constants
        parallel = inputs.parallel
        tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        dp = parallel.data_parallel_size
        self.tp = self._between(tp, 1)
        self.cp = self._between(cp, tp)
        self.dp = self._between(dp * cp, tp)
        etp = parallel.expert_tensor_parallel_size or tp
        self.ep = self._between(parallel.expert_model_parallel_size, etp, constants.expert_exchange_fraction)
        self.pp = self._between(parallel.pipeline_model_parallel_size, tp * cp * dp)

    def _between(self, size: int, stride: int, fraction: float | None = None) -> float:
        is_spread, together = compute_spread(self._inputs.trainer_devices, size, stride)
        return compute_link_bytes_per_s(self._inputs, self._constants, together, is_spread=is_spread, fraction=fraction)


def _slowest_stage(inputs: StepInputs, constants: TimeConstants, batch: _Batch, links: _Links) -> tuple[_Pass, _Pass]:
    """One micro-batch through the slowest stage: forward alone, and forward with backward."""
    layers = compute_layer_costs(inputs.shapes)
    stages = compute_stage_layers(inputs.shapes, inputs.parallel)
    forwards = {layer: _layer(inputs, constants, batch, links, layer) for layer in set(layers)}
    recomputed = {layer: _recomputed(inputs, constants, batch, layer, forwards[layer]) for layer in forwards}
    found = []
    for number, chunks in enumerate(stages):
        own = Counter(layers[layer] for chunk in chunks for layer in chunk)
        forward = _sum(forwards[layer].times(count) for layer, count in own.items())
        again = _sum(recomputed[layer].times(count) for layer, count in own.items())
        backward = _Pass(2 * forward.compute_s, 2 * forward.launch_s, forward.exchange_s) + again
        handed = _Pass(0.0, 0.0, _handed_s(inputs, batch, links) if len(stages) > 1 else 0.0)
        head = _head(inputs, constants, batch) if number == len(stages) - 1 else _Pass(0.0, 0.0, 0.0)
        found.append((forward + head + handed, forward + backward + head.times(3) + handed.times(2)))
    return max(found, key=lambda pair: pair[1].total_s)


def _sum(passes: Iterable[_Pass]) -> _Pass:
    total = _Pass(0.0, 0.0, 0.0)
    for one in passes:
        total += one
    return total


def _layer(inputs: StepInputs, constants: TimeConstants, batch: _Batch, links: _Links, layer: LayerCosts) -> _Pass:
    """Forward of one layer; kernels that the CPU has not yet started make the GPU wait."""
    compute_s = _dense_s(inputs, constants, batch, layer) + _attention_s(inputs, constants, batch, layer)
    compute_s += _experts_s(inputs, constants, batch, layer)
    return _Pass(
        compute_s,
        max(0.0, constants.layer_launch_s - compute_s),
        _layer_exchange_s(inputs, constants, batch, links, layer),
    )


def _rate(inputs: StepInputs) -> float:
    return inputs.gpu.bf16_flops_per_s * 2 / inputs.dtype_bytes


def _dense_s(inputs: StepInputs, constants: TimeConstants, batch: _Batch, layer: LayerCosts) -> float:
    tp = inputs.parallel.tensor_model_parallel_size
    return 2 * layer.dense_parameters / tp * batch.tokens / (_rate(inputs) * constants.train_flops_fraction)


def _attention_s(inputs: StepInputs, constants: TimeConstants, batch: _Batch, layer: LayerCosts) -> float:
    tp = inputs.parallel.tensor_model_parallel_size
    flops = layer.context_flops * batch.attended_tokens / tp * batch.tokens
    return flops / (_rate(inputs) * constants.attention_flops_fraction)


def _experts_s(inputs: StepInputs, constants: TimeConstants, batch: _Batch, layer: LayerCosts) -> float:
    """Experts are taken as equally busy; each rank then has its own tokens' work, whatever EP is."""
    tp = inputs.parallel.tensor_model_parallel_size
    return 2 * layer.awake_parameters / tp * batch.tokens / (_rate(inputs) * constants.expert_flops_fraction)


def _layer_exchange_s(
    inputs: StepInputs, constants: TimeConstants, batch: _Batch, links: _Links, layer: LayerCosts
) -> float:
    """Forward: two all-reduces over TP (or as many bytes with SP), keys and values over CP, tokens over EP and back."""
    parallel, shapes = inputs.parallel, inputs.shapes
    tp, cp, ep = (
        parallel.tensor_model_parallel_size,
        parallel.context_parallel_size,
        parallel.expert_model_parallel_size,
    )
    hidden = batch.tokens * shapes.hidden_size * inputs.dtype_bytes
    seconds = 0.0
    if tp > 1:
        seconds += 2 * (2 * (tp - 1) / tp * hidden / links.tp + constants.collective_s)
    if cp > 1 and layer.context_flops:
        both = 2 * shapes.num_query_groups * shapes.kv_channels / tp * batch.tokens * inputs.dtype_bytes
        seconds += (cp - 1) * (both / links.cp + constants.collective_s)
    if ep > 1 and layer.expert_parameters:
        sent = hidden / tp * (shapes.moe_router_topk or 0) * (ep - 1) / ep
        seconds += 2 * (sent / links.ep + constants.collective_s)
    return seconds


def _recomputed(
    inputs: StepInputs, constants: TimeConstants, batch: _Batch, layer: LayerCosts, forward: _Pass
) -> _Pass:
    """What backward computes again of one layer."""
    parallel = inputs.parallel
    if parallel.recompute_granularity == "full":
        return forward
    if parallel.recompute_granularity != "selective":
        return _Pass(0.0, 0.0, 0.0)
    modules = parallel.recompute_modules or ("core_attn",)
    seconds = _attention_s(inputs, constants, batch, layer) if "core_attn" in modules else 0.0
    if "moe" in modules:
        seconds += _experts_s(inputs, constants, batch, layer)
    if "mlp" in modules and not layer.expert_parameters:
        share = 3 * inputs.shapes.hidden_size * inputs.shapes.ffn_hidden_size / layer.dense_parameters
        seconds += share * _dense_s(inputs, constants, batch, layer)
    return _Pass(seconds, 0.0, 0.0)


def _head(inputs: StepInputs, constants: TimeConstants, batch: _Batch) -> _Pass:
    """Logits and their logprobs, a third of forward and backward."""
    tp = inputs.parallel.tensor_model_parallel_size
    shapes = inputs.shapes
    logits = batch.tokens * shapes.vocab_size / tp
    is_cut = inputs.is_distribution_cut
    traffic = constants.cut_logprob_bytes_per_logit if is_cut else constants.logprob_bytes_per_logit
    matrix_s = 2 * logits * shapes.hidden_size / (_rate(inputs) * constants.train_flops_fraction)
    return _Pass(matrix_s + logits * traffic / 3 / inputs.gpu.hbm_bytes_per_s, 0.0, 0.0)


def _handed_s(inputs: StepInputs, batch: _Batch, links: _Links) -> float:
    """Activations of a micro-batch from stage to stage, once for each model chunk."""
    parallel = inputs.parallel
    split = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    return chunks * batch.tokens * inputs.shapes.hidden_size * inputs.dtype_bytes / split / links.pp


def _pipeline(inputs: StepInputs, batch: _Batch, one: _Pass) -> dict[str, float]:
    """All micro-batches of a train step; the pipeline fills and drains once, faster with model chunks."""
    num = batch.num_micro_batches
    stages = inputs.parallel.pipeline_model_parallel_size
    chunks = inputs.parallel.virtual_pipeline_model_parallel_size or 1
    return {
        "compute": num * one.compute_s,
        "launch": num * one.launch_s,
        "exchange": num * one.exchange_s,
        "bubble": (stages - 1) / chunks * one.total_s,
    }


def compute_num_shards(parallel: ParallelConfig) -> tuple[int, int]:
    """Over how many ranks the optimizer's state of a parameter is spread.

    Args:
        parallel: the trainer's layout.

    Returns:
        DP x CP of all but routed experts; of these, the ranks that hold the same ones.
    """
    tp = parallel.tensor_model_parallel_size
    ranks = parallel.data_parallel_size * parallel.context_parallel_size
    of_experts = parallel.expert_model_parallel_size * (parallel.expert_tensor_parallel_size or tp)
    return ranks, max(1, ranks * tp // of_experts)


def compute_host_fraction(parallel: ParallelConfig) -> float:
    """Share of the optimizer that lies in the host's memory and steps there.

    Args:
        parallel: the trainer's layout.
    """
    return float(parallel.megatron.get("optimizer_offload_fraction", 1.0)) if parallel.optimizer_cpu_offload else 0.0


def _reduction_s(inputs: StepInputs, links: _Links) -> float:
    """Gradients summed and spread over DP x CP, and the new weights gathered; of the stage with most parameters."""
    parallel = inputs.parallel
    ranks, expert_ranks = compute_num_shards(parallel)
    moved = _GRADIENT_BYTES + inputs.dtype_bytes
    stages = compute_rank_parameters(inputs.shapes, parallel)
    return max(
        moved * (stage.dense * (ranks - 1) / ranks + stage.experts * (expert_ranks - 1) / expert_ranks) / links.dp
        for stage in stages
    )


def _hidden_s(inputs: StepInputs, both: _Pass) -> float:
    """What of the reduction goes on while the last micro-batch's gradients are computed."""
    return both.total_s * 2 / 3 if inputs.parallel.megatron.get("overlap_grad_reduce") else 0.0


def _optimizer_s(inputs: StepInputs, constants: TimeConstants) -> float:
    """Adam over the states that a rank holds; on the host it waits for gradients to come and weights to go."""
    parallel = inputs.parallel
    ranks, expert_ranks = compute_num_shards(parallel)
    own = max(
        stage.dense / ranks + stage.experts / expert_ranks for stage in compute_rank_parameters(inputs.shapes, parallel)
    )
    on_host = own * compute_host_fraction(parallel)
    here_s = (own - on_host) * _ADAM_BYTES / (inputs.gpu.hbm_bytes_per_s * constants.optimizer_bandwidth_fraction)
    first = inputs.trainer_devices[0].node
    sharing = sum(device.node == first for device in inputs.trainer_devices)
    over_link_s = on_host * (_GRADIENT_BYTES + inputs.dtype_bytes) / constants.host_link_bytes_per_s
    return here_s + over_link_s + on_host * sharing * _HOST_ADAM_BYTES / constants.host_memory_bytes_per_s
