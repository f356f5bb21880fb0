"""Train steps: the same numbers at every layout, and the same as transformers' autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from rank_group import (
    CP2,
    CP2_TP2_SP,
    DP2,
    PP2,
    PP2_VPP2,
    SINGLE,
    TP2,
    TP2_SP,
    Layout,
    RankGroup,
    build_model_node,
    build_samples,
    build_trainer_node,
    slow,
    write_hf_model,
)

from rlrecipes.algos.objective import compute_policy_objective, compute_sft_objective
from rlrecipes.batching.grid import unpack_tokens
from rlrecipes.errors import TrainerError
from rlrecipes.plan.nodes import ModelNode, TrainerNode
from rlrecipes.types import Sample

GRPO = partial(
    compute_policy_objective,
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=3.0,
    kl_coef_in_loss=0.05,
    kl_estimator="k3",
    entropy_coef=0.01,
)
SAMPLES = build_samples(14)
LAYOUTS = [TP2, TP2_SP, PP2, DP2, CP2, PP2_VPP2, CP2_TP2_SP]


def build_rank(rank: int, port: int, trainer: TrainerNode, node: ModelNode, path: Path | None) -> Any:
    from rlrecipes.engines.megatron.rank import TrainerRank

    trainer_rank = TrainerRank(trainer, node, rank=rank, master_address="127.0.0.1", master_port=port)
    if path is not None:
        trainer_rank.load_hf(path)
    return trainer_rank


def with_maxima(batch: Any, logprobs: torch.Tensor, entropy: torch.Tensor | None) -> Any:
    loss, metrics = GRPO(batch, logprobs, entropy)
    return loss, {**metrics, "entropy_max": metrics["entropy"]}


@contextmanager
def count_calls() -> Iterator[Callable[[], int]]:
    """How often attention and MLPs are computed."""
    from megatron.core.transformer.mlp import MLP

    from rlrecipes.engines.megatron import attention

    attend, project = attention.compute_packed_attention, MLP.forward
    with (
        mock.patch.object(attention, "compute_packed_attention", side_effect=attend) as attends,
        mock.patch.object(MLP, "forward", autospec=True, side_effect=project) as projects,
    ):
        yield lambda: attends.call_count + projects.call_count


def train_three_steps(
    rank: int, port: int, layout: Layout, trainer: TrainerNode, node: ModelNode, path: Path
) -> dict[str, Any]:
    trainer_rank = build_rank(rank, port, trainer, node, path)
    row = layout.build_rows(SAMPLES)[layout.row_of(rank)]
    before = trainer_rank.compute_logprobs(row, which="policy")
    with count_calls() as num_calls:
        steps = [trainer_rank.train_step(row, with_maxima) for _ in range(3)]
    found = {
        "steps": steps,
        "num_calls": num_calls(),
        "before": before,
        "policy": trainer_rank.compute_logprobs(row, which="policy"),
        "reference": trainer_rank.compute_logprobs(row, which="reference"),
        "policy_again": trainer_rank.compute_logprobs(row, which="policy"),
        "weights": {name: tensor.clone() for name, tensor in trainer_rank.iter_hf_tensors()},
    }
    trainer_rank.close()
    return found


def train_with_idle_samples(
    rank: int, port: int, layout: Layout, should_split: bool, trainer: TrainerNode, node: ModelNode, path: Path
) -> dict[str, Any]:
    samples = [
        replace(sample, advantages=0 * sample.advantages) if index % 3 else sample
        for index, sample in enumerate(SAMPLES)
    ]
    idle = [sample for index, sample in enumerate(samples) if index % 3]
    parts = (samples[::3], idle) if should_split else (samples, [])
    rows = [layout.build_rows(part)[layout.row_of(rank)] if part else [] for part in parts]
    objective = partial(GRPO, kl_coef_in_loss=0.0, entropy_coef=0.0)
    trainer_rank = build_rank(rank, port, trainer, node, path)
    steps = [trainer_rank.train_step(rows[0], objective, rows[1]) for _ in range(2)]
    weights = {name: tensor.clone() for name, tensor in trainer_rank.iter_hf_tensors()}
    trainer_rank.close()
    return {"steps": steps, "weights": weights}


def read_teacher(rank: int, port: int, layout: Layout, trainer: TrainerNode, node: ModelNode, path: Path) -> Any:
    trainer_rank = build_rank(rank, port, trainer, node, path)
    found = trainer_rank.compute_teacher_topk(layout.build_rows(SAMPLES)[layout.row_of(rank)], num_tokens=3)
    trainer_rank.close()
    return found


def distil(
    rank: int, port: int, layout: Layout, samples: list[Sample], trainer: TrainerNode, node: ModelNode, path: Path
) -> Any:
    trainer_rank = build_rank(rank, port, trainer, node, path)
    objective = partial(GRPO, kl_coef_in_loss=0.0, distillation_topk_coef=0.3)
    metrics = trainer_rank.train_step(layout.build_rows(samples)[layout.row_of(rank)], objective)
    trainer_rank.close()
    return metrics


@pytest.fixture(scope="module")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    node = build_model_node("qwen3", is_tied=True)
    path = tmp_path_factory.mktemp("hf")
    return node, path, write_hf_model(node, path)


@pytest.fixture(scope="module")
def single(hf_model: Any, ranks: RankGroup) -> dict[str, Any]:
    node, path, _ = hf_model
    trainer = build_trainer_node(SINGLE, needs_reference=True)
    return ranks.run(1, train_three_steps, SINGLE, trainer, node, path)[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_three_grpo_steps_equal_one_process(
    layout: Layout, hf_model: Any, single: dict[str, Any], ranks: RankGroup
) -> None:
    node, path, _ = hf_model
    trainer = build_trainer_node(layout, needs_reference=True)
    found = ranks.run(layout.num_ranks, train_three_steps, layout, trainer, node, path)
    assert all(part["steps"] == found[0]["steps"] for part in found)
    for step, expected in zip(found[0]["steps"], single["steps"], strict=True):
        assert step == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert layout.pp == 1 or found[0]["weights"].keys().isdisjoint(found[-1]["weights"])
    weights = found[0]["weights"] | found[-1]["weights"]
    assert weights.keys() == single["weights"].keys()
    for name, tensor in single["weights"].items():
        # A tenth of one update: Adam divides a gradient that is nearly 0 by itself, rounding and all.
        torch.testing.assert_close(weights[name], tensor, atol=1e-4, rtol=0)


RECOMPUTING = {
    "every layer": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "two layers at a time": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "the first layer": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "attention": {"recompute_granularity": "selective"},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
}


@pytest.mark.parametrize("layout", [SINGLE, slow(CP2)], ids=str)
@pytest.mark.parametrize("fields", RECOMPUTING.values(), ids=RECOMPUTING)
def test_recomputing_changes_no_number(
    fields: dict[str, Any], layout: Layout, hf_model: Any, single: dict[str, Any], ranks: RankGroup
) -> None:
    node, path, _ = hf_model
    trainer = build_trainer_node(layout, needs_reference=True, **fields)
    found = ranks.run(layout.num_ranks, train_three_steps, layout, trainer, node, path)[0]
    for step, expected in zip(found["steps"], single["steps"], strict=True):
        assert step == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert found["num_calls"] > single["num_calls"]


@pytest.mark.parametrize("layout", [DP2, PP2_VPP2], ids=str)
def test_gradients_may_leave_during_the_backward_pass(
    layout: Layout, hf_model: Any, single: dict[str, Any], ranks: RankGroup
) -> None:
    node, path, _ = hf_model
    native = {"overlap_grad_reduce": True, "bucket_size": 20_000}
    trainer = build_trainer_node(layout, needs_reference=True, megatron=native)
    found = ranks.run(layout.num_ranks, train_three_steps, layout, trainer, node, path)[0]
    for step, expected in zip(found["steps"], single["steps"], strict=True):
        assert step == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("layout", [SINGLE, TP2, PP2, DP2])
def test_samples_without_gradient_may_go_forward_only(hf_model: Any, ranks: RankGroup, layout: Layout) -> None:
    node, path, _ = hf_model
    trainer = build_trainer_node(layout)
    arguments = (trainer, node, path)
    whole = ranks.run(layout.num_ranks, train_with_idle_samples, layout, False, *arguments)
    split = ranks.run(layout.num_ranks, train_with_idle_samples, layout, True, *arguments)
    for found, expected in zip(split, whole, strict=True):
        assert found["steps"][0]["grad_norm"] > 0
        for step, expected_step in zip(found["steps"], expected["steps"], strict=True):
            assert step == pytest.approx(expected_step, rel=1e-5, abs=1e-5)
        for name, tensor in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], tensor, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def teacher(hf_model: Any, ranks: RankGroup, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Another model of the same shapes, and samples with what it finds likeliest."""
    node, path, _ = hf_model
    directory = tmp_path_factory.mktemp("teacher")
    hf = write_hf_model(node, directory, seed=12)
    trainer = build_trainer_node(SINGLE, teacher_path=str(directory))
    both = unpack_tokens(SINGLE.build_rows(SAMPLES), ranks.run(1, read_teacher, SINGLE, trainer, node, path), 14)
    samples = [
        replace(sample, teacher_topk_ids=array[:, :3].astype(np.int64), teacher_topk_logprobs=array[:, 3:])
        for sample, array in zip(SAMPLES, both, strict=True)
    ]
    return hf, directory, samples


