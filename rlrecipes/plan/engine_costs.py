"""What one engine can hold and what its steps cost, by model, layout and GPU. Owns the roofline; simulates nothing."""

from __future__ import annotations

import functools
from dataclasses import replace

from rlrecipes.config.schema import ModelShapes
from rlrecipes.plan.lengths import LengthDistribution
from rlrecipes.plan.links import compute_link_bytes_per_s
from rlrecipes.plan.model_costs import (
    compute_attended_tokens,
    compute_context_flops,
    compute_kv_bytes_per_token,
    compute_layer_costs,
    compute_state_bytes,
)
from rlrecipes.plan.parameters import compute_flops_per_token
from rlrecipes.plan.simulation import DecodeCosts
from rlrecipes.plan.step_inputs import EngineGroup, StepInputs
from rlrecipes.plan.time_constants import TimeConstants


def compute_engine_weight_bytes(inputs: StepInputs, group: EngineGroup) -> float:
    """Weights on one GPU of an engine.

    Args:
        inputs: of the step.
        group: whose engine.
    """
    dense, experts = _count_weights(inputs.shapes, has_lookup=True)
    split = group.tensor_parallel_size // group.attention_data_parallel_size
    per_gpu = dense / split + experts / group.tensor_parallel_size
    return per_gpu * _weight_bytes(inputs, group) / group.pipeline_parallel_size


def compute_engine_kv_bytes(inputs: StepInputs, group: EngineGroup) -> int:
    """KV cache of one token on one GPU of an engine without PP.

    Args:
        inputs: of the step.
        group: whose engine.
    """
    value_bytes = 1 if str(group.native.get("kv_cache_dtype", "")).startswith("fp8") else inputs.dtype_bytes
    split = group.tensor_parallel_size // group.attention_data_parallel_size
    return compute_kv_bytes_per_token(inputs.shapes, split, value_bytes)


def _is_fp8(group: EngineGroup) -> bool:
    return "fp8" in str(group.native.get("quantization", ""))


def _weight_bytes(inputs: StepInputs, group: EngineGroup) -> int:
    return 1 if _is_fp8(group) else inputs.dtype_bytes


@functools.lru_cache(maxsize=64)
def _count_weights(shapes: ModelShapes, *, has_lookup: bool) -> tuple[int, int]:
    """Parameters of an engine: all but routed experts, with or without the embedding's lookup; and routed experts."""
    layers = compute_layer_costs(shapes)
    embedding = shapes.vocab_size * shapes.hidden_size
    matrices = 1 + (has_lookup and shapes.untie_embeddings_and_output_weights)
    dense = sum(layer.dense_parameters for layer in layers) + embedding * matrices
    return dense, sum(layer.expert_parameters for layer in layers)


