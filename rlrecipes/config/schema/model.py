"""The trained model (conf/model)."""

from __future__ import annotations

from typing import Literal

from rlrecipes.config.schema.section import NonNegativeInt, PositiveFloat, PositiveInt, Section


class ModelShapes(Section):
    """Architecture facts, by Megatron option name."""

    num_layers: PositiveInt
    """Transformer layers."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    ffn_hidden_size: PositiveInt
    """Width of the SwiGLU hidden layer."""
    num_attention_heads: PositiveInt
    """Query heads."""
    num_query_groups: PositiveInt
    """Key and value heads (GQA)."""
    kv_channels: PositiveInt
    """Width of one head."""
    vocab_size: PositiveInt
    """Rows of the embedding, before Megatron's padding."""
    rotary_base: PositiveFloat
    """RoPE theta."""
    norm_epsilon: PositiveFloat
    """RMSNorm epsilon."""
    max_position_embeddings: PositiveInt
    """Longest sequence, tokens."""
    qk_layernorm: bool
    """Whether queries and keys are normalised per head (Qwen3)."""
    add_qkv_bias: bool
    """Whether the query, key and value projections have a bias (Qwen2.5)."""
    untie_embeddings_and_output_weights: bool
    """Whether the output layer has weights of its own."""


class ModelConfig(Section):
    """The trained model (conf/model)."""

    name: str
    """Name in logs and tracking."""
    family: Literal["qwen2", "qwen3", "llama"]
    """HF model_type; names the weight map."""
    path: str | None
    """HF directory (config.json, safetensors, tokenizer). null: random weights of `shapes` are written once per run."""
    shapes: ModelShapes | None
    """Architecture of a model without a path; beside a path it must agree with config.json."""
    alphabet: str | None
    """Characters of the tokenizer made for a model without a path, one token each."""
    init_seed: NonNegativeInt
    """Seed of the random weights of a model without a path."""
    dtype: Literal["float32", "bfloat16"]
    """Precision of weights and activations, in trainer and engines alike."""
