"""Where each family keeps its facts in an HF config.json. Owns the table; refuses arithmetic.

A row says which key holds a field of :class:`ModelShapes`, what an absent key means, and what every model of the family
has in common. Adding a family is adding a row, and its name to ``config.schema.Family``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from rlrecipes.config.schema import ModelShapes
from rlrecipes.errors import Problem

type Facts = dict[str, Any]

_COMMON = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "vocab_size": "vocab_size",
    "norm_epsilon": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
}
_MOE = {
    "num_moe_experts": "num_experts",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_router_topk": "num_experts_per_tok",
}
_SHARED = {"moe_shared_expert_intermediate_size": "shared_expert_intermediate_size"}
_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Older and newer transformers write the same family's experts under different ones of these."""
_ROUTED = _MOE | {
    "moe_router_num_groups": "n_group",
    "moe_router_group_topk": "topk_group",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
}
_MLA = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
_DSA = {
    "dsa_indexer_n_heads": "index_n_heads",
    "dsa_indexer_head_dim": "index_head_dim",
    "dsa_indexer_topk": "index_topk",
    "dsa_indexer_topk_freq": "index_topk_freq",
    "dsa_indexer_skip_topk_offset": "index_skip_topk_offset",
}
_LINEAR = {
    name: name
    for name in (
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
}
_SIGMOID_ROUTER = {
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": True,
    "moe_router_enable_expert_bias": True,
}
_GATED = {"qk_layernorm": True, "layernorm_zero_centered_gamma": True, "attention_output_gate": True}


@dataclass(frozen=True, slots=True)
class _Row:
    """How one family stands in config.json.

    Attributes:
        keys: field -> key, beside the common ones.
        constants: fields that are the same for the whole family.
        absent: key -> what transformers takes for it where it is absent.
        qkv_bias: key that says whether query, key and value have a bias; None: ``constants`` say it.
        is_bias_everywhere: whether that key also gives attention's output a bias.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: str | None = "attention_bias"
    is_bias_everywhere: bool = True


_DEEPSEEK = _Row(_ROUTED | _MLA, _SIGMOID_ROUTER | {"multi_latent_attention": True, "qk_layernorm": True})
_DEEPSEEK_DSA = _Row(_ROUTED | _MLA | _DSA, _DEEPSEEK.constants, {"index_topk_freq": 1, "index_skip_topk_offset": 0})
_TABLE: Mapping[str, _Row] = {
    "llama": _Row(),
    "qwen2": _Row(constants={"add_qkv_bias": True}, qkv_bias=None),
    "qwen2_moe": _Row(
        _MOE | _SHARED, {"moe_shared_expert_gate": True}, {"qkv_bias": True}, "qkv_bias", is_bias_everywhere=False
    ),
    "qwen3": _Row(constants={"qk_layernorm": True}),
    "qwen3_moe": _Row(_MOE, {"qk_layernorm": True}),
    "qwen3_next": _Row(
        _MOE | _SHARED | _LINEAR, _GATED | {"moe_shared_expert_gate": True}, {"partial_rotary_factor": 0.25}
    ),
    "qwen3_5": _Row(_LINEAR, _GATED, {"partial_rotary_factor": 0.25}),
    "qwen3_5_moe": _Row(
        _MOE | _SHARED | _LINEAR | {"ffn_hidden_size": "moe_intermediate_size"},
        _GATED | {"moe_shared_expert_gate": True},
        {"partial_rotary_factor": 0.25},
    ),
    "glm4": _Row(
        constants={"post_self_attn_layernorm": True, "post_mlp_layernorm": True},
        absent={"partial_rotary_factor": 0.5, "attention_bias": True},
        is_bias_everywhere=False,
    ),
    "glm4_moe": _Row(
        _ROUTED | {"qk_layernorm": "use_qk_norm"},
        _SIGMOID_ROUTER,
        {"partial_rotary_factor": 0.5, "use_qk_norm": False},
        is_bias_everywhere=False,
    ),
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK_DSA,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK_DSA,
    "kimi_k2": _DEEPSEEK,
    "mimo": _Row(constants={"add_qkv_bias": True}, qkv_bias=None),
    "minimax_m2": _Row(
        _MOE | {"moe_ffn_hidden_size": "intermediate_size"},
        _SIGMOID_ROUTER | {"qk_layernorm": True},
    ),
}
FAMILIES = tuple(_TABLE)
"""HF model_types whose config.json is understood."""
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_ACTIVATIONS = ("silu", "swish")
_MAX_LAYERS = 1024


class UnreadableConfigError(ValueError):
    """A config.json that no :class:`ModelShapes` can say; the message says why."""


def read_text_config(config: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """The language model's part of a config.json, and its family.

    Args:
        config: the file's content; a vision-language model holds its language model under ``text_config``.
    """
    family, text = config.get("model_type"), config.get("text_config")
    if isinstance(text, dict):
        tied = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in config else {}
        return family, {**tied, **text}
    return (family.removesuffix("_text") if isinstance(family, str) else None), config


def to_shapes(config: Mapping[str, Any], family: str) -> ModelShapes:
    """Shapes of a model by its config.json; multi-token prediction is left out.

    Args:
        config: the language model's part of config.json.
        family: one of :data:`FAMILIES`.

    Raises:
        UnreadableConfigError: a key is missing or malformed, or the model has a trait that shapes cannot say.
    """
    try:
        facts = _read_facts(config, _TABLE[family], family)
    except (TypeError, AttributeError, KeyError) as error:
        raise UnreadableConfigError(f"a key holds another kind of value than it should ({error})") from error
    try:
        return ModelShapes(**facts)
    except ValidationError as error:
        details = error.errors()[0]
        name = str(details["loc"][0])
        key = {**_COMMON, **_TABLE[family].keys}.get(name, name)
        raise UnreadableConfigError(f"{key}: {details['msg'].lower()}") from error


def _read_facts(config: Mapping[str, Any], row: _Row, family: str) -> Facts:
    values = {**row.absent, **config}
    values["num_experts"] = next((config[key] for key in _EXPERT_KEYS if config.get(key) is not None), None)
    facts: Facts = {name: values.get(key) for name, key in {**_COMMON, **row.keys}.items()}
    facts = {name: value for name, value in facts.items() if value is not None} | dict(row.constants)
    facts.setdefault("num_query_groups", facts.get("num_attention_heads"))
    if not isinstance(facts.get("num_layers"), int) or not 0 < facts["num_layers"] <= _MAX_LAYERS:
        raise UnreadableConfigError(f"num_hidden_layers is {facts.get('num_layers')!r}")
    _refuse_unknown_traits(values, row)
    facts.setdefault("qk_layernorm", False)
    facts.setdefault("add_qkv_bias", bool(row.qkv_bias and values.get(row.qkv_bias)))
    facts["untie_embeddings_and_output_weights"] = not values.get("tie_word_embeddings", False)
    facts["norm_epsilon"] = _to_float(facts.get("norm_epsilon", 1e-6), "rms_norm_eps")
    facts.setdefault("max_position_embeddings", 2048)
    facts |= _read_heads(facts, row) | _read_rope(values, facts)
    if "num_moe_experts" in row.keys:
        facts |= _read_experts(values, facts, family)
    if "linear_num_key_heads" in row.keys:
        facts["linear_attention_freq"] = _read_linear_freq(values)
    return facts


def read_num_mtp_layers(config: Mapping[str, Any]) -> int:
    """Multi-token-prediction layers of a checkpoint.

    Args:
        config: the language model's part of config.json.
    """
    counts = [config[key] for key in _MTP_KEYS if isinstance(config.get(key), int)]
    return max(counts, default=0)


def _to_float(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnreadableConfigError(f"{key} is {value!r}, not a number")
    return float(value)


def _refuse_unknown_traits(values: Mapping[str, Any], row: _Row) -> None:
    if values.get("hidden_act", "silu") not in _ACTIVATIONS:
        raise UnreadableConfigError(f"hidden_act is {values['hidden_act']!r}; SwiGLU layers alone are known")
    if row.qkv_bias and row.is_bias_everywhere and values.get(row.qkv_bias):
        raise UnreadableConfigError(f"{row.qkv_bias} gives attention's output a bias, which shapes cannot say")
    if values.get("mlp_bias"):
        raise UnreadableConfigError("mlp_bias gives the MLP a bias, which shapes cannot say")
    if values.get("use_sliding_window") or "sliding_attention" in (values.get("layer_types") or ()):
        raise UnreadableConfigError("some layers attend to a window only, which shapes cannot say")
    has_shared = "shared" in (values.get("indexer_types") or ())
    if values.get("index_topk_pattern") or (has_shared and values.get("index_topk_freq", 1) == 1):
        raise UnreadableConfigError("its indexers are shared at no regular interval, which shapes cannot say")


def _read_heads(facts: Facts, row: _Row) -> Facts:
    """Key and value heads and their width; MLA has as many as query heads, whose width is the part without position."""
    if row.constants.get("multi_latent_attention"):
        return {"num_query_groups": facts.get("num_attention_heads"), "kv_channels": facts.get("qk_head_dim")}
    heads, width = facts.get("num_attention_heads"), facts.get("hidden_size")
    if "kv_channels" in facts or not isinstance(heads, int) or not isinstance(width, int) or heads < 1:
        return {}
    return {"kv_channels": width // heads}


def _read_rope(values: Mapping[str, Any], facts: Facts) -> Facts:
    """RoPE, from where transformers 5 keeps it (``rope_parameters``) or where earlier ones did."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UnreadableConfigError(f"rope_parameters is {rope!r}, not a mapping")
    base = values.get("rope_theta") or rope.get("rope_theta") or 10000.0
    found: Facts = {"rotary_base": _to_float(base, "rope_theta")}
    if not facts.get("multi_latent_attention"):
        found["rotary_percent"] = _read_rotary_percent(values, rope, facts)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", "mrope"):
        return found
    if kind not in ("llama3", "yarn", "deepseek_yarn"):
        raise UnreadableConfigError(f"its rotary embedding is scaled by {kind!r}; llama3 and yarn are known")
    found["rotary_scaling_factor"] = _to_float(rope.get("factor", 1.0), "rope_scaling.factor")
    if rope.get("original_max_position_embeddings") is not None:
        found["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    if kind == "llama3":
        return found | {"use_rope_scaling": True}
    scales = [name for name in ("mscale", "mscale_all_dim") if rope.get(name)]
    return found | {name: _to_float(rope[name], f"rope_scaling.{name}") for name in scales} | {"rope_type": "yarn"}


def _read_rotary_percent(values: Mapping[str, Any], rope: Mapping[str, Any], facts: Facts) -> float:
    width = facts.get("kv_channels")
    if isinstance(values.get("rotary_dim"), int) and isinstance(width, int) and width:
        return float(values["rotary_dim"] / width)
    share = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    return _to_float(1.0 if share is None else share, "partial_rotary_factor")


def _read_experts(values: Mapping[str, Any], facts: Facts, family: str) -> Facts:
    found: Facts = {"first_dense_layers": _read_dense_layers(values, facts["num_layers"])}
    shared, width = values.get("n_shared_experts"), facts.get("moe_ffn_hidden_size")
    if isinstance(shared, int) and isinstance(width, int) and shared:
        found["moe_shared_expert_intermediate_size"] = shared * width
    if facts.get("moe_router_num_groups") == 1:  # one group is none
        found |= {"moe_router_num_groups": None, "moe_router_group_topk": None}
    scaling = facts.get("moe_router_topk_scaling_factor")
    if scaling is not None:
        scaling = _to_float(scaling, "routed_scaling_factor")
        found["moe_router_topk_scaling_factor"] = None if scaling == 1 else scaling
    if family == "qwen2_moe":  # weights of a softmax over all experts, not made to sum to 1
        found["moe_router_pre_softmax"] = not values.get("norm_topk_prob", False)
    return found


def _read_dense_layers(values: Mapping[str, Any], num_layers: int) -> int:
    """Dense layers, which must all stand before the first MoE layer."""
    kinds = values.get("mlp_layer_types")
    if kinds is None:
        leading = min(values.get("first_k_dense_replace") or 0, num_layers)
        dense = set(values.get("mlp_only_layers") or range(leading))
        step = max(values.get("decoder_sparse_step") or 1, values.get("moe_layer_freq") or 1)
        kinds = ["dense" if i in dense or (i + 1) % step else "sparse" for i in range(num_layers)]
    count = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if "dense" in kinds[count:]:
        raise UnreadableConfigError("a dense layer stands behind a MoE layer, which shapes cannot say")
    return count


def _read_linear_freq(values: Mapping[str, Any]) -> int:
    kinds = values.get("layer_types")
    if kinds is None:
        return int(values.get("full_attention_interval") or 4)
    freq = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    if any((kind == "full_attention") != ((i + 1) % freq == 0) for i, kind in enumerate(kinds)):
        raise UnreadableConfigError("layer_types has full attention at no regular interval, which shapes cannot say")
    return freq


_NEEDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("num_moe_experts", ("moe_ffn_hidden_size", "moe_router_topk")),
    ("moe_router_num_groups", ("moe_router_group_topk",)),
    ("multi_latent_attention", ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")),
    ("dsa_indexer_n_heads", ("dsa_indexer_head_dim", "dsa_indexer_topk", "kv_lora_rank")),
    ("linear_attention_freq", tuple(_LINEAR)),
)


def find_shape_problems(shapes: ModelShapes) -> list[Problem]:
    """Facts that are missing beside others, or contradict them.

    Args:
        shapes: as a recipe says them.
    """
    problems = [
        Problem(f"model.shapes.{name}", f"has no value, but {reason} is set", "give it, or set that to null")
        for reason, names in _NEEDS
        for name in names
        if getattr(shapes, reason) and getattr(shapes, name) is None
    ]
    experts, topk = shapes.num_moe_experts, shapes.moe_router_topk
    if experts is not None and topk is not None and topk > experts:
        problems.append(Problem("model.shapes.moe_router_topk", f"is {topk}; there are {experts} experts", "lower it"))
    if shapes.first_dense_layers > shapes.num_layers:
        problem = f"is {shapes.first_dense_layers}; the model has {shapes.num_layers} layers"
        problems.append(Problem("model.shapes.first_dense_layers", problem, "lower it"))
    return problems


TRAINABLE_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
_UNTRAINABLE = {
    "use_rope_scaling": "scaled rotary embeddings",
    "first_dense_layers": "dense layers before those with experts",
    "moe_shared_expert_intermediate_size": "shared experts",
    "moe_router_enable_expert_bias": "a bias of the router",
    "moe_router_num_groups": "groups of experts",
    "moe_router_topk_scaling_factor": "scaled expert weights",
    "multi_latent_attention": "latent attention",
    "linear_attention_freq": "gated delta nets",
    "attention_output_gate": "attention's output gate",
    "post_self_attn_layernorm": "norms behind attention",
    "post_mlp_layernorm": "norms behind the MLP",
    "layernorm_zero_centered_gamma": "norms around 1",
    "dsa_indexer_n_heads": "sparse attention",
    "mtp_num_layers": "multi-token prediction",
}


def find_untrainable(family: str, shapes: ModelShapes) -> str | None:
    """What the trainer cannot build of a model yet; None: it can build it.

    Such a model is resolved and priced all the same; only a run is refused.

    Args:
        family: HF model_type.
        shapes: its facts.
    """
    traits = [trait for name, trait in _UNTRAINABLE.items() if getattr(shapes, name)]
    if shapes.moe_router_score_function != "softmax":
        traits.append("sigmoid scores of experts")
    if shapes.rope_type != "rope":
        traits.append("YaRN")
    if shapes.rotary_percent != 1:
        traits.append("rotary embeddings of part of a head")
    if family not in TRAINABLE_FAMILIES:
        return f"family {family}" + (f" ({', '.join(traits)})" if traits else "")
    return ", ".join(traits) or None
