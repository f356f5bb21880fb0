"""Cut distributions over real process groups: the same logprobs and gradients however the vocabulary is split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_group import (
    CP2,
    SINGLE,
    TP2,
    Layout,
    RankGroup,
    build_model_node,
    build_samples,
    build_trainer_node,
    write_hf_model,
)
from test_training import GRPO, build_rank

from rlrecipes.batching.grid import unpack_tokens
from rlrecipes.engines.megatron import logprobs
from rlrecipes.engines.megatron.logprobs import compute_logprobs
from rlrecipes.plan.nodes import ModelNode, TrainerNode
from rlrecipes.types import Sample

SAMPLING = {"temperature": 0.7, "top_p": 0.8, "top_k": 12}
VOCAB, PADDED, TOKENS = 37, 48, 41
CUTS = [{"top_p": 0.7}, {"top_k": 5}, {"top_p": 0.9, "top_k": 4}, {}]


class Alone:
    """A group of one."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def build_logits(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(TOKENS, PADDED, generator=generator)
    logits[:, VOCAB:] = 1e4  # what stands in the padding does not matter
    return logits.to(dtype), torch.randint(0, VOCAB, (TOKENS,), generator=generator)


def read(logits: torch.Tensor, targets: torch.Tensor, cut: dict[str, Any], group: Any) -> list[torch.Tensor]:
    logits = logits.clone().requires_grad_()
    found = compute_logprobs(logits, targets, temperature=0.7, **cut, vocab_size=VOCAB, group=group)
    (found.logprobs.sum() + 2 * found.entropy.sum()).backward()
    return [*(x.detach() for x in found), logits.grad.float()]


def read_a_part(rank: int, port: int) -> list[list[torch.Tensor]]:
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(logprobs._CHUNK_ELEMENTS, "cpu", 128)  # so that ranks meet several times
        for dtype in (torch.float32, torch.bfloat16):
            logits, targets = build_logits(dtype)
            part = logits[:, rank * PADDED // 2 : (rank + 1) * PADDED // 2]
            found += [read(part, targets, cut, dist.group.WORLD) for cut in CUTS]
    return found


def test_two_ranks_find_what_one_finds(ranks: RankGroup) -> None:
    parts = ranks.run(2, read_a_part)
    expected = [read(*build_logits(dtype), cut, Alone()) for dtype in (torch.float32, torch.bfloat16) for cut in CUTS]
    for first, second, whole in zip(*parts, expected, strict=True):
        for ours, theirs, wanted in zip(first[:3], second[:3], whole[:3], strict=True):
            assert torch.equal(ours, theirs)
            torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.cat([first[3], second[3]], 1), whole[3], atol=1e-5, rtol=1e-2)
        assert (second[3][:, VOCAB - PADDED // 2 :] == 0).all()


def train_on_rollouts(
    rank: int, port: int, layout: Layout, trainer: TrainerNode, node: ModelNode, path: Path, samples: list[Sample]
) -> Any:
    trainer_rank = build_rank(rank, port, trainer, node, path)
    (row,) = layout.build_rows(samples)
    before = trainer_rank.compute_logprobs(row, which="policy")
    metrics = trainer_rank.train_step(row, GRPO)
    trainer_rank.close()
    return before, metrics


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Samples as an engine makes them: drawn from the kept tokens, with logprobs of the whole distribution."""
    node, path = build_model_node(), tmp_path_factory.mktemp("hf")
    model = write_hf_model(node, path)
    generator = torch.Generator().manual_seed(1)
    samples, wanted = [], []
    for sample in build_samples(6):
        ids, whole, kept = list(sample.token_ids[:3]), [0.0] * 3, [0.0] * 3
        for _ in range(9):
            with torch.no_grad():
                q = torch.softmax(model(torch.tensor([ids])).logits[0, -1].double() / SAMPLING["temperature"], -1)
            sorted_q, order = q.sort(descending=True)
            is_kept = (sorted_q.cumsum(0) - sorted_q <= SAMPLING["top_p"]) & (torch.arange(97) < SAMPLING["top_k"])
            place = torch.multinomial(sorted_q * is_kept, 1, generator=generator)
            ids.append(int(order[place]))
            whole.append(float(sorted_q[place].log()))
            kept.append(float((sorted_q[place] / sorted_q[is_kept].sum()).log()))
        mask = (False,) * 3 + (True,) * 9
        changes = {"token_ids": tuple(ids), "loss_mask": mask, "rollout_logprobs": tuple(whole)}
        arrays = {
            name: np.full(12, value, np.float32)
            for name, value in {"advantages": 1.0, "loss_weights": 1 / 54, "ref_logprobs": -1.0}.items()
        }
        samples.append(replace(sample, **changes, **arrays, old_logprobs=np.array(kept, np.float32)))
        wanted.append(np.array(kept, np.float32))
    return node, path, samples, wanted


@pytest.mark.parametrize("layout", [SINGLE, TP2, CP2], ids=["single", "tp2", "cp2"])
def test_trainer_and_engine_agree_on_what_was_drawn(ranks: RankGroup, rollouts: Any, layout: Layout) -> None:
    node, path, samples, wanted = rollouts
    trainer = build_trainer_node(layout, **SAMPLING)
    arguments = (layout, trainer, node, path, samples)
    arrays, metrics = ranks.run(layout.num_ranks, train_on_rollouts, *arguments)[0]
    for found, expected in zip(unpack_tokens(layout.build_rows(samples), [arrays], 6), wanted, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)
    assert metrics["rollout_logprob_abs_diff_max"] < 2e-5
    assert metrics["ratio_max"] == pytest.approx(1, abs=5e-5) and metrics["grad_norm"] > 0
