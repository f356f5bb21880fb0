"""Experts: logits of transformers, weights there and back, and one process's numbers at every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_group import (
    SINGLE,
    Layout,
    RankGroup,
    build_model_node,
    build_trainer_node,
    slow,
    write_hf_model,
)
from safetensors.torch import load_file
from test_training import SAMPLES, build_rank, compute_hf_logprobs, with_maxima

from rlrecipes.batching.grid import unpack_tokens
from rlrecipes.plan.nodes import ModelNode, TrainerNode

EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2}
LAYOUTS = [
    slow(Layout(tp=2, sp=True)),
    slow(Layout(dp=2, ep=2)),
    Layout(tp=2, sp=True, ep=2, etp=1),
    slow(Layout(cp=2, ep=2)),
    Layout(pp=2, vpp=2),
    slow(Layout(tp=2, sp=True, dp=2, ep=2, etp=1)),
]


def build_expert_node() -> ModelNode:
    node = build_model_node("qwen3", is_tied=False)
    return node.model_copy(update={"family": "qwen3_moe", "shapes": node.shapes.model_copy(update=EXPERTS)})


def train(
    rank: int, port: int, layout: Layout, trainer: TrainerNode, node: ModelNode, path: Path, saved: Path, exported: Path
) -> Any:
    trainer_rank = build_rank(rank, port, trainer, node, path)
    row = layout.build_rows(SAMPLES)[layout.row_of(rank)]
    before = trainer_rank.compute_logprobs(row, which="policy")
    trainer_rank.export_hf(exported, path)
    steps = [trainer_rank.train_step(row, with_maxima) for _ in range(3)]
    trainer_rank.save_checkpoint(saved)
    after = [trainer_rank.train_step(row, with_maxima) for _ in range(2)]
    weights = {name: tensor.clone() for name, tensor in iter_own(trainer_rank, rank, trainer)}
    trainer_rank.close()
    return {"before": before, "steps": steps, "after": after, "weights": weights}


def iter_own(trainer_rank: Any, rank: int, trainer: TrainerNode) -> Any:
    """What a rank sends; those that only help to gather give nothing."""
    for ranks in trainer.weight_sources:
        if rank in ranks:
            tensors = list(trainer_rank.iter_hf_tensors())
            return tensors if rank == ranks[0] else []
    return []


def load_and_go_on(rank: int, port: int, layout: Layout, trainer: TrainerNode, node: ModelNode, saved: Path) -> Any:
    trainer_rank = build_rank(rank, port, trainer, node, None)
    trainer_rank.load_checkpoint(saved)
    row = layout.build_rows(SAMPLES)[layout.row_of(rank)]
    steps = [trainer_rank.train_step(row, with_maxima) for _ in range(2)]
    trainer_rank.close()
    return steps


@pytest.fixture(scope="module")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    node, path = build_expert_node(), tmp_path_factory.mktemp("hf")
    return node, path, write_hf_model(node, path)


@pytest.fixture(scope="module")
def single(hf_model: Any, ranks: RankGroup, tmp_path_factory: pytest.TempPathFactory) -> Any:
    node, path, _ = hf_model
    directory = tmp_path_factory.mktemp("single")
    arguments = SINGLE, build_trainer_node(SINGLE), node, path, directory / "saved", directory / "out"
    return ranks.run(1, train, *arguments)[0] | {"directory": directory}


def test_logprobs_are_those_of_transformers(hf_model: Any, single: Any) -> None:
    found = unpack_tokens(SINGLE.build_rows(SAMPLES), [single["before"]], len(SAMPLES))
    for sample, logprobs in zip(SAMPLES, found, strict=True):
        with torch.no_grad():
            expected = compute_hf_logprobs(hf_model[2], sample)
        mask = torch.tensor(sample.loss_mask[1:])
        torch.testing.assert_close(torch.tensor(logprobs[1:])[mask], expected[mask], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_layout_trains_exports_and_resumes_as_one_process(
    layout: Layout, hf_model: Any, single: Any, ranks: RankGroup, tmp_path: Path
) -> None:
    node, path, _ = hf_model
    trainer = build_trainer_node(layout)
    arguments = layout, trainer, node, path, tmp_path / "saved", tmp_path / "out"
    found = ranks.run(layout.num_ranks, train, *arguments)
    for step, expected in zip(
        [*found[0]["steps"], *found[0]["after"]], [*single["steps"], *single["after"]], strict=True
    ):
        assert step == pytest.approx(expected, rel=1e-5, abs=1e-5)
    weights = {name: tensor for part in found for name, tensor in part["weights"].items()}
    assert weights.keys() == single["weights"].keys()
    for name, tensor in single["weights"].items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-4, rtol=0)
    before = load_file(path / "model.safetensors")
    exported = {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(file).items()}
    assert exported.keys() == before.keys()
    assert all(torch.equal(before[name], exported[name]) for name in before)
    # A checkpoint of one process goes on here, and one of this layout in one process.
    here = ranks.run(layout.num_ranks, load_and_go_on, layout, trainer, node, single["directory"] / "saved")[0]
    there = ranks.run(1, load_and_go_on, SINGLE, build_trainer_node(SINGLE), node, tmp_path / "saved")[0]
    for steps in (here, there):
        for step, expected in zip(steps, single["after"], strict=True):
            assert step == pytest.approx(expected, rel=1e-5, abs=1e-5)
