"""Weights as handles from every layout of the trainer: each engine rank gets the whole model, in memory of its GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_group import (
    DP2,
    PP2,
    SINGLE,
    TP2,
    Layout,
    RankGroup,
    build_model_node,
    build_trainer_node,
    write_hf_model,
)
from test_training import build_rank

from rlrecipes.engines.embedded.weight_transfer import decode_payload, unpickle_tensors
from rlrecipes.plan.nodes import ModelNode, TrainerNode
from rlrecipes.runner.rank import RankWorker
from rlrecipes.weight_sync.handles import HandleTransport, SharingEngine


class Receiver:
    """One engine; keeps what each of its ranks reads."""

    def __init__(self, num_ranks: int) -> None:
        self.url = "http://engine"
        self.tensors: list[dict[str, torch.Tensor]] = [{} for _ in range(num_ranks)]

    async def update_weights_from_tensor(self, payloads: Any, *, load_format: str | None = None) -> None:
        for held, payload in zip(self.tensors, payloads, strict=True):
            tensors = unpickle_tensors(decode_payload(payload), load_format)
            held.update((name, tensor.clone()) for name, tensor in tensors)


def send_all(rank: int, port: int, layout: Layout, trainer: TrainerNode, node: ModelNode, path: Path) -> Any:
    """Two syncs of every stage, as the driver asks for them; an engine over all ranks, and one on the last."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    last = layout.num_ranks - 1
    receivers = [Receiver(layout.num_ranks), Receiver(1)]
    worker = RankWorker.__new__(RankWorker)
    worker._plan = SimpleNamespace(trainer=trainer, weight_sync=SimpleNamespace(bucket_bytes=8192))  # type: ignore[assignment]
    worker._rank, worker._transport, worker._loop = rank, None, asyncio.new_event_loop()
    worker._trainer = build_rank(rank, port, trainer, node, path)
    engines = [SharingEngine(receivers[0], tuple(range(last + 1))), SharingEngine(receivers[1], (last,))]
    worker._handles = HandleTransport(engines, device="cpu")
    sent = [worker.send_weights(True, True, stage) for _ in range(2) for stage in range(len(trainer.weight_sources))]
    worker._trainer.close()
    return [held for receiver in receivers for held in receiver.tensors], sent


@pytest.mark.parametrize("layout", [SINGLE, TP2, PP2, DP2, Layout(tp=2, pp=2)])
def test_every_engine_rank_gets_all_of_the_model(ranks: RankGroup, tmp_path: Path, layout: Layout) -> None:
    node = build_model_node()
    model = write_hf_model(node, tmp_path / "hf")
    trainer = build_trainer_node(layout)
    answers = ranks.run(layout.num_ranks, send_all, layout, trainer, node, tmp_path / "hf")
    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    num_engine_ranks = layout.num_ranks + 1
    for number in range(num_engine_ranks):
        parts = [held[number] for held, _ in answers]  # of each source: its stages' tensors
        found = {name: tensor for part in parts for name, tensor in part.items()}
        assert sum(map(len, parts)) == len(found) == len(expected)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    sources = {ranks[0] for ranks in trainer.weight_sources}
    sizes = [sum(size for _, size in sent) for _, sent in answers]
    assert [size > 0 for size in sizes] == [rank in sources for rank in range(layout.num_ranks)]
    assert sum(sizes) == 2 * sum(4 * tensor.numel() for tensor in expected.values())
