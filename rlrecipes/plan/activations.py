"""What backward keeps of a layer: bytes of one token on one trainer rank. Owns the list of tensors, layer by layer.

Counted are tensors that autograd saves, in the weights' precision, with attention that never writes its scores
(flash attention). Tensors between layers are split over TP where ``sequence_parallel`` is on, those inside attention
and MLP always are. Source of the method: Korthikanti et al. 2022, arXiv:2205.05198; the list follows megatron-core.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from rlrecipes.config.schema import ModelShapes, ParallelConfig
from rlrecipes.plan.parameters import is_linear_layer, is_moe_layer


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Numbers (not bytes) of one token on one rank.

    Attributes:
        kept: by a layer for its backward, with the recipe's selective recomputation.
        whole: the same with nothing recomputed: what is there while a layer is being recomputed.
        entry: the layer's input alone: what full recomputation keeps.
    """

    kept: float
    whole: float
    entry: float


def compute_layer_activations(
    shapes: ModelShapes, parallel: ParallelConfig, layer: int, expert_imbalance: float
) -> LayerActivations:
    """Numbers that a layer keeps of one token.

    Args:
        shapes: the model.
        parallel: the trainer's layout.
        layer: from 0.
        expert_imbalance: tokens of the fullest expert rank over the mean.
    """
    kind = (is_linear_layer(shapes, layer), is_moe_layer(shapes, layer))
    selected = _selected(parallel)
    is_fused = parallel.megatron.get("transformer_impl") != "local"
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    tp, is_split = parallel.tensor_model_parallel_size, parallel.sequence_parallel
    return _compute(shapes, tp, etp, is_split, selected, is_fused, kind, expert_imbalance)


def compute_widest_layer(shapes: ModelShapes, tensor_parallel_size: int) -> float:
    """Numbers of one token in the widest layer of a model that only goes forward.

    Args:
        shapes: the model.
        tensor_parallel_size: TP, without sequence parallelism.
    """
    kinds = {(is_linear_layer(shapes, layer), is_moe_layer(shapes, layer)) for layer in range(shapes.num_layers)}
    tp = tensor_parallel_size
    return max(_compute(shapes, tp, tp, False, (), False, kind, 1.0).whole for kind in kinds)


def _selected(parallel: ParallelConfig) -> tuple[str, ...]:
    if parallel.recompute_granularity != "selective":
        return ()
    return parallel.recompute_modules or ("core_attn",)


@functools.lru_cache(maxsize=4096)
def _compute(
    shapes: ModelShapes,
    tp: int,
    etp: int,
    is_sequence_parallel: bool,
    selected: tuple[str, ...],
    is_fused: bool,
    kind: tuple[bool, bool],
    expert_imbalance: float,
) -> LayerActivations:
    split = tp if is_sequence_parallel else 1
    entry = shapes.hidden_size / split
    is_linear, is_moe = kind
    attention = _delta_net(shapes, tp) if is_linear else _attention(shapes, tp)
    # Transformer Engine's dense MLP has the norm before it inside, and computes it again with itself.
    inside = is_fused and not is_moe
    dense = {"mlp": 3 * shapes.ffn_hidden_size / tp + inside * entry}
    mlp = _experts(shapes, tp, etp, split, expert_imbalance) if is_moe else dense
    norms = (2 - inside + shapes.post_self_attn_layernorm + shapes.post_mlp_layernorm) * entry
    parts = {"residual": 2 * entry, "layernorm": norms, **attention, **mlp}
    dropped = sum(parts.get(name, 0.0) for name in _dropped_parts(selected))
    whole = sum(parts.values())
    return LayerActivations(kept=whole - dropped, whole=whole, entry=entry)


def _dropped_parts(selected: tuple[str, ...]) -> list[str]:
    """Parts that a recomputed module no longer keeps; core_attn keeps its inputs, and its output is another's input."""
    names = {"mlp": ["mlp"], "layernorm": ["layernorm"], "mla_up_proj": ["mla_up_proj"], "moe_act": ["moe_act"]}
    names["moe"] = ["moe_act", "moe", "shared_experts"]
    names["shared_experts"] = ["shared_experts"]
    return sorted({part for module in selected for part in names.get(module, [])})


def _attention(shapes: ModelShapes, tp: int) -> dict[str, float]:
    """Query, key, value, the output (input of the projection), and what norms and gates keep."""
    if shapes.multi_latent_attention:
        return _latent_attention(shapes, tp)
    query, key = (heads * shapes.kv_channels / tp for heads in (shapes.num_attention_heads, shapes.num_query_groups))
    kept = 2 * query + 2 * key
    kept += (query + key) * shapes.qk_layernorm + 2 * query * shapes.attention_output_gate
    return {"attention": kept}


def _latent_attention(shapes: ModelShapes, tp: int) -> dict[str, float]:
    latent = (shapes.q_lora_rank or 0) + (shapes.kv_lora_rank or 0)
    position, value = shapes.qk_pos_emb_head_dim or 0, shapes.v_head_dim or 0
    head = (shapes.qk_head_dim or 0) + position
    heads = shapes.num_attention_heads / tp
    kept = latent * (1 + shapes.qk_layernorm) + position + heads * value
    return {"attention": kept, "mla_up_proj": heads * (2 * head + value)}


def _delta_net(shapes: ModelShapes, tp: int) -> dict[str, float]:
    """Projected, convolved and normalised query, key and value, the gate, and the output before and after its norm."""
    key = (shapes.linear_num_key_heads or 0) * (shapes.linear_key_head_dim or 0)
    heads = shapes.linear_num_value_heads or 0
    value = heads * (shapes.linear_value_head_dim or 0)
    return {"attention": (3 * (2 * key + value) + 3 * value + 4 * heads) / tp}


def _experts(shapes: ModelShapes, tp: int, etp: int, split: int, imbalance: float) -> dict[str, float]:
    """Tokens sent to experts (their input, hidden layer and activation), router scores in fp32, shared experts.

    On the average as many tokens arrive at a rank as leave it, each once for every expert it is sent to. The ranks of a
    TP group hold different tokens (Megatron asks for sequence parallelism there), and ETP gathers those of its ranks.
    """
    width, hidden = shapes.hidden_size, shapes.moe_ffn_hidden_size or 0
    arriving = (shapes.moe_router_topk or 0) * etp / tp * imbalance
    router = 4 * (shapes.num_moe_experts or 0) / split
    shared = 3 * (shapes.moe_shared_expert_intermediate_size or 0) / tp
    return {
        "moe": arriving * (width + 2 * hidden / etp) + router,
        "moe_act": arriving * hidden / etp,
        "shared_experts": shared,
    }
