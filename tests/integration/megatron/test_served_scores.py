"""What an engine says of given tokens, against what the trainer says of them with the same weights."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_group import (
    SINGLE,
    TP2,
    Layout,
    RankGroup,
    build_model_node,
    build_samples,
    build_trainer_node,
    write_hf_model,
)

from rlrecipes.batching.grid import unpack_tokens
from rlrecipes.engines.sglang.serving import ServingClient
from rlrecipes.plan.nodes import ModelNode, TrainerNode
from rlrecipes.rollout.samples import to_samples
from rlrecipes.rollout.scoring import Scorer, ScoringReward
from rlrecipes.types import Completion, Group, Prompt, Rollout, RolloutStatus, Sample, Turn

NODE = build_model_node()
NUM_TOP = 4


def to_group(index: int, ids: tuple[int, ...], num_prompt: int) -> Group:
    completion = Completion(ids[num_prompt:], (0.0,) * (len(ids) - num_prompt), "stop", 0)
    prompt = Prompt(index, ids[:num_prompt], "")
    rollout = Rollout(prompt, 0, (Turn(prompt.token_ids, completion),), "", RolloutStatus.COMPLETED, 0.0)
    return Group(prompt, (rollout,))


GROUPS = [
    to_group(sample.prompt_index, sample.token_ids, sample.loss_mask.index(True))
    for sample in build_samples(14)
    if any(sample.loss_mask)
]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A model's directory, and the engine that serves it."""
    path = tmp_path_factory.mktemp("teacher")
    write_hf_model(NODE, path, seed=12)
    command = [sys.executable, "-m", "rlrecipes.engines.embedded.server", "--model-path", str(path), "--port", "0"]
    command += ["--skip-tokenizer-init", "--dtype", "float32"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if "http://" in line), "")
            found = re.search(r"http://\S+", line)
            assert found, f"the engine ended with code {process.wait()}"
            yield path, found.group()
        finally:
            process.kill()


class NoReward:
    async def reward_group(self, group: Group) -> Group:
        return group


def read_by_engine(url: str) -> list[Sample]:
    async def ask() -> list[Sample]:
        async with ServingClient(url, timeout_s=60, max_connections=8) as client:
            scorers = {"teacher": Scorer(client, NUM_TOP), "reference": Scorer(client)}
            reward = ScoringReward(NoReward(), scorers, run_id="run")  # type: ignore[arg-type]
            groups = await asyncio.gather(*(reward.reward_group(group) for group in GROUPS))
            return [sample for group in groups for sample in to_samples(group)]

    return asyncio.run(ask())


def read_by_trainer(
    rank: int, port: int, layout: Layout, samples: list[Sample], trainer: TrainerNode, node: ModelNode, path: Path
) -> Any:
    from rlrecipes.engines.megatron.rank import TrainerRank

    trainer_rank = TrainerRank(trainer, node, rank=rank, master_address="127.0.0.1", master_port=port)
    trainer_rank.load_hf(path)
    row = layout.build_rows(samples)[layout.row_of(rank)]
    found = (
        trainer_rank.compute_logprobs(row, which="teacher"),
        trainer_rank.compute_teacher_topk(row, num_tokens=NUM_TOP),
    )
    trainer_rank.close()
    return found


@pytest.mark.parametrize("layout", [SINGLE, TP2])
def test_engine_and_trainer_say_the_same_of_every_token(
    teacher: tuple[Path, str], ranks: RankGroup, layout: Layout, tmp_path: Path
) -> None:
    path, url = teacher
    write_hf_model(NODE, tmp_path)
    asked = read_by_engine(url)
    trainer = build_trainer_node(layout, teacher_path=str(path), temperature=1.0)
    plain = [sample for group in GROUPS for sample in to_samples(group)]
    answers = ranks.run(layout.num_ranks, read_by_trainer, layout, plain, trainer, NODE, tmp_path)
    rows = layout.build_rows(plain)
    logprobs = unpack_tokens(rows, [found for found, _ in answers if found], len(plain))
    both = unpack_tokens(rows, [found for _, found in answers if found], len(plain))
    for sample, held, held_topk in zip(asked, logprobs, both, strict=True):
        assert sample.teacher_logprobs is not None
        assert held[np.array(sample.loss_mask)].max() < 0
        np.testing.assert_allclose(sample.teacher_logprobs, held, atol=1e-5, rtol=0)
        np.testing.assert_allclose(sample.ref_logprobs, held, atol=1e-5, rtol=0)
        np.testing.assert_array_equal(sample.teacher_topk_ids, held_topk[:, :NUM_TOP])
        np.testing.assert_allclose(sample.teacher_topk_logprobs, held_topk[:, NUM_TOP:], atol=1e-5, rtol=0)
