"""A model and its layout in Megatron's words. Owns which fields the trainer sets, and where native options go.

``parallel.megatron`` holds fields of three classes under their own names. Each goes to every class that has it.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from rlrecipes.config.schema import ModelShapes, OptimConfig
from rlrecipes.engines.megatron.attention import use_packed_rope
from rlrecipes.errors import ConfigError, Problem
from rlrecipes.plan.native import MEGATRON_OWNED
from rlrecipes.plan.nodes import ModelNode, TrainerNode
from rlrecipes.plan.packages import find_missing_packages, uses_transformer_engine
from rlrecipes.suggest import did_you_mean

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_DETERMINISTIC_ENV = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
"""What torch and Transformer Engine ask for, each refusing to be deterministic without; read when first used."""
_KINDS = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)


def to_megatron_num_chunks(trainer: TrainerNode) -> int | None:
    """Model chunks of a rank as Megatron has them: None for one."""
    return trainer.num_model_chunks if trainer.num_model_chunks > 1 else None


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


def _expert_fields(shapes: ModelShapes) -> dict[str, Any]:
    if shapes.num_moe_experts is None:
        return {}
    return {
        "num_moe_experts": shapes.num_moe_experts,
        "moe_ffn_hidden_size": shapes.moe_ffn_hidden_size,
        "moe_router_topk": shapes.moe_router_topk,
        "moe_router_pre_softmax": shapes.moe_router_pre_softmax,
        "moe_router_load_balancing_type": "none",  # the loss is the objective's alone
        "moe_grouped_gemm": False,  # every expert is a module, on CPU as on a GPU
    }


def _parallel_fields(trainer: TrainerNode) -> dict[str, Any]:
    is_interleaved = trainer.num_model_chunks > 1
    return {
        "tensor_model_parallel_size": trainer.tensor_model_parallel_size,
        "pipeline_model_parallel_size": trainer.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": to_megatron_num_chunks(trainer),
        "context_parallel_size": trainer.context_parallel_size,
        "expert_model_parallel_size": trainer.expert_model_parallel_size,
        "expert_tensor_parallel_size": trainer.expert_tensor_parallel_size,
        "sequence_parallel": trainer.sequence_parallel,
        "recompute_granularity": trainer.recompute_granularity,
        "recompute_method": trainer.recompute_method,
        "recompute_num_layers": trainer.recompute_num_layers,
        "recompute_modules": [*trainer.recompute_modules] or None,
        # Batched sends and receives of several model chunks get each other's tensors on two ranks, silently.
        "overlap_p2p_comm": is_interleaved,
        "batch_p2p_comm": not is_interleaved,
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
        "persist_layer_norm": uses_transformer_engine(trainer),
        "bias_activation_fusion": on_cuda,
        "bias_dropout_fusion": on_cuda,
        "apply_rope_fusion": True,  # the other one walks the samples in Python, and waits for the GPU in each layer
        "transformer_impl": "transformer_engine" if uses_transformer_engine(trainer) else "local",
    }


def _optimizer_fields(trainer: TrainerNode, optim: OptimConfig, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "optimizer": "adam",
        "lr": optim.lr,
        "min_lr": optim.min_lr,
        "weight_decay": optim.weight_decay,
        "adam_beta1": optim.adam_beta1,
        "adam_beta2": optim.adam_beta2,
        "adam_eps": optim.adam_eps,
        "clip_grad": optim.clip_grad,
        "use_distributed_optimizer": True,
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "optimizer_cpu_offload": trainer.optimizer_cpu_offload,
        # Without it float32 weights would stay on the GPU as well.
        "use_precision_aware_optimizer": trainer.optimizer_cpu_offload,
    }


def _optimizer_default_fields(trainer: TrainerNode) -> dict[str, Any]:
    """What a recipe may change; Megatron's own default of the fraction would offload nothing."""
    is_offloaded = trainer.optimizer_cpu_offload
    return {"optimizer_offload_fraction": 1.0, "overlap_cpu_optimizer_d2h_h2d": True} if is_offloaded else {}


def check_native(native: dict[str, Any]) -> None:
    """Refuse what no class has, and what other sections decide.

    The Plan did so too; a saved one may have been edited since.

    Args:
        native: ``parallel.megatron``.

    Raises:
        ConfigError: all that is wrong.
    """
    names = {field.name for kind in _KINDS for field in dataclasses.fields(kind)} - MEGATRON_OWNED.keys()
    problems = [
        Problem(f"parallel.megatron.{name}", "is decided elsewhere in the recipe", MEGATRON_OWNED[name])
        if name in MEGATRON_OWNED
        else Problem(f"parallel.megatron.{name}", "is no option of Megatron", did_you_mean(name, names))
        for name in native
        if name not in names
    ]
    if problems:
        raise ConfigError.from_problems(problems)


def _build[Config](kind: type[Config], trainer: TrainerNode, taken: dict[str, Any], defaults: dict[str, Any]) -> Config:
    fields = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    native = {name: value for name, value in trainer.megatron.items() if name in fields}
    try:
        return kind(**taken | defaults | native)
    except (ValueError, AssertionError, TypeError, RuntimeError) as error:
        raise ConfigError(
            "parallel", f"Megatron refuses this model and layout: {error}", "change parallel or parallel.megatron"
        ) from error


def build_transformer_config(model: ModelNode, trainer: TrainerNode) -> TransformerConfig:
    """The layers and how they are split.

    Args:
        model: architecture and precision.
        trainer: layout, and native options.

    Raises:
        ConfigError: a native option is unknown, belongs to another section, or asks for a package that is missing; or
            Megatron refuses the combination.
    """
    check_native(trainer.megatron)
    if problems := list(find_missing_packages(trainer)):
        raise ConfigError.from_problems(problems)  # before Megatron fails inside one of them
    if not uses_transformer_engine(trainer):
        use_packed_rope()
    if trainer.is_deterministic and trainer.device == "cuda":
        os.environ |= _DETERMINISTIC_ENV
    taken = _architecture_fields(model) | _expert_fields(model.shapes) | _parallel_fields(trainer)
    return _build(TransformerConfig, trainer, taken, _default_fields(trainer))


def build_optimizer_config(trainer: TrainerNode, optim: OptimConfig, dtype: torch.dtype) -> OptimizerConfig:
    """Adam.

    Args:
        trainer: what is offloaded, and native options.
        optim: Adam's numbers.
        dtype: of the weights.

    Raises:
        ConfigError: Megatron refuses the combination.
    """
    taken = _optimizer_fields(trainer, optim, dtype)
    return _build(OptimizerConfig, trainer, taken, _optimizer_default_fields(trainer))


def build_ddp_config(trainer: TrainerNode) -> DistributedDataParallelConfig:
    """How gradients are reduced over data-parallel ranks.

    Args:
        trainer: native options.

    Raises:
        ConfigError: Megatron refuses the combination.
    """
    return _build(DistributedDataParallelConfig, trainer, {"use_distributed_optimizer": True}, {})
