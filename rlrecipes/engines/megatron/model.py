"""The GPT of one pipeline stage. Owns how a ModelNode becomes Megatron's configuration; refuses weights."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from rlrecipes.engines.megatron.attention import PackedAttention
from rlrecipes.errors import ConfigError, Problem
from rlrecipes.plan.nodes import ModelNode, TrainerNode
from rlrecipes.suggest import did_you_mean

_VOCABULARY_MULTIPLE = 128
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def compute_padded_vocab_size(vocab_size: int, tensor_model_parallel_size: int) -> int:
    """Rows of the embedding: a multiple of 128 that TP divides.

    For the usual TP (a power of 2 up to 128) it does not depend on TP, so a checkpoint keeps its shapes.
    """
    multiple = math.lcm(_VOCABULARY_MULTIPLE, tensor_model_parallel_size)
    return -(-vocab_size // multiple) * multiple


def has_transformer_engine(trainer: TrainerNode) -> bool:
    """Whether layers come from Transformer Engine: on CUDA, where it is installed."""
    return trainer.device == "cuda" and importlib.util.find_spec("transformer_engine") is not None


def _architecture_fields(model: ModelNode) -> dict[str, Any]:
    shapes, dtype = model.shapes, DTYPES[model.dtype]
    return {
        "num_layers": shapes.num_layers,
        "hidden_size": shapes.hidden_size,
        "ffn_hidden_size": shapes.ffn_hidden_size,
        "num_attention_heads": shapes.num_attention_heads,
        "num_query_groups": shapes.num_query_groups,
        "kv_channels": shapes.kv_channels,
        "layernorm_epsilon": shapes.norm_epsilon,
        "qk_layernorm": shapes.qk_layernorm,
        "add_qkv_bias": shapes.add_qkv_bias,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
    }


def _parallel_fields(trainer: TrainerNode) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": trainer.tensor_model_parallel_size,
        "pipeline_model_parallel_size": trainer.pipeline_model_parallel_size,
        "sequence_parallel": trainer.sequence_parallel,
        "variable_seq_lengths": True,  # micro-batches differ in tokens
        "moe_token_dispatcher_type": "alltoall",  # Megatron asks for it then, experts or not
        "calculate_per_token_loss": True,  # gradients are sums: loss weights alone decide what is averaged
    }


def _default_fields(trainer: TrainerNode) -> dict[str, Any]:
    """What a recipe may change under ``parallel.megatron``."""
    on_cuda = trainer.device == "cuda"
    return {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "perform_initialization": False,  # weights are always loaded
        "use_cpu_initialization": not on_cuda,
        "batch_p2p_sync": on_cuda,
        "deterministic_mode": trainer.is_deterministic and on_cuda,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": has_transformer_engine(trainer),
        "bias_activation_fusion": on_cuda,
        "bias_dropout_fusion": on_cuda,
        "apply_rope_fusion": not on_cuda or has_transformer_engine(trainer),
    }


def _check_native(native: dict[str, Any], taken: dict[str, Any]) -> None:
    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    problems = [
        Problem(
            f"parallel.megatron.{name}",
            "is set by the model and parallel sections" if name in taken else "is no field of TransformerConfig",
            "set it there" if name in taken else did_you_mean(name, names - taken.keys()),
        )
        for name in native
        if name in taken or name not in names
    ]
    if problems:
        raise ConfigError.from_problems(problems)


def build_transformer_config(model: ModelNode, trainer: TrainerNode) -> TransformerConfig:
    """Say a model and its layout in Megatron's words.

    Args:
        model: architecture and precision.
        trainer: layout, and ``trainer.megatron``: fields of TransformerConfig under their own names.

    Raises:
        ConfigError: a native field is unknown, belongs to another section, or Megatron refuses the combination.
    """
    taken = _architecture_fields(model) | _parallel_fields(trainer)
    _check_native(trainer.megatron, taken)
    try:
        return TransformerConfig(**taken | _default_fields(trainer) | trainer.megatron)
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(
            "parallel", f"Megatron refuses this model and layout: {error}", "change parallel or parallel.megatron"
        ) from error


def build_model(model: ModelNode, trainer: TrainerNode, config: TransformerConfig) -> GPTModel:
    """Build this rank's part of the model, weights undefined, in ``model.dtype`` on its device.

    Needs Megatron's parallel state, and on CPU :func:`rlrecipes.engines.megatron.cpu.run_patches`.

    Args:
        model: what to build.
        trainer: device and layout.
        config: from :func:`build_transformer_config`.
    """
    shapes = model.shapes
    if has_transformer_engine(trainer):
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=shapes.qk_layernorm)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=shapes.qk_layernorm, normalization="RMSNorm")
        spec.submodules.self_attention.submodules.core_attention = PackedAttention
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=compute_padded_vocab_size(shapes.vocab_size, trainer.tensor_model_parallel_size),
        max_sequence_length=shapes.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not shapes.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=shapes.rotary_base,
        parallel_output=True,
    )
    return gpt.to(device=trainer.device, dtype=DTYPES[model.dtype])
