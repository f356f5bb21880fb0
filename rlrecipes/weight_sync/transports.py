"""How buckets travel from one source rank to every engine. Runs inside a trainer process.

A source is the trainer rank that owns one pipeline stage's whole tensors (TP rank 0, DP rank 0 of the stage).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName, PrefixStore, _new_process_group_helper, _world
from torch.distributed.rendezvous import rendezvous

from rlrecipes.errors import WeightSyncError
from rlrecipes.weight_sync.buckets import Bucket
from rlrecipes.weight_sync.handles import LOAD_FORMAT, retry_slow_sharing, to_payload
from rlrecipes.weight_sync.protocols import WeightReceiver


@dataclass(frozen=True, slots=True)
class Destination:
    """One engine as a source sees it.

    Attributes:
        receiver: its client.
        num_ranks: its tensor-parallel size.
    """

    receiver: WeightReceiver
    num_ranks: int


class Transport(Protocol):
    """Moves buckets; ``connect`` once, ``send`` any number of times, ``close`` at the end."""

    async def connect(self) -> None:
        """Prepare; collective with the engines where the transport is."""

    async def send(self, bucket: Bucket) -> None:
        """Return when every engine has taken the bucket."""

    async def close(self) -> None:
        """Undo ``connect``."""


class TensorTransport:
    """Shared memory of one host, by name: for engines on a CPU.

    Args:
        destinations: every engine.
    """

    def __init__(self, destinations: Sequence[Destination]) -> None:
        self._destinations = destinations

    async def connect(self) -> None:
        """Share by file name: descriptors cannot travel over HTTP."""
        torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]

    async def send(self, bucket: Bucket) -> None:
        """Each engine rank gets a pickle of its own: reading one consumes a reference to the memory."""
        shared = [(name, _to_shared(tensor)) for name, tensor in bucket.tensors]
        await asyncio.gather(
            *(
                destination.receiver.update_weights_from_tensor(
                    [to_payload(shared) for _ in range(destination.num_ranks)]
                )
                for destination in self._destinations
            )
        )

    async def close(self) -> None:
        """Nothing is held between sends."""


@retry_slow_sharing
def _to_shared(tensor: torch.Tensor) -> torch.Tensor:
    shared: torch.Tensor = tensor.cpu().clone().share_memory_()  # type: ignore[no-untyped-call]
    return shared


class DistributedTransport:
    """Broadcast over a process group of this source and every engine rank.

    Args:
        destinations: every engine.
        address: of this source, as engines reach it.
        port: free on this source's host.
        group_name: one per source.
        backend: ``gloo`` or ``nccl``.
        timeout_s: longest time of one collective.
    """

    def __init__(
        self,
        destinations: Sequence[Destination],
        *,
        address: str,
        port: int,
        group_name: str,
        backend: str,
        timeout_s: float,
    ) -> None:
        self._destinations = destinations
        self._address, self._port = address, port
        self._group_name, self._backend, self._timeout = group_name, backend, timedelta(seconds=timeout_s)
        self._group: dist.ProcessGroup | None = None

    async def connect(self) -> None:
        """Rank 0 is this source; engines follow in order, each with its tensor-parallel ranks."""
        world_size = 1 + sum(destination.num_ranks for destination in self._destinations)
        joining, offset = [], 1
        for destination in self._destinations:
            joining.append(
                destination.receiver.init_weights_update_group(
                    address=self._address,
                    port=self._port,
                    rank_offset=offset,
                    world_size=world_size,
                    group_name=self._group_name,
                    backend=self._backend,
                )
            )
            offset += destination.num_ranks
        own = asyncio.to_thread(self._join, world_size)
        self._group, *_ = await asyncio.gather(own, *joining)

    def _join(self, world_size: int) -> dist.ProcessGroup:
        address = f"tcp://{self._address}:{self._port}"
        store, rank, size = next(rendezvous(address, 0, world_size, timeout=self._timeout))
        store.set_timeout(self._timeout)
        # The engine forms a group outside its default one in just this way; names must match to meet.
        group, _ = _new_process_group_helper(
            size,
            rank,
            [],
            dist.Backend(self._backend),
            PrefixStore(self._group_name, store),
            group_name=GroupName(self._group_name),
            timeout=self._timeout,
        )
        _world.pg_group_ranks[group] = {index: index for index in range(world_size)}
        if not isinstance(group, dist.ProcessGroup):
            raise WeightSyncError("weight_sync", "the update group could not be formed", "see the engines' logs")
        return group

    async def send(self, bucket: Bucket) -> None:
        """One broadcast for all tensors of a kind: tensor by tensor, launches take longer than the bytes."""
        # An engine packs without gaps, so tensors of another size could begin where their dtype cannot be read.
        for _, tensors in groupby(bucket.tensors, key=lambda named: named[1].dtype):
            await self._send_flat(list(tensors))

    async def _send_flat(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        receiving = (
            destination.receiver.update_weights_from_distributed(
                names=[name for name, _ in tensors],
                dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
                shapes=[list(tensor.shape) for _, tensor in tensors],
                group_name=self._group_name,
                load_format=LOAD_FORMAT,
            )
            for destination in self._destinations
        )
        await asyncio.gather(asyncio.to_thread(self._broadcast, tensors), *receiving)

    def _broadcast(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        flat = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in tensors])
        dist.broadcast(flat, src=0, group=self._group)
        if flat.is_cuda:
            torch.cuda.synchronize()  # it is freed on return

    async def close(self) -> None:
        """Leave together."""
        leaving = (d.receiver.destroy_weights_update_group(group_name=self._group_name) for d in self._destinations)
        await asyncio.gather(*leaving, return_exceptions=True)
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
