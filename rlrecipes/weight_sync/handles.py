"""Buckets as handles of GPU memory: an engine reads them where they lie. Runs inside every trainer process at once.

A handle opens only where its GPU is visible, and an engine rank sees the GPUs of its engine alone. So every bucket is
broadcast from its source to all trainer ranks, and each rank makes the handles for the engine ranks on its own GPU: one
bucket of memory on each, whatever the layouts of the two sides. The source hands the handles in, one for each engine
rank in the engine's order, which is how SGLang (0.5.17) picks them.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tenacity import retry, retry_if_exception_message, stop_after_attempt
from torch.multiprocessing.reductions import reduce_tensor

from rlrecipes.weight_sync.buckets import Bucket
from rlrecipes.weight_sync.protocols import WeightReceiver

LOAD_FORMAT = "flattened_bucket"
_ALIGNMENT = 16
"""Bytes; each tensor starts at a multiple, so that the bytes can be looked at as any dtype."""
_NUM_SHARING_ATTEMPTS = 30
_DEVICE_ARGUMENT = 6
"""Where ``reduce_tensor`` puts the number of the GPU."""


@dataclass(frozen=True, slots=True)
class SharingEngine:
    """An engine on the trainer's GPUs.

    Attributes:
        receiver: its client.
        trainer_ranks: for each of its ranks, the trainer rank on the same GPU.
    """

    receiver: WeightReceiver
    trainer_ranks: tuple[int, ...]


class HandleTransport:
    """Moves buckets from one source at a time; every trainer rank takes part in each.

    Args:
        engines: every engine, in one order on all ranks.
        device: where buckets lie.
    """

    def __init__(self, engines: Sequence[SharingEngine], *, device: str) -> None:
        self._engines, self._device = engines, device
        self._rank, self._num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    async def send(self, bucket: Bucket) -> None:
        """Called by the source: returns when every engine has taken the bucket."""
        tensors, num_bytes = _place(bucket)
        flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        for entry, (_, tensor) in zip(tensors, bucket.tensors, strict=True):
            flat[entry.start_idx : entry.end_idx].copy_(tensor.reshape(-1).view(torch.uint8))
        self._exchange((tensors, num_bytes), self._rank)
        payloads = self._share(flat, tensors, self._rank)
        await asyncio.gather(
            *(
                engine.receiver.update_weights_from_tensor(
                    [payloads[number, index] for index in range(len(engine.trainer_ranks))], load_format=LOAD_FORMAT
                )
                for number, engine in enumerate(self._engines)
            )
        )
        self._finish()

    def relay(self, source: int) -> bool:
        """Called by every other rank, until it says no.

        Args:
            source: the rank that sends.

        Returns:
            Whether there was a bucket.
        """
        found = self._exchange(None, source)
        if found is None:
            return False
        tensors, num_bytes = found
        flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._share(flat, tensors, source)
        self._finish()
        return True

    def end(self) -> None:
        """Called by the source: there are no more."""
        self._exchange(None, self._rank)

    def _exchange(self, content: Any, source: int) -> Any:
        if self._num_ranks == 1:
            return content
        box = [content]
        dist.broadcast_object_list(box, src=source, device=torch.device(self._device))
        return box[0]

    def _share(self, flat: torch.Tensor, tensors: Any, source: int) -> dict[tuple[int, int], str]:
        """Handles of every engine rank, by engine and rank."""
        if self._num_ranks > 1:
            dist.broadcast(flat, src=source)
        if flat.is_cuda:
            torch.cuda.synchronize()  # an engine reads on streams of its own
        content = {"flattened_tensor": flat, "metadata": tensors}
        own = {
            (number, index): to_payload(content)
            for number, engine in enumerate(self._engines)
            for index, rank in enumerate(engine.trainer_ranks)
            if rank == self._rank
        }
        if self._num_ranks == 1:
            return own
        parts: list[dict[tuple[int, int], str]] = [{} for _ in range(self._num_ranks)]
        dist.all_gather_object(parts, own)
        return {key: payload for part in parts for key, payload in part.items()}

    def _finish(self) -> None:
        """Memory must outlive the reading of every engine rank."""
        if self._num_ranks > 1:
            dist.barrier()
        if self._device == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def _place(bucket: Bucket) -> tuple[list[SimpleNamespace], int]:
    """What lies where in the flat bucket, under the names of SGLang's FlattenedTensorMetadata; and its bytes.

    Plain namespaces: SGLang reads attributes, and its own class could be named only where it is installed.
    """
    entries, end = [], 0
    for name, tensor in bucket.tensors:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        size = tensor.numel() * tensor.element_size()
        end = start + size
        entries.append(
            SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=end, numel=size)
        )
    return entries, end


class _HandlePickler(ForkingPickler):
    """Names GPUs by their UUID, since their numbers differ from process to process; SGLang looks for either."""

    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reduce_tensor(value)  # type: ignore[no-untyped-call]
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        return rebuild, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])


retry_slow_sharing = retry(
    retry=retry_if_exception_message(match="Shared memory manager connection has timed out"),
    stop=stop_after_attempt(_NUM_SHARING_ATTEMPTS),
    reraise=True,
)
"""torch waits one second for the process that keeps shared memory of a CPU; on a busy host that is not enough."""


@retry_slow_sharing
def to_payload(content: Any) -> str:
    """Base64 of a pickle in which tensors are handles; each may be read by one process.

    Args:
        content: tensors in plain containers.
    """
    stream = io.BytesIO()
    _HandlePickler(stream).dump(content)
    return base64.b64encode(stream.getvalue()).decode()
