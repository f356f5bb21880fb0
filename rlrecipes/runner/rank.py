"""What lives in one trainer process: the Megatron rank, and its way to the engines. Knows no ray.

Every method is collective over all ranks: the driver calls it on each, with that rank's own arguments.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlrecipes.plan.nodes import Plan
from rlrecipes.runner.machines import to_visible_devices

if TYPE_CHECKING:
    import numpy as np

    from rlrecipes.engines.megatron.rank import TrainerRank
    from rlrecipes.types import MicroBatch
    from rlrecipes.weight_sync.handles import HandleTransport
    from rlrecipes.weight_sync.protocols import NamedTensors
    from rlrecipes.weight_sync.transports import Transport


class RankWorker:
    """One trainer rank and its sender.

    Args:
        plan_json: the Plan.
        rank: of this process.
        master_address: where ranks meet.
        master_port: free on that host.
        address: at which engines reach this host.
        log_path: takes everything this process prints.
    """

    def __init__(
        self, plan_json: str, rank: int, master_address: str, master_port: int, address: str, log_path: str
    ) -> None:
        _redirect_output(Path(log_path))
        self._plan = Plan.model_validate_json(plan_json)
        gpu = self._plan.trainer.devices[rank].gpu
        if gpu is not None and self._plan.trainer.device == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = to_visible_devices(str(gpu))  # read when CUDA is first used
        self._rank = rank
        self._master = (master_address, master_port)
        self._address = address
        self._transport: Transport | None = None
        self._handles: HandleTransport | None = None
        self._trainer: TrainerRank | None = None
        self._loop = asyncio.new_event_loop()  # one for all calls: the engines' clients keep connections open

    def start(self) -> None:
        """Import, join the process group and build model and optimizer, weights still arbitrary."""
        from rlrecipes.engines.megatron.rank import TrainerRank

        address, port = self._master
        self._trainer = TrainerRank(
            self._plan.trainer, self._plan.model, rank=self._rank, master_address=address, master_port=port
        )
        gc.freeze()  # modules and model stay: a full collection would look through them, in the middle of a step

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

    def offload_state(self) -> None:
        """Give the device's memory back, but for the weights that are sent."""
        self.trainer.offload_state()

    def offload_weights(self) -> None:
        """Give the weights' memory back too."""
        self.trainer.offload_weights()

    def reload(self) -> None:
        """Take all of it again, filled as it was."""
        self.trainer.reload()

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

    def connect(self, engines: Sequence[tuple[str, int, tuple[int, ...]]]) -> None:
        """Prepare to send weights; where they travel as handles of GPU memory every rank does, elsewhere the sources.

        Args:
            engines: (url, number of ranks, for each of them the trainer rank on its GPU) of every engine to update.
        """
        from rlrecipes.engines.sglang.client import EngineClient
        from rlrecipes.engines.sglang.process import find_free_port
        from rlrecipes.weight_sync.handles import HandleTransport, SharingEngine
        from rlrecipes.weight_sync.transports import Destination, DistributedTransport, TensorTransport

        if is_sent_by_all(self._plan):
            sharing = [SharingEngine(EngineClient(url), ranks) for url, _, ranks in engines]
            self._handles = HandleTransport(sharing, device=self._plan.trainer.device)
            return
        if not self.trainer.is_weight_source:
            return
        destinations = [Destination(EngineClient(url), num_ranks) for url, num_ranks, _ in engines]
        timeout_s = self._plan.weight_sync.timeout_s
        if self._plan.weight_sync.transport == "tensor":
            self._transport = TensorTransport(destinations)
        elif self._plan.weight_sync.transport == "distributed":
            self._transport = DistributedTransport(
                destinations,
                address=self._address,
                port=find_free_port(),
                group_name=f"weights-{self._rank}",
                backend="gloo" if self._plan.trainer.device == "cpu" else "nccl",
                timeout_s=timeout_s,
            )
        if self._transport is not None:
            self._loop.run_until_complete(self._transport.connect())

    def send_weights(self, should_hash: bool, should_send: bool, stage: int) -> tuple[dict[str, str], int]:
        """Send every tensor of a pipeline stage. Its source sends; other ranks help to gather, or to pass on.

        Args:
            should_hash: whether checksums are wanted.
            should_send: whether engines get them; false only hashes.
            stage: whose turn it is.

        Returns:
            Checksums by engine name, and bytes sent; of the source alone.
        """
        from rlrecipes.weight_sync.checksums import ChecksumTee

        sources = self._plan.trainer.weight_sources[stage]
        handles = self._handles if should_send else None
        if self._rank != sources[0]:
            self._help(sources, handles)
            return {}, 0
        own = self.trainer.iter_hf_tensors()
        tee = ChecksumTee(own)
        tensors = iter(tee) if should_hash else own
        transport = (handles or self._transport) if should_send else None
        sending = _send_all(tensors, transport, self._plan.weight_sync.bucket_bytes)
        num_bytes = self._loop.run_until_complete(sending)
        if handles is not None:
            handles.end()
        return tee.checksums(), num_bytes

    def _help(self, sources: Sequence[int], handles: HandleTransport | None) -> None:
        """Ranks that gather meet the source at each of its buckets, the others in between."""
        from rlrecipes.weight_sync.buckets import to_buckets

        tensors = self.trainer.iter_hf_tensors() if self._rank in sources else iter(())
        for _ in to_buckets(tensors, self._plan.weight_sync.bucket_bytes):
            if handles is not None:
                handles.relay(sources[0])
        while handles is not None and handles.relay(sources[0]):
            pass

    def close(self) -> None:
        """Leave all process groups."""
        if self._transport is not None:
            self._loop.run_until_complete(self._transport.close())
        if self._trainer is not None:
            self._trainer.close()


def is_sent_by_all(plan: Plan) -> bool:
    """Whether weights travel as handles of GPU memory, which every trainer rank makes for the engines on its GPU.

    Args:
        plan: the Plan.
    """
    return plan.weight_sync.transport == "tensor" and plan.trainer.device == "cuda"


# No method: Ray would take a class with a coroutine for one that runs its calls in an event loop of its own.
async def _send_all(tensors: NamedTensors, transport: Transport | HandleTransport | None, bucket_bytes: int) -> int:
    """Send tensors in buckets, or only read them; returns their bytes."""
    from rlrecipes.weight_sync.buckets import to_buckets

    num_bytes = 0
    for bucket in to_buckets(tensors, bucket_bytes):
        num_bytes += bucket.num_bytes
        if transport is not None:
            await transport.send(bucket)
    return num_bytes


def _redirect_output(log_path: Path) -> None:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
