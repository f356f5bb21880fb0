from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlrecipes.config.schema import ModelShapes
from rlrecipes.engines.megatron.hf_directory import create_partial, publish
from rlrecipes.engines.megatron.initial import run_write_random_model
from rlrecipes.errors import CheckpointError
from rlrecipes.plan.nodes import ModelNode


def build_node(family: str = "qwen3", *, is_tied: bool = True, seed: int = 0, num_layers: int = 2) -> ModelNode:
    shapes = ModelShapes(
        num_layers=num_layers,
        hidden_size=24,
        ffn_hidden_size=40,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        vocab_size=33,
        rotary_base=20000.0,
        norm_epsilon=1e-5,
        max_position_embeddings=64,
        qk_layernorm=family == "qwen3",
        add_qkv_bias=family == "qwen2",
        untie_embeddings_and_output_weights=not is_tied,
    )
    return ModelNode(
        name="m",
        family=family,  # type: ignore[arg-type]
        path="",
        is_random=True,
        init_seed=seed,
        alphabet=None,
        shapes=shapes,
        dtype="float32",
        num_parameters=1,
        flops_per_token=1.0,
    )


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in path.glob("*.safetensors") for name, t in load_file(file).items()}


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_transformers_loads_what_is_written(family: str, is_tied: bool, tmp_path: Path) -> None:
    node = build_node(family, is_tied=is_tied)
    run_write_random_model(node, tmp_path / "hf")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    weights = read_weights(tmp_path / "hf")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in weights.items())
    assert model.config.rope_parameters["rope_theta"] == 20000.0
    assert model.config.tie_word_embeddings is is_tied
    assert ("lm_head.weight" in weights) is not is_tied
    assert weights["model.embed_tokens.weight"].std() == pytest.approx(0.02, rel=0.2)


def test_experts_are_written_one_by_one(tmp_path: Path) -> None:
    dense = build_node("qwen3", is_tied=False)
    experts = {"num_moe_experts": 4, "moe_ffn_hidden_size": 12, "moe_router_topk": 2}
    shapes = dense.shapes.model_copy(update=experts)
    node = dense.model_copy(update={"family": "qwen3_moe", "shapes": shapes})
    run_write_random_model(node, tmp_path / "hf")
    weights = read_weights(tmp_path / "hf")
    gate, up = (weights[f"model.layers.1.mlp.experts.3.{name}_proj.weight"] for name in ("gate", "up"))
    assert gate.shape == (12, 24) and not torch.equal(gate, up)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.norm_topk_prob and model.config.num_experts_per_tok == 2
    torch.testing.assert_close(model.model.layers[1].mlp.experts.gate_up_proj[3], torch.cat([gate, up]), rtol=0, atol=0)


def test_weights_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    for name, node in {
        "first": build_node(),
        "again": build_node(),
        "deeper": build_node(num_layers=3),
        "seeded": build_node(seed=1),
    }.items():
        run_write_random_model(node, tmp_path / name)
    first, again, deeper, seeded = (read_weights(tmp_path / n) for n in ("first", "again", "deeper", "seeded"))
    assert all(torch.equal(first[name], again[name]) and torch.equal(first[name], deeper[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], seeded["model.embed_tokens.weight"])


def test_a_tokenizer_beside_it_stays_and_nothing_else_is_left(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    (tmp_path / "hf" / "model.safetensors").write_text("old")
    run_write_random_model(build_node(), tmp_path / "hf")
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "hf" / "model.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_directory_that_cannot_be_made_is_told() -> None:
    with pytest.raises(CheckpointError, match="/proc/nowhere"):
        run_write_random_model(build_node(), Path("/proc/nowhere/hf"))


def test_what_a_killed_run_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "hf"
    (create_partial(path) / "half").write_text("")
    partial = create_partial(path)
    (partial / "whole").write_text("")
    publish(partial, path)
    assert [file.name for file in path.iterdir()] == ["whole"]
