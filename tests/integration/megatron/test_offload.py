"""A trainer that gives its memory away between its steps is one that never did: bit for bit, at any layout."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_group import DP2, PP2, SINGLE, TP2, Layout, RankGroup, build_model_node, slow, write_hf_model
from test_critic import CRITIC, OBJECTIVE, build_critic_trainer, own_row, read_critic
from test_training import GRPO, build_rank

from rlrecipes.errors import TrainerError
from rlrecipes.plan.nodes import ModelNode, TrainerNode


def count_bytes() -> int:
    """Of all tensors of this process that hold numbers."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if isinstance(found, torch.Tensor) and found.is_floating_point()]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def run_steps(
    rank: int, port: int, layout: Layout, trainer: TrainerNode, node: ModelNode, path: Path, is_offloaded: bool
) -> Any:
    """Three steps of policy and critic, what is read of them, and a checkpoint gone on from; memory away in between."""
    trainer_rank = build_rank(rank, port, trainer, node, path)
    row = own_row(rank, layout)
    found: dict[str, Any] = {"numbers": [], "sent": []}

    def rest() -> None:
        """The order of a colocated run: state goes, weights are sent, weights go, everything comes back."""
        if not is_offloaded:
            found["sent"].append([(name, tensor.clone()) for name, tensor in trainer_rank.iter_hf_tensors()])
            return
        trainer_rank.offload_state()
        found["sent"].append([(name, tensor.clone()) for name, tensor in trainer_rank.iter_hf_tensors()])
        trainer_rank.offload_weights()
        trainer_rank.reload()

    def step() -> None:
        rest()
        old, reference = (trainer_rank.compute_logprobs(row, which=which) for which in ("policy", "reference"))
        rest()
        values = trainer_rank.compute_values(row)
        results = [trainer_rank.critic_step(row, OBJECTIVE), trainer_rank.train_step(row, GRPO)]
        found["numbers"].append([np.concatenate(part) for part in (old, reference, values) if part])
        found["numbers"].append([np.array([v for _, v in sorted(result.items())]) for result in results])

    for _ in range(2):
        step()
    rest()
    saved = path.parent / f"saved-{port}"
    trainer_rank.save_checkpoint(saved)
    step()
    rest()
    trainer_rank.load_checkpoint(saved)
    step()
    found["critic"] = read_critic(trainer_rank)
    trainer_rank.close()
    return found


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        slow(SINGLE, "float32"),
        slow(SINGLE, "bfloat16"),
        (DP2, "bfloat16"),
        slow(TP2, "float32"),
        (PP2, "float32"),
    ],
)
def test_steps_are_those_of_a_trainer_that_stays(ranks: RankGroup, tmp_path: Path, layout: Layout, dtype: str) -> None:
    node = build_model_node(dtype=dtype)
    write_hf_model(node, tmp_path / "hf")
    trainer = build_critic_trainer(layout, needs_reference=True, critic=CRITIC)
    stays, goes = (
        ranks.run(layout.num_ranks, run_steps, layout, trainer, node, tmp_path / "hf", is_offloaded)
        for is_offloaded in (False, True)
    )
    for expected, found in zip(stays, goes, strict=True):
        assert len(found["numbers"]) == len(expected["numbers"]) == 8
        for own, wanted in zip(found["numbers"], expected["numbers"], strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(own, wanted, strict=True))
        assert len(found["sent"]) == len(expected["sent"])
        for sent, wanted_sent in zip(found["sent"], expected["sent"], strict=True):
            assert [name for name, _ in sent] == [name for name, _ in wanted_sent]
            assert all(torch.equal(a, b) for (_, a), (_, b) in zip(sent, wanted_sent, strict=True))
        assert all(torch.equal(found["critic"][name], value) for name, value in expected["critic"].items())


def run_away(rank: int, port: int, trainer: TrainerNode, node: ModelNode, path: Path) -> Any:
    of_others = count_bytes()  # earlier tests' in this process
    trainer_rank = build_rank(rank, port, trainer, node, path)
    row = own_row(rank, SINGLE)
    trainer_rank.critic_step(row, OBJECTIVE)
    trainer_rank.train_step(row, GRPO)
    num_weights = sum(tensor.numel() for _, tensor in trainer_rank.iter_hf_tensors())
    held = [count_bytes() - of_others]
    trainer_rank.offload_state()
    held.append(count_bytes() - of_others)
    trainer_rank.offload_weights()
    held.append(count_bytes() - of_others)
    refused = []
    actions: list[Any] = [
        lambda: trainer_rank.compute_logprobs(row, which="policy"),
        lambda: trainer_rank.train_step(row, GRPO),
        lambda: trainer_rank.compute_values(row),
        lambda: trainer_rank.save_checkpoint(path.parent / "never"),
        lambda: list(trainer_rank.iter_hf_tensors()),
    ]
    for action in actions:
        with pytest.raises(TrainerError) as caught:
            action()
        refused.append(str(caught.value))
    trainer_rank.close()
    return num_weights, held, refused


def test_memory_is_given_away_and_nothing_computes_without_it(ranks: RankGroup, tmp_path: Path) -> None:
    """The host's copies are bytes: they are not counted."""
    node = build_model_node(dtype="bfloat16")
    write_hf_model(node, tmp_path / "hf")
    trainer = build_critic_trainer(SINGLE, critic=CRITIC)
    ((num_weights, held, refused),) = ranks.run(1, run_away, trainer, node, tmp_path / "hf")
    assert held[0] > 2 * 16 * num_weights  # weights, gradients, copies in float32 and moments, of policy and critic
    assert held[1] - held[2] == pytest.approx(2 * num_weights, rel=0.1)
    assert held[2] < 0.05 * held[0]
    assert all("memory is given away" in text for text in refused)
