"""What a model directory's config.json says, as one record. Owns its reading; refuses what the engine cannot compute.

Families: Llama, Qwen2 (bias on q, k, v) and Qwen3 (normalised q and k), dense, with default, linear or llama3 rotary
embeddings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlrecipes.errors import EngineError

FAMILIES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """Shapes and constants of a dense decoder.

    Attributes:
        name: the class name in ``architectures``.
        model_type: as config.json has it.
        vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: shapes.
        norm_eps: of every RMSNorm.
        has_qkv_bias, has_output_bias, has_mlp_bias, has_qk_norm, is_tied: what is there beside the matrices.
        context_length: most tokens of prompt and answer together.
        inverse_frequencies: [head_dim / 2] rotary angles per position, scaling applied.
        eos_token_ids: tokens that end an answer.
        dtype: name of the torch dtype that the weights were saved in.
        sampling_defaults: of generation_config.json; used by the chat and completion endpoints only.
    """

    name: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    is_tied: bool
    context_length: int
    inverse_frequencies: tuple[float, ...]
    eos_token_ids: frozenset[int]
    dtype: str
    sampling_defaults: Mapping[str, float]


def read_architecture(model_path: Path) -> Architecture:
    """Read config.json (and generation_config.json) of a Hugging Face model directory.

    Args:
        model_path: the directory.

    Raises:
        EngineError: it is missing, is not JSON, lacks a key, or describes a model the engine does not know.
    """
    config = _read_json(model_path / "config.json", required=True)
    generation = _read_json(model_path / "generation_config.json", required=False)
    try:
        return _to_architecture(config, generation, str(model_path / "config.json"))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(
            str(model_path / "config.json"),
            f"key {error} is missing or malformed",
            "write the directory with transformers' save_pretrained",
        ) from error


def _read_json(path: Path, required: bool) -> dict[str, Any]:
    if not path.is_file():
        if not required:
            return {}
        raise EngineError(str(path), "no such file", "give --model-path a directory with config.json and *.safetensors")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise EngineError(
            str(path), f"not JSON: {error}", "write it again with transformers' save_pretrained"
        ) from None
    if not isinstance(content, dict):
        raise EngineError(str(path), "not a JSON object", "write it again with transformers' save_pretrained")
    return content


def _to_architecture(config: dict[str, Any], generation: dict[str, Any], where: str) -> Architecture:
    name = (config.get("architectures") or ["none"])[0]
    family = FAMILIES.get(name)
    _refuse_unknown(config, name, where)
    num_heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // num_heads)
    attention_bias = bool(config.get("attention_bias", False))
    return Architecture(
        name=name,
        model_type=str(config.get("model_type", family)),
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        norm_eps=float(config["rms_norm_eps"]),
        has_qkv_bias=family == "qwen2" or attention_bias,
        has_output_bias=family != "qwen2" and attention_bias,
        has_mlp_bias=bool(config.get("mlp_bias", False)),
        has_qk_norm=family == "qwen3",
        is_tied=bool(config.get("tie_word_embeddings", False)),
        context_length=_compute_context_length(config),
        inverse_frequencies=_compute_inverse_frequencies(config, head_dim, where),
        eos_token_ids=_to_ids(config.get("eos_token_id")) | _to_ids(generation.get("eos_token_id")),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        sampling_defaults={
            key: generation[key]
            for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            if isinstance(generation.get(key), int | float)
        },
    )


def _refuse_unknown(config: dict[str, Any], name: str, where: str) -> None:
    if name not in FAMILIES:
        raise EngineError(where, f"architecture {name!r} is not supported", f"use one of {', '.join(FAMILIES)}")
    if config.get("hidden_act", "silu") != "silu":
        raise EngineError(where, f"hidden_act {config['hidden_act']!r} is not supported", "use silu")
    if config.get("use_sliding_window"):
        raise EngineError(where, "sliding-window attention is not supported", "set use_sliding_window to false")


def _to_ids(value: object) -> frozenset[int]:
    if isinstance(value, int):
        return frozenset((value,))
    return frozenset(value) if isinstance(value, list) else frozenset()


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings under their newest name; older files spread them over rope_theta and rope_scaling."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    parameters.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    return parameters


def _compute_context_length(config: dict[str, Any]) -> int:
    rope = _rope_parameters(config)
    factor = float(rope.get("factor", 1.0))
    if rope["rope_type"] == "llama3" or "original_max_position_embeddings" in rope:
        factor = 1.0
    return int(config["max_position_embeddings"] * factor)


def _compute_inverse_frequencies(config: dict[str, Any], head_dim: int, where: str) -> tuple[float, ...]:
    """Angles theta^(-2i/d) (Su et al. 2021), stretched as the rope type says (llama3: wavelength-dependent)."""
    rope = _rope_parameters(config)
    plain = [float(rope["rope_theta"]) ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if rope["rope_type"] == "default":
        return tuple(plain)
    if rope["rope_type"] == "linear":
        return tuple(angle / float(rope["factor"]) for angle in plain)
    if rope["rope_type"] != "llama3":
        raise EngineError(where, f"rope type {rope['rope_type']!r} is not supported", "use default, linear or llama3")
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    original = float(rope["original_max_position_embeddings"])
    scaled = []
    for angle in plain:
        turns = original * angle / (2 * math.pi)
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        scaled.append((1 - smooth) * angle / factor + smooth * angle)
    return tuple(scaled)
