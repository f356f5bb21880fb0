"""Every loss under every aggregation over real process groups: what one process computes, any layout does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_group import (
    CP2,
    CP2_TP2_SP,
    DP2,
    PP2,
    SINGLE,
    TP2,
    Layout,
    RankGroup,
    build_model_node,
    build_samples,
    build_trainer_node,
    slow,
    write_hf_model,
)
from test_training import GRPO

from rlrecipes.algos.aggregation import compute_loss_weights
from rlrecipes.algos.objective import compute_custom_objective, compute_sft_objective
from rlrecipes.algos.off_policy import OffPolicy
from rlrecipes.config.schema import OptimConfig
from rlrecipes.plan.nodes import ModelNode, TrainerNode
from rlrecipes.types import Sample


def compute_squares(batch: Any, logprobs: torch.Tensor, entropy: torch.Tensor | None, *, scale: float) -> Any:
    return scale * batch["advantages"] * logprobs.square(), {}


def corrected(**options: Any) -> Any:
    return partial(GRPO, off_policy=OffPolicy(low=0.9, high=1.2, **options))


OBJECTIVES = {
    "clipped": GRPO,
    "gspo": partial(GRPO, policy_loss="gspo"),
    "cispo": partial(GRPO, policy_loss="cispo", dual_clip=None),
    "unbiased_kl": partial(GRPO, kl_is_unbiased=True),
    "token_tis": corrected(correction="token_tis"),
    "sequence_tis": corrected(correction="sequence_tis"),
    "sequence_mis": corrected(correction="sequence_mis"),
    "geometric_mis": corrected(correction="geometric_mis", veto=0.75),
    "icepop": corrected(correction="icepop"),
    "decoupled": corrected(correction="decoupled"),
    "opsm": corrected(opsm_delta=0.02),
    "sft": compute_sft_objective,
    "custom": partial(compute_custom_objective, function=compute_squares, options={"scale": 0.5}),
}
MODES = ("per_sequence", "per_rollout", "per_prompt", "per_token", "constant")


def make_samples() -> list[Sample]:
    """Unequal groups and fan-out: rollouts of one and of several samples, near the policy in probability."""
    rng = np.random.default_rng(4)
    samples = []
    for index, sample in enumerate(build_samples(14)):
        length = len(sample.token_ids)
        # The model is random, so its log probabilities are near -log(97).
        old = (-4.6 + 0.3 * rng.standard_normal(length)).astype(np.float32)
        rollout = old + (0.15 * rng.standard_normal(length)).astype(np.float32)
        named = {
            "old_logprobs": old,
            "rollout_logprobs": tuple(rollout.tolist()),
            "ref_logprobs": old - np.float32(0.1),
        }
        samples.append(replace(sample, prompt_index=index % 5 // 2, sibling=index // 6, **named))
    return samples


def with_weights(samples: list[Sample], mode: Any) -> list[Sample]:
    weights = compute_loss_weights(
        mode=mode,
        loss_masks=[torch.tensor(sample.loss_mask) for sample in samples],
        rollout_ids=[(sample.prompt_index, sample.sibling) for sample in samples],
        prompt_ids=[sample.prompt_index for sample in samples],
        divisor=30.0,
    )
    return [
        replace(sample, loss_weights=weight.numpy().astype(np.float32))
        for sample, weight in zip(samples, weights, strict=True)
    ]


def take_steps(
    rank: int, port: int, layout: Layout, trainer: TrainerNode, node: ModelNode, path: Path
) -> dict[str, Any]:
    from rlrecipes.engines.megatron.rank import TrainerRank

    trainer_rank = TrainerRank(trainer, node, rank=rank, master_address="127.0.0.1", master_port=port)
    trainer_rank.load_hf(path)
    found = {}
    for number, (name, objective) in enumerate(OBJECTIVES.items()):
        # Aggregations are weights of tokens, so each loss need not meet each of them here.
        for mode in MODES if name == "gspo" else [MODES[number % len(MODES)]]:
            samples = with_weights(make_samples(), mode)
            row = layout.build_rows(samples)[layout.row_of(rank)]
            found[f"{name} {mode}"] = trainer_rank.train_step(row, objective)
    trainer_rank.close()
    return found


def build_still_trainer(layout: Layout) -> TrainerNode:
    """So small a learning rate that every step starts from the same weights."""
    trainer = build_trainer_node(layout)
    optim = trainer.optim.model_dump() | {"lr": 1e-30, "min_lr": 1e-31}
    return build_trainer_node(layout, optim=OptimConfig(**optim))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelNode, Path]:
    node, path = build_model_node(), tmp_path_factory.mktemp("hf")
    write_hf_model(node, path)
    return node, path


@pytest.fixture(scope="module")
def single(model: tuple[ModelNode, Path], ranks: RankGroup) -> dict[str, Any]:
    return ranks.run(1, take_steps, SINGLE, build_still_trainer(SINGLE), *model)[0]


@pytest.mark.parametrize("layout", [slow(TP2), PP2, DP2, slow(CP2), CP2_TP2_SP], ids=str)
def test_any_layout_gives_loss_gradient_and_metrics_of_one_process(
    layout: Layout, model: tuple[ModelNode, Path], single: dict[str, Any], ranks: RankGroup
) -> None:
    for found in ranks.run(layout.num_ranks, take_steps, layout, build_still_trainer(layout), *model):
        assert found.keys() == single.keys()
        for name, metrics in found.items():
            assert metrics == pytest.approx(single[name], rel=1e-5, abs=1e-5), name


def test_the_cases_tell_losses_and_corrections_apart(single: dict[str, Any]) -> None:
    """A correction that never acts, or two losses that agree, would make the comparison above say nothing."""
    norms = [metrics["grad_norm"] for metrics in single.values()]
    assert min(norms) > 1e-3 and len({round(norm, 6) for norm in norms}) == len(norms)
    for name, metrics in single.items():
        if "tis" in name or "mis" in name or "icepop" in name or "decoupled" in name:
            assert 0 < metrics["off_policy_clip_fraction"] < 1, name
            assert metrics["off_policy_effective_fraction"] < 1, name
    assert 0 < single[next(name for name in single if name.startswith("opsm"))]["opsm_fraction"] < 1
