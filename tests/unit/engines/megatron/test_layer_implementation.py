"""Which layers a recipe gets, and what it is told where they are not to be had."""

from __future__ import annotations

from typing import Any

import pytest

from rlrecipes.config.compose import compose
from rlrecipes.engines.megatron.configuration import build_transformer_config
from rlrecipes.errors import ConfigError
from rlrecipes.plan import packages
from rlrecipes.plan.nodes import HostNode, ModelNode, TrainerNode
from rlrecipes.plan.resolve import resolve

WHERE = "parallel.megatron.transformer_impl"


@pytest.fixture(scope="module")
def nodes() -> tuple[ModelNode, TrainerNode]:
    recipe = compose()
    hosts = (HostNode(name="here", num_cpus=2, num_gpus=0, memory_bytes=1 << 34),)
    plan = resolve(recipe.config, hosts, recipe.origins)
    return plan.model, plan.trainer


def build(nodes: tuple[ModelNode, TrainerNode], device: str, **native: Any) -> Any:
    model, trainer = nodes
    return build_transformer_config(model, trainer.model_copy(update={"device": device, "megatron": native}))


@pytest.mark.parametrize(
    ("device", "native", "where", "problem", "fix"),
    [
        ("cuda", {}, WHERE, "Transformer Engine is not installed", "set local"),
        ("cuda", {"transformer_impl": "transformer_engine"}, WHERE, "is not installed", "install transformer-engine"),
        ("cpu", {"transformer_impl": "transformer_engine"}, WHERE, "needs a GPU", "topology.device=cuda"),
        ("cuda", {"transformer_impl": "inference_optimized"}, WHERE, "cannot train", "transformer_engine or local"),
        (
            "cuda",
            {"transformer_impl": "local", "gradient_accumulation_fusion": True},
            "parallel.megatron.gradient_accumulation_fusion",
            "APEX",
            "set it false",
        ),
    ],
)
def test_layers_that_are_not_to_be_had_are_one_clear_line(
    nodes: Any, device: str, native: dict[str, Any], where: str, problem: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda module: False)
    with pytest.raises(ConfigError) as refused:
        build(nodes, device, **native)
    (found,) = refused.value.problems
    assert (found.where, problem in found.problem, fix in found.fix) == (where, True, True)
    assert "\n" not in found.problem + found.fix


def test_the_recipe_chooses_and_every_choice_packs(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.models.common.embeddings import rope_utils

    from rlrecipes.engines.megatron.attention import apply_packed_rope

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", None)
    local = build(nodes, "cuda", transformer_impl="local")
    assert rope_utils.fused_apply_rotary_pos_emb_thd is apply_packed_rope
    assert (local.transformer_impl, local.persist_layer_norm, local.apply_rope_fusion) == ("local", False, True)
    assert build(nodes, "cpu").transformer_impl == "local"

    def kernel() -> None: ...

    monkeypatch.setattr(packages, "is_installed", lambda module: True)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", kernel)
    fused = build(nodes, "cuda")
    assert (fused.transformer_impl, fused.persist_layer_norm, fused.apply_rope_fusion) == (
        "transformer_engine",
        True,
        True,
    )
    assert rope_utils.fused_apply_rotary_pos_emb_thd is kernel
