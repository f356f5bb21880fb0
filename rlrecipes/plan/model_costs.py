"""What one token costs a model: operations and bytes by kind of layer. Parameters are counted in parameters.py."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from rlrecipes.config.schema import ModelShapes
from rlrecipes.plan.parameters import count_layer, is_linear_layer

_SCALED_BLOCK = 128
"""Numbers of an fp8 cache that share a scale, in SGLang 0.5.17."""


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Of one layer.

    Attributes:
        dense_parameters: all but routed experts.
        expert_parameters: of all routed experts.
        awake_parameters: of the experts that one token visits.
        context_flops: forward, for one token and one token of its context.
    """

    dense_parameters: int
    expert_parameters: int
    awake_parameters: float
    context_flops: float


@functools.lru_cache(maxsize=64)
def compute_layer_costs(shapes: ModelShapes) -> tuple[LayerCosts, ...]:
    """Costs of every layer.

    Args:
        shapes: the model.
    """
    share = (shapes.moe_router_topk or 0) / shapes.num_moe_experts if shapes.num_moe_experts else 0.0
    found = []
    for layer in range(shapes.num_layers):
        counts = count_layer(shapes, layer)
        context = 0.0 if is_linear_layer(shapes, layer) else compute_context_flops(shapes)
        found.append(LayerCosts(counts.split + counts.whole, counts.experts, counts.experts * share, context))
    return tuple(found)


def compute_context_flops(shapes: ModelShapes) -> float:
    """Operations of one full-attention layer, forward, for a token and one token it attends to: 2 (key + value) a head.

    Args:
        shapes: the model.
    """
    if shapes.multi_latent_attention:
        width = (shapes.qk_head_dim or 0) + (shapes.qk_pos_emb_head_dim or 0) + (shapes.v_head_dim or 0)
    else:
        width = 2 * shapes.kv_channels
    return 2.0 * shapes.num_attention_heads * width


def compute_attended_tokens(shapes: ModelShapes, context_tokens: float) -> float:
    """How many tokens of its context a token attends to: all, or those that an indexer chooses.

    Args:
        shapes: the model.
        context_tokens: before it.
    """
    return min(context_tokens, shapes.dsa_indexer_topk or context_tokens)


def compute_state_bytes(shapes: ModelShapes) -> int:
    """What one request keeps in all gated delta nets, fp32, whatever its length; 0 in other models.

    Args:
        shapes: the model.
    """
    num_layers = sum(is_linear_layer(shapes, layer) for layer in range(shapes.num_layers))
    heads, value = shapes.linear_num_value_heads or 0, shapes.linear_value_head_dim or 0
    return 4 * num_layers * heads * value * (shapes.linear_key_head_dim or 0)


def _latent_bytes(shapes: ModelShapes, value_bytes: int) -> int:
    """Of one layer; with an indexer, an fp8 cache has fp32 scales and keeps the part with position in bf16."""
    latent, position = shapes.kv_lora_rank or 0, shapes.qk_pos_emb_head_dim or 0
    if shapes.dsa_indexer_n_heads is not None and value_bytes == 1:
        return latent + latent // _SCALED_BLOCK * 4 + 2 * position
    return (latent + position) * value_bytes


def _indexer_bytes(shapes: ModelShapes) -> int:
    """Keys of one layer's indexer, fp8 with fp32 scales; SGLang keeps them in every layer."""
    head = shapes.dsa_indexer_head_dim or 0
    return head + head // _SCALED_BLOCK * 4


def compute_kv_bytes_per_token(shapes: ModelShapes, tensor_parallel_size: int, value_bytes: int) -> int:
    """KV cache of one token on one GPU, all layers together.

    TP splits key and value heads as far as there are any; the latent vector of MLA stands whole on every GPU.

    Args:
        shapes: the model.
        tensor_parallel_size: TP of attention.
        value_bytes: of one number.
    """
    num_layers = sum(not is_linear_layer(shapes, layer) for layer in range(shapes.num_layers))
    if shapes.multi_latent_attention:
        return num_layers * (_latent_bytes(shapes, value_bytes) + _indexer_bytes(shapes))
    heads = max(1, shapes.num_query_groups // tensor_parallel_size)
    return num_layers * 2 * heads * shapes.kv_channels * value_bytes
