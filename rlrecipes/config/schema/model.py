"""The trained model (conf/model)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlrecipes.config.schema.section import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

Family = Literal[
    "llama",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "deepseek_v3",
    "deepseek_v32",
    "kimi_k2",
    "mimo",
    "minimax_m2",
]
"""HF model_type of a family whose config.json is understood."""


class ModelShapes(Section):
    """Architecture facts, by Megatron option name. What most models lack is off unless it is said."""

    num_layers: Annotated[int, Field(ge=1, le=1024)]
    """Transformer layers."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    ffn_hidden_size: PositiveInt
    """Width of the SwiGLU hidden layer of a dense layer."""
    num_attention_heads: PositiveInt
    """Query heads."""
    num_query_groups: PositiveInt
    """Key and value heads (GQA); of MLA: the query heads."""
    kv_channels: PositiveInt
    """Width of one head; of MLA: qk_head_dim."""
    vocab_size: PositiveInt
    """Rows of the embedding, before Megatron's padding."""
    rotary_base: PositiveFloat
    """RoPE theta."""
    norm_epsilon: PositiveFloat
    """RMSNorm epsilon."""
    max_position_embeddings: PositiveInt
    """Longest sequence, tokens."""
    untie_embeddings_and_output_weights: bool
    """Whether the output layer has weights of its own."""
    qk_layernorm: bool = False
    """Whether queries and keys are normalised, per head (Qwen3) or before they leave their latent vectors (MLA)."""
    add_qkv_bias: bool = False
    """Whether the query, key and value projections have a bias (Qwen2.5)."""
    layernorm_zero_centered_gamma: bool = False
    """Whether norms multiply by 1 + weight (Qwen3-Next)."""
    post_self_attn_layernorm: bool = False
    """Whether attention's output is normalised before it is added (GLM-4)."""
    post_mlp_layernorm: bool = False
    """Whether the MLP's output is normalised before it is added (GLM-4)."""
    attention_output_gate: bool = False
    """Whether a sigmoid gate of attention's width multiplies its output (Qwen3-Next)."""
    mtp_num_layers: PositiveInt | None = None
    """Multi-token-prediction layers that are trained along; null: none, even where the checkpoint has some."""

    rotary_percent: Fraction = 1.0
    """Share of a head that RoPE turns."""
    rope_type: Literal["rope", "yarn"] = "rope"
    """yarn: stretched from original_max_position_embeddings by rotary_scaling_factor."""
    use_rope_scaling: bool = False
    """Whether low frequencies are stretched by rotary_scaling_factor, Llama 3.1's way."""
    rotary_scaling_factor: PositiveFloat = 1.0
    """Stretch of yarn or of use_rope_scaling."""
    original_max_position_embeddings: PositiveInt | None = None
    """Longest sequence before the stretch, tokens."""
    mscale: PositiveFloat = 1.0
    """Of yarn: scale of attention's logits."""
    mscale_all_dim: NonNegativeFloat = 0.0
    """Of yarn: what it is divided by."""

    num_moe_experts: PositiveInt | None = None
    """Routed experts of a MoE layer; null: every layer is dense."""
    first_dense_layers: NonNegativeInt = 0
    """Layers before the first MoE layer; all later ones are MoE."""
    moe_ffn_hidden_size: PositiveInt | None = None
    """Width of one expert's SwiGLU hidden layer."""
    moe_router_topk: PositiveInt | None = None
    """Experts of a token."""
    moe_shared_expert_intermediate_size: PositiveInt | None = None
    """Width of all shared experts together, which every token visits; null: none."""
    moe_shared_expert_gate: bool = False
    """Whether a sigmoid gate multiplies their output."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of the router's logits."""
    moe_router_pre_softmax: bool = False
    """Whether the scores are made before the choice, over all experts."""
    moe_router_enable_expert_bias: bool = False
    """Whether a bias of each expert joins the choice (not the weights)."""
    moe_router_num_groups: PositiveInt | None = None
    """Groups of experts among which is chosen first; null: none."""
    moe_router_group_topk: PositiveInt | None = None
    """Groups of a token."""
    moe_router_topk_scaling_factor: PositiveFloat | None = None
    """Multiplies the chosen experts' weights; null: 1."""

    multi_latent_attention: bool = False
    """Whether keys and values are rebuilt from a latent vector (MLA, DeepSeek)."""
    q_lora_rank: PositiveInt | None = None
    """Width of the query's latent vector; null: the query has none."""
    kv_lora_rank: PositiveInt | None = None
    """Width of the latent vector of key and value."""
    qk_head_dim: PositiveInt | None = None
    """Width of a head's part without position."""
    qk_pos_emb_head_dim: PositiveInt | None = None
    """Width of its part with RoPE; all heads share the key's."""
    v_head_dim: PositiveInt | None = None
    """Width of a value head."""
    dsa_indexer_n_heads: PositiveInt | None = None
    """Heads of the indexer that chooses what a token attends to (DSA, DeepSeek-V3.2); null: all of it."""
    dsa_indexer_head_dim: PositiveInt | None = None
    """Width of one of them."""
    dsa_indexer_topk: PositiveInt | None = None
    """Tokens it chooses."""
    dsa_indexer_topk_freq: PositiveInt = 1
    """Every so many-th layer has an indexer, the next ones share its choice; 1: every layer."""
    dsa_indexer_skip_topk_offset: NonNegativeInt = 0
    """Layers at the start that have one each."""

    linear_attention_freq: PositiveInt | None = None
    """Every so many-th layer has full attention, the others a gated delta net (Qwen3-Next); null: all have full."""
    linear_num_key_heads: PositiveInt | None = None
    """Query heads, and key heads, of a gated delta net."""
    linear_num_value_heads: PositiveInt | None = None
    """Its value heads."""
    linear_key_head_dim: PositiveInt | None = None
    """Width of its query and key heads."""
    linear_value_head_dim: PositiveInt | None = None
    """Width of its value heads."""
    linear_conv_kernel_dim: PositiveInt | None = None
    """Tokens its convolution sees."""


class ModelConfig(Section):
    """The trained model (conf/model)."""

    name: str
    """Name in logs and tracking."""
    family: Family
    """HF model_type; names the weight map."""
    path: str | None
    """HF directory (config.json, safetensors, tokenizer). null: the facts of `shapes` make a Plan; with an `alphabet`
    too, random weights are written once per run."""
    shapes: ModelShapes | None
    """Architecture of a model without a path; beside a path it must agree with config.json."""
    alphabet: str | None
    """Characters of the tokenizer made for a model without a path, one token each."""
    init_seed: NonNegativeInt
    """Seed of the random weights of a model without a path."""
    dtype: Literal["float32", "bfloat16"]
    """Precision of weights and activations, in trainer and engines alike."""
