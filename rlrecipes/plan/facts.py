"""Facts of a model: its shapes from config.json or from the recipe, and what follows from them by arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlrecipes.config.schema import ModelConfig, ModelShapes
from rlrecipes.errors import Problem

NUM_SPECIAL_TOKENS = 3
"""Padding, end of sequence and unknown, which every tokenizer made from an alphabet holds."""


def read_shapes(model: ModelConfig, problems: list[Problem]) -> tuple[ModelShapes | None, bool]:
    """Settle the shapes of the trained model.

    Args:
        model: the recipe's model section.
        problems: what is wrong is appended.

    Returns:
        The shapes (None when they cannot be known) and whether the weights are to be made.
    """
    if model.path is None:
        if model.shapes is None or model.alphabet is None:
            fix = "give model.path=<HF directory>, or both model.shapes and model.alphabet"
            problems.append(Problem("model", "has neither a path nor shapes with an alphabet", fix))
            return None, True
        needed = len(set(model.alphabet)) + NUM_SPECIAL_TOKENS
        if needed > model.shapes.vocab_size:
            fix = f"raise it to {needed}, or shorten model.alphabet"
            problems.append(
                Problem("model.shapes.vocab_size", f"is {model.shapes.vocab_size}; the alphabet needs {needed}", fix)
            )
        return model.shapes, True
    config = _read_config(Path(model.path), problems)
    if config is None:
        return None, False
    family = config.get("model_type")
    if family != model.family:
        fix = f"write model.family={family}" if family in ("qwen2", "qwen3", "llama") else "use a supported family"
        problems.append(Problem("model.family", f"is {model.family!r}; {model.path}/config.json says {family!r}", fix))
        return None, False
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        problem = f"{model.path}/config.json scales its rotary embedding ({rope_type}); the trainer does not yet"
        problems.append(Problem("model.path", problem, "use a model without rope scaling"))
        return None, False
    shapes = _from_hf(config, model.family)
    for name in ModelShapes.model_fields if model.shapes else ():
        ours, theirs = getattr(model.shapes, name), getattr(shapes, name)
        if ours != theirs:
            fix = f"write {theirs}, or model.shapes=null"
            problems.append(Problem(f"model.shapes.{name}", f"is {ours}; {model.path}/config.json says {theirs}", fix))
    return shapes, False


def _read_config(path: Path, problems: list[Problem]) -> dict[str, Any] | None:
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = f"{file} cannot be read ({error.strerror})"
        fix = "name an existing HF directory; a recipe that starts from another run's weights needs that run first"
        problems.append(Problem("model.path", reason, fix))
        return None
    except ValueError as error:
        problems.append(Problem("model.path", f"{file} is not JSON: {error}", "mend or replace the file"))
        return None
    if not isinstance(config, dict) or "hidden_size" not in config:
        problems.append(Problem("model.path", f"{file} describes no language model", "name a model's own directory"))
        return None
    return config


def _from_hf(config: dict[str, Any], family: str) -> ModelShapes:
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    return ModelShapes(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads") or heads,
        kv_channels=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        rotary_base=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=config.get("max_position_embeddings", 2048),
        qk_layernorm=family == "qwen3",
        add_qkv_bias=family == "qwen2",
        untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", False),
    )


def compute_num_parameters(shapes: ModelShapes) -> int:
    """Parameters of a dense decoder, embedding included, tied weights once.

    Args:
        shapes: the model.
    """
    width, head = shapes.hidden_size, shapes.kv_channels
    query, key = shapes.num_attention_heads * head, shapes.num_query_groups * head
    attention = width * (query + 2 * key) + query * width
    attention += (query + 2 * key) * shapes.add_qkv_bias + 2 * head * shapes.qk_layernorm
    layer = attention + 3 * width * shapes.ffn_hidden_size + 2 * width
    embeddings = shapes.vocab_size * width * (1 + shapes.untie_embeddings_and_output_weights)
    return shapes.num_layers * layer + embeddings + width


def compute_flops_per_token(shapes: ModelShapes) -> float:
    """Floating-point operations of forward and backward per token: 6 per weight that multiplies.

    The embedding lookup multiplies nothing, the output layer does; attention's quadratic part is left out.

    Args:
        shapes: the model.
    """
    embedding = shapes.vocab_size * shapes.hidden_size
    lookup = embedding if shapes.untie_embeddings_and_output_weights else 0
    return 6.0 * (compute_num_parameters(shapes) - lookup)