def test_the_teachers_likeliest_tokens_are_those_of_transformers(teacher: Any) -> None:
    hf, _, samples = teacher
    for sample in samples:
        with torch.no_grad():
            logprobs = torch.log_softmax(hf(torch.tensor([sample.token_ids])).logits[0, :-1] / 0.7, -1)
        expected = logprobs.topk(3, dim=1)
        mask = np.array(sample.loss_mask[1:])
        np.testing.assert_array_equal(sample.teacher_topk_ids[1:][mask], expected.indices.numpy()[mask])
        np.testing.assert_allclose(sample.teacher_topk_logprobs[1:][mask], expected.values.numpy()[mask], atol=1e-5)


@pytest.mark.parametrize(
    "layout", [slow(TP2), slow(TP2_SP), PP2, slow(DP2), slow(CP2), slow(PP2_VPP2), CP2_TP2_SP], ids=str
)
def test_distilling_the_likeliest_tokens_is_the_same_at_every_layout(
    hf_model: Any, teacher: Any, ranks: RankGroup, layout: Layout
) -> None:
    node, path, _ = hf_model
    _, directory, samples = teacher
    (expected,) = ranks.run(1, distil, SINGLE, samples, build_trainer_node(SINGLE), node, path)
    assert expected["teacher_topk_kl"] > 0.1
    trainer = build_trainer_node(layout, teacher_path=str(directory))
    for metrics in ranks.run(layout.num_ranks, distil, layout, samples, trainer, node, path):
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-5)
    rows = layout.build_rows(SAMPLES)
    answers = [found for found in ranks.run(layout.num_ranks, read_teacher, layout, trainer, node, path) if found]
    for sample, found in zip(samples, unpack_tokens(rows, answers, len(SAMPLES)), strict=True):
        np.testing.assert_array_equal(found[:, :3], sample.teacher_topk_ids)
        np.testing.assert_allclose(found[:, 3:], sample.teacher_topk_logprobs, atol=1e-5)


