"""Widths that 8-bit kernels take: each rank's part must be whole blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlrecipes.config.schema import ModelShapes, RunConfig
from rlrecipes.plan.rules.engines import compute_moe_tp, compute_tp, list_trained
from rlrecipes.plan.rules.rule import GROUP, Found, rule, shape_rule

_BLOCK_OF_RECIPE = {"blockwise": 128, "mxfp8": 32}
"""Megatron's fp8_recipe -> block; the others scale whole tensors, whose rows must be 16 bytes."""
_BLOCK_OF_QUANTIZATION = {"fp8": 16, "w8a8_fp8": 16, "modelopt_fp8": 16, "mxfp8": 32}
"""SGLang's quantization -> block, where the checkpoint does not name one."""


@shape_rule("parallel.megatron.fp8", fix="lower TP, use another fp8_recipe, or no fp8")
def trainer_parts_are_whole_blocks(config: RunConfig, shapes: ModelShapes) -> Iterator[Found]:
    """Megatron's blockwise recipe scales 128 x 128 weights, mxfp8 32 in a row; the others take rows of 16 bytes."""
    parallel = config.parallel
    if not parallel.megatron.get("fp8"):
        return
    tp = parallel.tensor_model_parallel_size
    block = _BLOCK_OF_RECIPE.get(str(parallel.megatron.get("fp8_recipe")), 16)
    for what, width in _list_parts(shapes, tp, tp, parallel.expert_tensor_parallel_size or tp):
        if width % block:
            yield Found("parallel.megatron.fp8", f"scales blocks of {block}; a rank's part of {what} is {width}")


@shape_rule(f"{GROUP}.gpus_per_engine", fix="lower TP, raise expert_parallel_size, or serve other weights")
def engine_parts_are_whole_blocks(config: RunConfig, shapes: ModelShapes) -> Iterator[Found]:
    """Quantised weights are read in whole blocks: those of the checkpoint, or the 16 bytes of SGLang's kernels."""
    blocks = _read_block(config.model.path)
    for where, group in list_trained(config):
        block = blocks or _BLOCK_OF_QUANTIZATION.get(str(group.sglang.get("quantization")), 1)
        tp = compute_tp(group)
        attention = max(1, tp // group.attention_data_parallel_size)
        for what, width in _list_parts(shapes, attention, tp, compute_moe_tp(group)):
            if width % block:
                problem = f"is {group.gpus_per_engine}: blocks are {block} wide, a rank's part of {what} is {width}"
                yield Found(f"{where}.gpus_per_engine", problem)


@rule(f"{GROUP}.sglang.quantization", "model.path", fix="serve and train unquantised weights")
def synced_weights_are_held_as_sent(config: RunConfig) -> Iterator[Found]:
    """Syncs send model.dtype; an engine that quantised its first weights would put new ones under their old scales."""
    for where, group in list_trained(config):
        quantization = group.sglang.get("quantization")
        if quantization not in (None, "unquant"):
            yield Found(f"{where}.sglang.quantization", f"is {quantization!r}; weight syncs send {config.model.dtype}")
    if _read_quantization(config.model.path):
        problem = f"{config.model.path} holds quantised weights; trainer and weight syncs have {config.model.dtype}"
        yield Found("model.path", problem, "name a directory of unquantised weights")


def _list_parts(shapes: ModelShapes, attention: int, tp: int, moe_tp: int) -> Iterator[tuple[str, int]]:
    """What one rank holds of each width that is split."""
    yield "hidden_size", shapes.hidden_size
    if shapes.multi_latent_attention and shapes.v_head_dim is not None:
        yield "the value heads", shapes.num_attention_heads * shapes.v_head_dim // attention
    else:
        yield "the query heads", shapes.num_attention_heads * shapes.kv_channels // attention
        yield "the key heads", max(1, shapes.num_query_groups // attention) * shapes.kv_channels
    if shapes.num_moe_experts is None or shapes.first_dense_layers:
        yield "ffn_hidden_size", shapes.ffn_hidden_size // tp
    if shapes.moe_ffn_hidden_size is not None:
        yield "moe_ffn_hidden_size", shapes.moe_ffn_hidden_size // moe_tp


def _read_quantization(path: str | None) -> Mapping[str, Any]:
    """What config.json says of it; empty where there is none or the file cannot be read, which is told elsewhere."""
    try:
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8")) if path is not None else {}
    except (OSError, ValueError):
        return {}
    quantization = config.get("quantization_config") if isinstance(config, Mapping) else None
    return quantization if isinstance(quantization, Mapping) else {}


def _read_block(path: str | None) -> int | None:
    """Block of a quantised checkpoint; None where it has none."""
    sizes = _read_quantization(path).get("weight_block_size")
    return max(sizes) if isinstance(sizes, list) and sizes and all(type(size) is int for size in sizes) else None


RULES = (trainer_parts_are_whole_blocks, engine_parts_are_whole_blocks, synced_weights_are_held_as_sent)
