"""Random weights of a model that has no path. Owns their values; refuses tokenizers."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlrecipes.config.schema import ModelShapes
from rlrecipes.engines.megatron.hf_directory import (
    create_partial,
    publish,
    reported_writes,
    run_copy_but_weights,
    run_write_index,
    run_write_shards,
)
from rlrecipes.plan.nodes import ModelNode

_STD = 0.02
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def to_hf_config(model: ModelNode) -> dict[str, Any]:
    """The content of config.json for a model's shapes."""
    shapes = model.shapes
    return {
        "architectures": [_ARCHITECTURES[model.family]],
        "model_type": model.family,
        "vocab_size": shapes.vocab_size,
        "hidden_size": shapes.hidden_size,
        "intermediate_size": shapes.ffn_hidden_size,
        "num_hidden_layers": shapes.num_layers,
        "num_attention_heads": shapes.num_attention_heads,
        "num_key_value_heads": shapes.num_query_groups,
        "head_dim": shapes.kv_channels,
        "hidden_act": "silu",
        "rms_norm_eps": shapes.norm_epsilon,
        "max_position_embeddings": shapes.max_position_embeddings,
        "rope_theta": shapes.rotary_base,  # where readers before transformers 5 look
        "rope_parameters": {"rope_type": "default", "rope_theta": shapes.rotary_base},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": _STD,
        "tie_word_embeddings": not shapes.untie_embeddings_and_output_weights,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": model.dtype,
        "use_cache": True,
        **_to_hf_experts(shapes),
    }


def _to_hf_experts(shapes: ModelShapes) -> dict[str, Any]:
    if shapes.num_moe_experts is None:
        return {}
    return {
        "num_experts": shapes.num_moe_experts,
        "num_experts_per_tok": shapes.moe_router_topk,
        "moe_intermediate_size": shapes.moe_ffn_hidden_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
    }


def iter_random_tensors(model: ModelNode) -> Iterator[tuple[str, Tensor]]:
    """Every HF tensor of a new model: norms 1, biases 0, the rest normal with deviation 0.02.

    Each is drawn from a generator of its own name and ``init_seed``, so neither order nor layout matters.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = to_hf_config(model)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    dtype = getattr(torch, model.dtype)
    for name, shape in _iter_hf_shapes(hf):
        if name.endswith("norm.weight"):
            yield name, torch.ones(shape, dtype=dtype)
        elif name.endswith(".bias"):
            yield name, torch.zeros(shape, dtype=dtype)
        else:
            # torch's CPU generator looks at 32 bits of its seed alone.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{model.init_seed} {name}".encode()))
            yield name, (torch.randn(shape, generator=generator) * _STD).to(dtype)


def _iter_hf_shapes(hf: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors as they stand in files: transformers holds all experts of a layer as one, and writes them one by one."""
    for name, parameter in hf.named_parameters():  # a tied output layer is no parameter of its own
        experts, _, fused = name.rpartition(".")
        if not experts.endswith(".experts"):
            yield name, tuple(parameter.shape)
            continue
        num_experts, rows, columns = parameter.shape
        parts = ("gate_proj", "up_proj") if fused == "gate_up_proj" else (fused,)
        for expert in range(num_experts):
            yield from ((f"{experts}.{expert}.{part}.weight", (rows // len(parts), columns)) for part in parts)


def run_write_random_model(model: ModelNode, path: Path) -> None:
    """Write config.json and random weights as an HF directory; a tokenizer that is there already stays.

    Args:
        model: shapes, family, precision and seed.
        path: the directory.

    Raises:
        CheckpointError: it cannot be written.
    """
    with reported_writes(path):
        partial = create_partial(path)
        if path.is_dir():
            run_copy_but_weights(path, partial)
        run_write_index(partial, run_write_shards(partial, "model", iter_random_tensors(model)))
        (partial / "config.json").write_text(json.dumps(to_hf_config(model), indent=1), encoding="utf-8")
        publish(partial, path)
