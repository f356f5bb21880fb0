"""Parameters, gradients and optimizer state: predicted ones against those that megatron-core allocates."""

from __future__ import annotations

from typing import Any

import pytest
from megatron_counts import count_on_every_rank
from rank_group import RankGroup

from rlrecipes.config.schema import ModelShapes, ParallelConfig
from rlrecipes.plan.parameters import compute_rank_parameters
from rlrecipes.plan.trainer_memory import compute_gradient_bytes, compute_optimizer_bytes

DENSE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 192,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 16,
    "vocab_size": 200,
    "rotary_base": 10000.0,
    "norm_epsilon": 1e-6,
    "max_position_embeddings": 64,
    "untie_embeddings_and_output_weights": True,
}
TIED = {**DENSE, "untie_embeddings_and_output_weights": False}
MOE = {"num_moe_experts": 8, "moe_ffn_hidden_size": 48, "moe_router_topk": 2}
SHARED = {**MOE, "moe_shared_expert_intermediate_size": 96, "first_dense_layers": 1}
LATENT = {
    "num_query_groups": 8,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 20,
}
DELTA = {
    "linear_attention_freq": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "attention_output_gate": True,
    "qk_layernorm": True,
}
INDEXER = {"dsa_indexer_n_heads": 4, "dsa_indexer_head_dim": 16, "dsa_indexer_topk": 8}
MODELS = {
    "llama": DENSE,
    "llama tied": TIED,
    "qwen2": {**TIED, "add_qkv_bias": True},
    "qwen3": {**TIED, "qk_layernorm": True},
    "qwen3_moe": {**DENSE, **MOE, "qk_layernorm": True},
    "qwen2_moe": {**DENSE, **SHARED, "add_qkv_bias": True, "moe_shared_expert_gate": True},
    "glm4_moe": {**DENSE, **SHARED, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    "mimo": {**DENSE, "add_qkv_bias": True, "mtp_num_layers": 1},
    "tied with prediction": {**TIED, "mtp_num_layers": 2},
    "moe with prediction": {**DENSE, **SHARED, "mtp_num_layers": 1},
    "deepseek_v3": {**DENSE, **SHARED, **LATENT},
    # Megatron fuses the missing query norm into a layer that Transformer Engine alone has: here without norms.
    "moonlight": {**DENSE, **SHARED, **LATENT, "q_lora_rank": None, "qk_layernorm": False},
    "deepseek_v32": {**DENSE, **SHARED, **LATENT, **INDEXER},
    "glm_moe_dsa": {
        **DENSE,
        **SHARED,
        **LATENT,
        **INDEXER,
        "dsa_indexer_topk_freq": 2,
        "dsa_indexer_skip_topk_offset": 1,
    },
    "qwen3_5": {**TIED, **DELTA},
    "qwen3_next": {**DENSE, **SHARED, **DELTA, "first_dense_layers": 0, "moe_shared_expert_gate": True},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp4": {"data_parallel_size": 4},
    "tp2 pp2 vpp2 dp2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "data_parallel_size": 2,
    },
    "cp2 dp2 uneven": {
        "context_parallel_size": 2,
        "data_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "megatron": {"num_layers_in_first_pipeline_stage": 1},
    },
}
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "ep4": {"data_parallel_size": 4, "expert_model_parallel_size": 4},
    "tp2 ep2 etp1": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "data_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
    "tp2 ep2 etp2 pp2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
        "data_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
    },
}


def build_parallel(**changes: Any) -> ParallelConfig:
    values: dict[str, Any] = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "data_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "sequence_parallel": False,
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
        "recompute_modules": (),
        "optimizer_cpu_offload": False,
        "max_tokens_per_micro_batch": 64,
        "num_threads": 1,
        "megatron": {},
    }
    return ParallelConfig(**values | changes)


def list_layouts(shapes: ModelShapes) -> dict[str, ParallelConfig]:
    layouts = LAYOUTS | (EXPERT_LAYOUTS if shapes.num_moe_experts else {})
    return {name: build_parallel(**layout) for name, layout in layouts.items()}


@pytest.mark.parametrize("model", MODELS)
def test_parameters_of_every_rank(model: str, ranks: RankGroup) -> None:
    shapes = ModelShapes(**MODELS[model])
    layouts = list_layouts(shapes)
    cases = [(shapes, parallel, False) for parallel in layouts.values()]
    found = ranks.run(1, count_on_every_rank, cases)[0]
    for (name, parallel), built in zip(layouts.items(), found, strict=True):
        expected = compute_rank_parameters(shapes, parallel)
        for rank in built:
            stage = expected[rank["stage"]]
            assert (rank["dense"], rank["experts"]) == (stage.dense, stage.experts), (name, rank)


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_bytes_of_the_distributed_optimizer(model: str, ranks: RankGroup) -> None:
    sizes = {"hidden_size": 256, "ffn_hidden_size": 768, "vocab_size": 1024, "moe_ffn_hidden_size": 192}
    wide = {name: size for name, size in sizes.items() if name in MODELS[model]}
    shapes = ModelShapes(**MODELS[model] | wide)
    layouts = list_layouts(shapes)
    cases = [(shapes, parallel, True) for parallel in layouts.values()]
    found = ranks.run(1, count_on_every_rank, cases)[0]
    for (name, parallel), built in zip(layouts.items(), found, strict=True):
        expected = compute_rank_parameters(shapes, parallel)
        for rank in built:
            counts = expected[rank["stage"]]
            assert rank["weight_bytes"] == 2 * counts.total, name
            # Buffers are padded so that every rank's part is aligned.
            assert rank["gradient_bytes"] == pytest.approx(
                counts.total * compute_gradient_bytes(parallel, 2), rel=0.01
            ), name
        for stage, counts in enumerate(expected):
            # Megatron cuts a buffer into equal parts, and one parameter can lie in two.
            held = [rank["optimizer_bytes"] for rank in built if rank["stage"] == stage]
            mean = sum(held) / len(held)
            assert mean == pytest.approx(compute_optimizer_bytes(counts, parallel, 2), rel=0.01), (name, stage)
