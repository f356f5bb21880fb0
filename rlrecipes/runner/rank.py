"""What lives in one trainer process: the Megatron rank, and its way to the engines. Knows no ray.

Every method is collective over all ranks: the driver calls it on each, with that rank's own arguments.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlrecipes.plan.nodes import Plan

if TYPE_CHECKING:
    import numpy as np

    from rlrecipes.engines.megatron.rank import TrainerRank
    from rlrecipes.types import MicroBatch
    from rlrecipes.weight_sync.transports import Transport


class RankWorker:
    """One trainer rank and its sender.

    Args:
        plan_json: the Plan.
        rank: of this process.
        master_address: where ranks meet.
        master_port: free on that host.
        log_path: takes everything this process prints.
    """

    def __init__(self, plan_json: str, rank: int, master_address: str, master_port: int, log_path: str) -> None:
        _redirect_output(Path(log_path))
        self._plan = Plan.model_validate_json(plan_json)
        self._rank = rank
        self._master = (master_address, master_port)
        self._transport: Transport | None = None
        self._trainer: TrainerRank | None = None
        self._loop = asyncio.new_event_loop()  # one for all calls: the engines' clients keep connections open

    def start(self) -> None:
        """Import, join the process group and build model and optimizer, weights still arbitrary."""
        from rlrecipes.engines.megatron.rank import TrainerRank

        address, port = self._master
        self._trainer = TrainerRank(
            self._plan.trainer, self._plan.model, rank=self._rank, master_address=address, master_port=port
        )

    @property
    def trainer(self) -> TrainerRank:
        """The rank, once started."""
        if self._trainer is None:
            raise RuntimeError("start() comes first")
        return self._trainer

    def load_hf(self, path: str) -> None:
        """Take weights from an HF directory."""
        self.trainer.load_hf(Path(path))

    def load_checkpoint(self, path: str) -> None:
        """Take everything from a checkpoint."""
        self.trainer.load_checkpoint(Path(path))

    def save_checkpoint(self, path: str) -> None:
        """Write everything into an empty directory."""
        self.trainer.save_checkpoint(Path(path))

    def export_hf(self, path: str, source: str) -> None:
        """Write an HF directory; tokenizer and configuration come from ``source``."""
        self.trainer.export_hf(Path(path), Path(source))

    def compute_logprobs(
        self, micro_batches: Sequence[MicroBatch], which: Literal["policy", "reference", "teacher"]
    ) -> list[np.ndarray]:
        """Logprobs of this data-parallel rank's micro-batches; empty on ranks that hold no output."""
        return self.trainer.compute_logprobs(list(micro_batches), which=which)

    def compute_teacher_topk(self, micro_batches: Sequence[MicroBatch], num_tokens: int) -> list[np.ndarray]:
        """The teacher's likeliest tokens and their logprobs, [T, 2 num_tokens] a micro-batch."""
        return self.trainer.compute_teacher_topk(list(micro_batches), num_tokens=num_tokens)

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        without_gradient: Sequence[MicroBatch],
        objective: Callable[..., Any],
    ) -> dict[str, float]:
        """One optimizer update."""
        return self.trainer.train_step(list(micro_batches), objective, list(without_gradient))

    def compute_values(self, micro_batches: Sequence[MicroBatch]) -> list[np.ndarray]:
        """Values by the critic of this data-parallel rank's micro-batches; empty on ranks that hold no output."""
        return self.trainer.compute_values(list(micro_batches))

    def critic_step(self, micro_batches: Sequence[MicroBatch], objective: Callable[..., Any]) -> dict[str, float]:
        """One optimizer update of the critic."""
        return self.trainer.critic_step(list(micro_batches), objective)

    def measure_peak_flops(self) -> float:
        """What this process's device multiplies at best, FLOP/s: measured on CPU, where no data sheet tells."""
        import torch

        size = 768
        left, right = torch.rand(size, size), torch.rand(size, size)
        durations = []
        for _ in range(5):
            started_s = time.perf_counter()
            torch.mm(left, right)
            durations.append(time.perf_counter() - started_s)
        return 2 * size**3 / min(durations)

    def connect(self, engines: Sequence[tuple[str, int]], port: int) -> None:
        """Prepare to send weights.

        Args:
            engines: (url, tensor-parallel size) of every engine to update.
            port: free on this host, for the process group of this source.
        """
        if not self.trainer.is_weight_source:
            return
        from rlrecipes.engines.sglang.client import EngineClient
        from rlrecipes.weight_sync.transports import Destination, DistributedTransport, TensorTransport

        destinations = [Destination(EngineClient(url), num_ranks) for url, num_ranks in engines]
        timeout_s = self._plan.weight_sync.timeout_s
        if self._plan.weight_sync.transport == "tensor":
            self._transport = TensorTransport(destinations)
        elif self._plan.weight_sync.transport == "distributed":
            self._transport = DistributedTransport(
                destinations,
                address=self._master[0],
                port=port,
                group_name=f"weights-{self._rank}",
                backend="gloo" if self._plan.trainer.device == "cpu" else "nccl",
                timeout_s=timeout_s,
            )
        if self._transport is not None:
            self._loop.run_until_complete(self._transport.connect())

    def send_weights(self, should_hash: bool, should_send: bool) -> tuple[dict[str, str], int]:
        """Send every tensor of this rank's pipeline stage; ranks that are no source only help to gather.

        Args:
            should_hash: whether checksums are wanted.
            should_send: whether engines get them; false only hashes.

        Returns:
            Checksums by engine name, and bytes sent.
        """
        from rlrecipes.weight_sync.buckets import to_buckets
        from rlrecipes.weight_sync.checksums import ChecksumTee

        tensors = self.trainer.iter_hf_tensors()
        if not self.trainer.is_weight_source:
            for _ in tensors:
                pass
            return {}, 0
        tee = ChecksumTee(tensors)
        num_bytes = 0

        async def send_all() -> None:
            nonlocal num_bytes
            for bucket in to_buckets(iter(tee) if should_hash else tensors, self._plan.weight_sync.bucket_bytes):
                num_bytes += bucket.num_bytes
                if should_send and self._transport is not None:
                    await self._transport.send(bucket)

        self._loop.run_until_complete(send_all())
        return tee.checksums(), num_bytes

    def close(self) -> None:
        """Leave all process groups."""
        if self._transport is not None:
            self._loop.run_until_complete(self._transport.close())
        if self._trainer is not None:
            self._trainer.close()


def _redirect_output(log_path: Path) -> None:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