def test_logprobs_are_those_of_transformers_and_the_reference_stays(hf_model: Any, single: dict[str, Any]) -> None:
    grid = SINGLE.build_rows(SAMPLES)
    logprobs = unpack_tokens(grid, [single["before"]], len(SAMPLES))
    with torch.no_grad():
        for sample, found in zip(SAMPLES, logprobs, strict=True):
            expected = compute_hf_logprobs(hf_model[2], sample)
            expected = torch.where(torch.tensor(sample.loss_mask[1:]), expected, 0)
            np.testing.assert_allclose(found[1:], expected.numpy(), atol=1e-5)
    names = ("before", "reference", "policy", "policy_again")
    for before, reference, policy, again in zip(*(single[name] for name in names), strict=True):
        np.testing.assert_array_equal(reference, before)
        np.testing.assert_array_equal(policy, again)
        assert np.abs(policy - before).max() > 1e-3


def compute_hf_logprobs(hf: Any, sample: Sample) -> torch.Tensor:
    ids = torch.tensor([sample.token_ids])
    return torch.log_softmax(hf(ids).logits[0, :-1] / 0.7, -1).gather(1, ids[0, 1:, None])[:, 0]


def take_sft_step(rank: int, port: int, layout: Layout, trainer: TrainerNode, node: ModelNode, path: Path) -> Any:
    trainer_rank = build_rank(rank, port, trainer, node, path)
    metrics = trainer_rank.train_step(layout.build_rows(SAMPLES)[layout.row_of(rank)], compute_sft_objective)
    trainer_rank.close()
    return metrics


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_loss_and_gradient_are_those_of_transformers(family: str, ranks: RankGroup, tmp_path: Path) -> None:
    node = build_model_node(family, is_tied=False)
    hf = write_hf_model(node, tmp_path)
    losses = [
        -(compute_hf_logprobs(hf, sample) * torch.tensor(sample.loss_weights[1:])).sum()  # type: ignore[index]
        for sample in SAMPLES
    ]
    loss = torch.stack(losses).sum()
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in hf.parameters()))
    for layout in (SINGLE, TP2_SP, PP2):
        trainer = build_trainer_node(layout)
        metrics = ranks.run(layout.num_ranks, take_sft_step, layout, trainer, node, tmp_path)[0]
        assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert metrics["num_tokens"] == sum(sum(sample.loss_mask) for sample in SAMPLES)
        assert metrics["lr"] == pytest.approx(1e-3 / 3)