def compute_decode_costs(
    inputs: StepInputs, group: EngineGroup, distribution: LengthDistribution, constants: TimeConstants
) -> DecodeCosts:
    """Price a decode step on an engine.

    With DP attention all but the routed experts is taken as replicated in every replica. PP lets as many batches follow
    each other, each through all stages.

    Args:
        inputs: of the step.
        group: whose engine.
        distribution: of lengths, for what grows faster than they do.
        constants: of the model.
    """
    shapes, gpu = inputs.shapes, inputs.gpu
    tp, pp, replicas = (
        group.tensor_parallel_size,
        group.pipeline_parallel_size,
        group.attention_data_parallel_size,
    )
    bandwidth = gpu.hbm_bytes_per_s * constants.decode_bandwidth_fraction
    rate = _peak(inputs, group)
    dense, experts = _count_weights(shapes, has_lookup=False)
    value_bytes = _weight_bytes(inputs, group)
    forward_flops = compute_flops_per_token(shapes) / 3
    typical_tokens = distribution.prompt_tokens + distribution.mean_tokens / 2
    read_share = compute_attended_tokens(shapes, typical_tokens) / typical_tokens
    link_s, collective_s = _exchange(inputs, group, constants)
    costs = DecodeCosts(
        weights_s=dense * value_bytes / (tp // replicas) / bandwidth,
        experts_s=experts * value_bytes / tp / bandwidth,
        awake_fraction=_compute_asleep_fraction(shapes),
        context_s=read_share * _context_s(inputs, group, bandwidth, rate * constants.decode_flops_fraction),
        token_flops_s=forward_flops / (tp * pp) / (rate * constants.decode_flops_fraction),
        step_s=pp * constants.decode_step_s + collective_s,
        request_s=constants.decode_request_s + 2 * compute_state_bytes(shapes) / (tp * pp) / bandwidth,
        token_link_s=link_s,
        prefill_token_s=_prefill_token_s(inputs, group, distribution, constants) + link_s,
        prefill_batch_s=0.0 if group.worker_type == "decode" else constants.prefill_batch_s,
    )
    return _with_speculation(costs, constants) if group.native.get("speculative_algorithm") else costs


def _peak(inputs: StepInputs, group: EngineGroup) -> float:
    gpu = inputs.gpu
    if _is_fp8(group) and gpu.fp8_flops_per_s is not None:
        return gpu.fp8_flops_per_s
    return gpu.bf16_flops_per_s * 2 / inputs.dtype_bytes


def _compute_asleep_fraction(shapes: ModelShapes) -> float:
    """Share of the experts that one token does not visit."""
    return 1 - (shapes.moe_router_topk or 0) / shapes.num_moe_experts if shapes.num_moe_experts else 0.0


def _context_s(inputs: StepInputs, group: EngineGroup, bandwidth: float, rate: float) -> float:
    """One token of context, on each GPU: reading it or, with latent attention's many heads, computing with it."""
    tp, pp, replicas = (
        group.tensor_parallel_size,
        group.pipeline_parallel_size,
        group.attention_data_parallel_size,
    )
    shapes = inputs.shapes
    read_s = compute_engine_kv_bytes(inputs, group) / bandwidth
    if not shapes.multi_latent_attention:
        return read_s / (pp * replicas)
    width = 2 * (shapes.kv_lora_rank or 0) + (shapes.qk_pos_emb_head_dim or 0)  # keys and values are never rebuilt
    flops = 2.0 * shapes.num_layers * shapes.num_attention_heads * replicas / tp * width
    return max(read_s, flops / rate) / (pp * replicas)


def _exchange(inputs: StepInputs, group: EngineGroup, constants: TimeConstants) -> tuple[float, float]:
    """Two all-reduces a layer: seconds a token, and a step."""
    tp = group.tensor_parallel_size
    if tp == 1:
        return 0.0, 0.0
    link = compute_link_bytes_per_s(inputs, constants, group.num_gpus_of_node, is_spread=group.is_spread)
    num = 2 * inputs.shapes.num_layers
    moved = 2 * (tp - 1) / tp * inputs.shapes.hidden_size * inputs.dtype_bytes
    return num * moved / link, num * constants.collective_s


def _prefill_token_s(
    inputs: StepInputs, group: EngineGroup, distribution: LengthDistribution, constants: TimeConstants
) -> float:
    layers = compute_layer_costs(inputs.shapes)
    attended = compute_attended_tokens(inputs.shapes, distribution.prompt_tokens / 2)
    flops = 2 * sum(layer.dense_parameters + layer.awake_parameters for layer in layers)
    flops += attended * sum(1 for layer in layers if layer.context_flops) * compute_context_flops(inputs.shapes)
    return flops / group.num_gpus / (_peak(inputs, group) * constants.prefill_flops_fraction)


def _with_speculation(costs: DecodeCosts, constants: TimeConstants) -> DecodeCosts:
    names = ("weights_s", "experts_s", "context_s", "token_flops_s", "step_s", "request_s", "token_link_s")
    factor = constants.speculative_step_factor
    scaled = {name: getattr(costs, name) * factor for name in names}
    return replace(costs, **scaled, tokens_per_step=constants.speculative_tokens)
