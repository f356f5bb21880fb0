"""Facts of every family: what transformers writes is read back, and counts what transformers builds."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import get_args

import pytest
from hf_configs import STAND_INS, build_hf_config, to_config_json

from rlrecipes.config.compose import compose
from rlrecipes.config.schema import Family, ModelConfig
from rlrecipes.errors import ConfigError
from rlrecipes.plan.facts import find_obstacles, read_shapes
from rlrecipes.plan.families import (
    FAMILIES,
    UnreadableConfigError,
    find_shape_problems,
    find_untrainable,
    to_shapes,
)
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.parameters import compute_num_active_parameters, compute_num_parameters
from rlrecipes.plan.resolve import resolve

CONF = Path(__file__).parents[3] / "conf" / "model"
NAMES = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem not in ("hf", "qwen3_tiny"))
PUBLISHED = {  # billions, all and active, as their model cards say
    "deepseek_r1": (671, 37),
    "glm4_32b": (32.6, None),
    "glm4_5_106b_a12b": (106, 12),
    "glm4_5_355b_a32b": (355, 32),
    "glm4_7_30b_a3b": (30, 3.9),
    "glm4_9b": (9.4, None),
    "glm5_744b_a40b": (744, 40),
    "kimi_k2": (1026, 32),
    "llama3_1_8b": (8.03, None),
    "llama3_2_3b": (3.21, None),
    "mimo_7b": (7.83, None),
    "minimax_m2": (229, 10),
    "moonlight": (16, 3),
    "qwen2_5_0_5b": (0.49, None),
    "qwen2_5_1_5b": (1.54, None),
    "qwen2_5_3b": (3.09, None),
    "qwen2_5_7b": (7.61, None),
    "qwen2_5_32b": (32.5, None),
    "qwen3_0_6b": (0.6, None),
    "qwen3_14b": (14.8, None),
    "qwen3_235b_a22b": (235, 22),
    "qwen3_30b_a3b": (30.5, 3.3),
    "qwen3_32b": (32.8, None),
    "qwen3_4b": (4.0, None),
    "qwen3_8b": (8.2, None),
    "qwen3_next_80b_a3b": (80, 3.9),
    "smollm2_135m": (0.135, None),
}


@functools.cache
def load(name: str) -> ModelConfig:
    return compose([f"model={name}"]).config.model


def shrink(model: ModelConfig) -> ModelConfig:
    layers = max(model.shapes.first_dense_layers, model.shapes.linear_attention_freq or 0) + 3
    return model.model_copy(update={"shapes": model.shapes.model_copy(update={"num_layers": layers})})


def write(model: ModelConfig, path: Path, **changes) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(to_config_json(model) | changes))
    return model.model_copy(update={"path": str(path)})


def test_every_family_has_a_file_and_a_row():
    assert set(get_args(Family)) == set(FAMILIES)
    assert {load(name).family for name in NAMES} == set(FAMILIES) - {"qwen2_moe"}


@pytest.mark.parametrize("name", NAMES)
def test_what_transformers_writes_is_read_back(name, tmp_path):
    model = load(name)
    assert find_shape_problems(model.shapes) == []
    held = {"num_nextn_predict_layers": 1} if model.shapes.mtp_num_layers else {}
    problems = []
    shapes, is_random = read_shapes(write(model, tmp_path, **held), problems)
    assert problems == []
    assert (shapes, is_random) == (model.shapes, False)


@pytest.mark.parametrize(
    "name", ["qwen3_8b", "qwen3_30b_a3b", "deepseek_v3_2", "glm4_9b", "qwen3_5_0_8b", "minimax_m2"]
)
def test_a_difference_names_its_field(name, tmp_path):
    model = write(load(name), tmp_path)
    for field, value in {"num_layers": 99, "rotary_base": 7.0, "moe_router_topk": 1, "v_head_dim": 3}.items():
        if getattr(model.shapes, field) is None:
            continue
        problems = []
        changed = model.model_copy(update={"shapes": model.shapes.model_copy(update={field: value})})
        read_shapes(changed, problems)
        assert [problem.where for problem in problems] == [f"model.shapes.{field}"]
        assert str(getattr(model.shapes, field)).removesuffix(".0") in problems[0].fix


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(STAND_INS)))
def test_parameters_are_those_that_transformers_builds(family):
    import torch
    from transformers import AutoModelForCausalLM

    model = shrink(next((m for m in map(load, NAMES) if m.family == family), None) or qwen2_moe())
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(build_hf_config(model))
    count = sum(parameter.numel() for parameter in built.parameters())
    if family == "minimax_m2":  # it normalises all heads at once; Megatron's norm is one head wide
        s = model.shapes
        count -= s.num_layers * (s.num_attention_heads + s.num_query_groups - 2) * s.kv_channels
    assert compute_num_parameters(model.shapes) == count


def qwen2_moe() -> ModelConfig:
    """Qwen1.5-MoE-A2.7B; no file describes it."""
    shapes = load("qwen3_30b_a3b").shapes.model_copy(
        update={
            "num_layers": 24,
            "ffn_hidden_size": 5632,
            "num_attention_heads": 16,
            "num_query_groups": 16,
            "moe_ffn_hidden_size": 1408,
            "moe_router_topk": 4,
            "num_moe_experts": 60,
            "moe_shared_expert_intermediate_size": 5632,
            "moe_shared_expert_gate": True,
            "moe_router_pre_softmax": True,
            "qk_layernorm": False,
            "add_qkv_bias": True,
        }
    )
    return load("qwen3_30b_a3b").model_copy(update={"family": "qwen2_moe", "shapes": shapes})


def test_qwen2_moe_is_read_back():
    model = qwen2_moe()
    assert to_shapes(to_config_json(model), "qwen2_moe") == model.shapes


@pytest.mark.parametrize(("name", "figures"), PUBLISHED.items(), ids=PUBLISHED)
def test_totals_are_the_published_ones(name, figures):
    shapes, (total, active) = load(name).shapes, figures
    assert compute_num_parameters(shapes) / 1e9 == pytest.approx(total, rel=0.015)
    if active is not None:  # cards count embeddings or leave them out
        embeddings = shapes.vocab_size * shapes.hidden_size * 2 / 1e9
        found = compute_num_active_parameters(shapes) / 1e9
        assert found - embeddings - 0.6 <= active <= found + 0.5


def test_old_files_of_transformers_4_are_read():
    config = {
        "model_type": "deepseek_v3",
        "rope_theta": 10000,
        "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32},
        "n_routed_experts": 256,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
    }
    model = load("deepseek_r1")
    data = {k: v for k, v in to_config_json(model).items() if not k.startswith(("rope", "num_local"))}
    config["rope_scaling"]["original_max_position_embeddings"] = 4096
    assert to_shapes(data | config, "deepseek_v3") == model.shapes
    old = {k: v for k, v in to_config_json(load("minimax_m2")).items() if not k.startswith("rope")}
    assert to_shapes(old | {"rope_theta": 5e6, "rotary_dim": 64}, "minimax_m2") == load("minimax_m2").shapes


def test_a_vision_model_is_its_language_model(tmp_path):
    model = load("qwen3_5_35b_a3b_vl")
    text = to_config_json(model) | {"model_type": "qwen3_5_moe_text"}
    outer = {"model_type": "qwen3_5_moe", "vision_config": {"hidden_size": 3}, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    problems = []
    assert read_shapes(model.model_copy(update={"path": str(tmp_path)}), problems) == (model.shapes, False)
    assert problems == []


def test_prediction_layers_are_a_choice_within_the_checkpoint(tmp_path):
    model = write(load("deepseek_r1"), tmp_path, num_nextn_predict_layers=1)

    def read(count):
        problems = []
        chosen = model.model_copy(update={"shapes": model.shapes.model_copy(update={"mtp_num_layers": count})})
        return read_shapes(chosen, problems)[0].mtp_num_layers, [problem.where for problem in problems]

    assert read(None) == (None, [])
    assert read(1) == (1, [])
    assert read(2)[1] == ["model.shapes.mtp_num_layers"]


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("qwen3_8b", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3_8b", {"attention_bias": True}, "attention_bias"),
        ("qwen3_8b", {"num_hidden_layers": "36"}, "num_hidden_layers"),
        ("qwen3_8b", {"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ("deepseek_v3_2", {"mlp_layer_types": {}}, "kind of value"),
        ("qwen3_8b", {"num_attention_heads": None}, "num_attention_heads"),
        ("qwen3_8b", {"rms_norm_eps": "small"}, "rms_norm_eps"),
        ("qwen3_8b", {"rope_parameters": [1]}, "rope_parameters"),
        ("qwen3_8b", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "longrope"),
        ("qwen2_5_7b", {"use_sliding_window": True}, "window"),
        ("qwen3_30b_a3b", {"mlp_only_layers": [5]}, "dense layer"),
        ("qwen3_30b_a3b", {"decoder_sparse_step": 2}, "dense layer"),
        ("qwen3_30b_a3b", {"mlp_only_layers": 5}, "kind of value"),
        ("qwen3_next_80b_a3b", {"layer_types": ["full_attention", "linear_attention"]}, "interval"),
        ("glm5_744b_a40b", {"index_topk_pattern": "FSSF"}, "indexers"),
    ],
)
def test_what_shapes_cannot_say_is_refused(name, changes, said):
    model = load(name)
    with pytest.raises(UnreadableConfigError, match=said):
        to_shapes(to_config_json(model) | changes, model.family)


def test_facts_that_lack_others_are_told():
    shapes = load("deepseek_r1").shapes
    lacking = shapes.model_copy(update={"kv_lora_rank": None, "moe_router_topk": None, "moe_router_group_topk": None})
    wheres = {problem.where for problem in find_shape_problems(lacking)}
    names = ("kv_lora_rank", "moe_router_topk", "moe_router_group_topk")
    assert wheres == {f"model.shapes.{name}" for name in names}
    wrong = shapes.model_copy(update={"moe_router_topk": 300, "first_dense_layers": 62})
    assert {p.where for p in find_shape_problems(wrong)} == {
        "model.shapes.moe_router_topk",
        "model.shapes.first_dense_layers",
    }


def test_every_family_is_planned_and_only_runs_are_refused():
    hosts = (HostNode(name="here", num_cpus=2, num_gpus=0, memory_bytes=1 << 34),)

    def plan(*overrides):
        recipe = compose(overrides)
        return resolve(recipe.config, hosts, recipe.origins)

    for name in ("qwen3_8b", "llama3_1_8b", "deepseek_v3_2", "qwen3_5_35b_a3b", "glm4_9b"):
        made = plan(f"model={name}")
        obstacles = {problem.where for problem in find_obstacles(made.model)}
        assert "model.path" in obstacles
        assert ("model.family" in obstacles) == (find_untrainable(made.model.family, made.model.shapes) is not None)
        assert all(any(note.startswith(where) for note in made.notes) for where in obstacles)
    assert find_obstacles(plan().model) == []
    assert find_untrainable("qwen3", load("qwen3_8b").shapes) is None
    with pytest.raises(ConfigError, match="neither a path nor shapes"):
        plan("model.shapes=null")
    with pytest.raises(ConfigError, match="num_moe_experts is set"):
        plan("+model.shapes.num_moe_experts=4")
