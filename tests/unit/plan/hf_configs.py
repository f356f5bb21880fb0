"""config.json as transformers itself would write it for given shapes."""

from __future__ import annotations

import json
from typing import Any

from rlrecipes.config.schema import ModelConfig, ModelShapes

STAND_INS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Families whose classes ship with their checkpoints, and the transformers class they are written after."""
_TEXT = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}


def build_hf_config(model: ModelConfig) -> Any:
    """The configuration object of transformers for a model's facts."""
    from transformers import AutoConfig

    assert model.shapes is not None
    family = STAND_INS.get(model.family, model.family)
    return AutoConfig.for_model(_TEXT.get(family, family), **_to_arguments(model.shapes, family))


def to_config_json(model: ModelConfig) -> dict[str, Any]:
    """What ``save_pretrained`` writes, under the family's own name."""
    data: dict[str, Any] = json.loads(build_hf_config(model).to_json_string(use_diff=False))
    return data | {"model_type": model.family}


def _to_arguments(s: ModelShapes, family: str) -> dict[str, Any]:
    values = {
        "num_hidden_layers": s.num_layers,
        "hidden_size": s.hidden_size,
        "intermediate_size": s.ffn_hidden_size,
        "num_attention_heads": s.num_attention_heads,
        "num_key_value_heads": s.num_query_groups,
        "vocab_size": s.vocab_size,
        "rms_norm_eps": s.norm_epsilon,
        "max_position_embeddings": s.max_position_embeddings,
        "tie_word_embeddings": not s.untie_embeddings_and_output_weights,
        "rope_parameters": _to_rope(s),
        "attention_bias": s.add_qkv_bias and family != "qwen2",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    if not s.multi_latent_attention:
        values["head_dim"] = s.kv_channels
    if s.num_moe_experts:
        values |= _to_experts(s)
    if family == "glm4_moe":
        values["use_qk_norm"] = s.qk_layernorm
    renamed = {
        "q_lora_rank": s.q_lora_rank if s.multi_latent_attention else None,
        "kv_lora_rank": s.kv_lora_rank,
        "qk_nope_head_dim": s.qk_head_dim,
        "qk_rope_head_dim": s.qk_pos_emb_head_dim,
        "v_head_dim": s.v_head_dim,
        "index_n_heads": s.dsa_indexer_n_heads,
        "index_head_dim": s.dsa_indexer_head_dim,
        "index_topk": s.dsa_indexer_topk,
        "index_topk_freq": s.dsa_indexer_topk_freq if s.dsa_indexer_n_heads else None,
        "index_skip_topk_offset": s.dsa_indexer_skip_topk_offset if s.dsa_indexer_n_heads else None,
        "linear_num_key_heads": s.linear_num_key_heads,
        "linear_num_value_heads": s.linear_num_value_heads,
        "linear_key_head_dim": s.linear_key_head_dim,
        "linear_value_head_dim": s.linear_value_head_dim,
        "linear_conv_kernel_dim": s.linear_conv_kernel_dim,
        "full_attention_interval": s.linear_attention_freq,
    }
    values |= {name: value for name, value in renamed.items() if value is not None}
    if s.multi_latent_attention:
        values["q_lora_rank"] = s.q_lora_rank
    return values


def _to_rope(s: ModelShapes) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": s.rotary_base}
    if s.rotary_percent != 1:
        rope["partial_rotary_factor"] = s.rotary_percent
    scaled = {"factor": s.rotary_scaling_factor, "original_max_position_embeddings": s.original_max_position_embeddings}
    if s.rope_type == "yarn":
        rope |= scaled | {"rope_type": "yarn", "mscale": s.mscale, "mscale_all_dim": s.mscale_all_dim}
    if s.use_rope_scaling:
        rope |= scaled | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return rope


def _to_experts(s: ModelShapes) -> dict[str, Any]:
    shared = s.moe_shared_expert_intermediate_size or 0
    return {
        **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), s.num_moe_experts),
        "moe_intermediate_size": s.moe_ffn_hidden_size,
        "num_experts_per_tok": s.moe_router_topk,
        "first_k_dense_replace": s.first_dense_layers,
        "n_shared_experts": shared // (s.moe_ffn_hidden_size or 1),
        "shared_expert_intermediate_size": shared,
        "n_group": s.moe_router_num_groups or 1,
        "topk_group": s.moe_router_group_topk or 1,
        "routed_scaling_factor": s.moe_router_topk_scaling_factor or 1.0,
    }