def poison_masked(batch: Any, logprobs: torch.Tensor, entropy: torch.Tensor | None) -> Any:
    loss, metrics = with_maxima(batch, logprobs, entropy)
    mask = batch["loss_mask"]
    poisoned = {k: m if k.endswith("_counts") else torch.where(mask, m, math.nan) for k, m in metrics.items()}
    return torch.where(mask, loss, math.nan), poisoned


def poison_one_token(batch: Any, logprobs: torch.Tensor, entropy: torch.Tensor | None) -> Any:
    """NaN in one trained token of the one micro-batch that holds sample 5."""
    loss = -logprobs
    is_there = len(batch["cu_seqlens"]) and bool((batch["token_ids"] == SAMPLES[5].token_ids[0]).any())
    return (loss * math.nan if is_there else loss), {}


class _Explode(torch.autograd.Function):
    """A finite loss with an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * math.inf


def explode_gradient(batch: Any, logprobs: torch.Tensor, entropy: torch.Tensor | None) -> Any:
    return _Explode.apply(-logprobs), {}


def meet_poison(rank: int, port: int, layout: Layout, trainer: TrainerNode, node: ModelNode, path: Path) -> Any:
    trainer_rank = build_rank(rank, port, trainer, node, path)
    row = layout.build_rows(SAMPLES)[layout.row_of(rank)]
    before = {name: tensor.clone() for name, tensor in trainer_rank.iter_hf_tensors()}
    told = []
    for objective in (poison_one_token, explode_gradient):
        with pytest.raises(TrainerError) as caught:
            trainer_rank.train_step(row, objective)
        told.append(caught.value.problems[0].where)
    after = dict(trainer_rank.iter_hf_tensors())
    is_untouched = all(torch.equal(before[name], after[name]) for name in before)
    metrics = trainer_rank.train_step(row, poison_masked)
    trainer_rank.close()
    return told, is_untouched, metrics


@pytest.mark.parametrize("layout", [SINGLE, TP2, PP2, DP2], ids=str)
def test_what_is_not_finite_stops_every_rank_and_changes_nothing(
    layout: Layout, hf_model: Any, single: dict[str, Any], ranks: RankGroup
) -> None:
    node, path, _ = hf_model
    for told, is_untouched, metrics in ranks.run(
        layout.num_ranks, meet_poison, layout, build_trainer_node(layout), node, path
    ):
        assert told == ["trainer.train_step.loss", "trainer.train_step.grad_norm"]
        assert is_untouched
        assert metrics == pytest.approx(single["steps"][0], rel=1e-5, abs=1e-5)


def test_a_deterministic_rank_repeats_itself_bit_for_bit(
    hf_model: Any, single: dict[str, Any], ranks: RankGroup
) -> None:
    node, path, _ = hf_model
    trainer = build_trainer_node(TP2_SP, needs_reference=True, is_deterministic=True)
    first, second = (ranks.run(2, train_three_steps, TP2_SP, trainer, node, path)[0] for _ in range(2))
    assert first["steps"] == second["steps"]
    assert all(torch.equal(tensor, second["weights"][name]) for name, tensor in first["weights"].items())
