"""What a sync needs of an engine. Owns the words of the exchange; engines/sglang's client satisfies it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

NamedTensors = Iterator[tuple[str, torch.Tensor]]
"""Whole tensors under their HF names."""


class Handover(Protocol):
    """What becomes of memory that trainer and engines share while weights travel."""

    def is_asleep(self, receiver: WeightReceiver) -> bool:
        """Whether an engine is paused already, and has given its memory back."""

    async def before_weights(self) -> None:
        """Engines that sleep get memory for their weights; nothing is in it."""

    async def after_weights(self) -> None:
        """They get the rest, and are ready to continue."""


class WeightReceiver(Protocol):
    """One engine, as SGLang's HTTP API sees it. Every call raises WeightSyncError or EngineError on failure."""

    @property
    def url(self) -> str:
        """Address, for messages."""

    async def pause(self, mode: str) -> None:
        """Stop generating; ``mode`` says what happens to running requests."""

    async def continue_generation(self) -> None:
        """Generate again."""

    async def flush_cache(self) -> None:
        """Forget the prefix cache, which the old weights filled."""

    async def begin_weight_update(self) -> None:
        """Open an update, where the server's API has it."""

    async def end_weight_update(self) -> None:
        """Close it, where the server's API has it."""

    async def update_weights_from_tensor(self, payloads: Sequence[str], *, load_format: str | None = None) -> None:
        """Take tensors from shared memory, one payload a rank: a list of (name, tensor), or a flattened bucket."""

    async def update_weights_from_disk(self, path: str) -> None:
        """Read an HF directory."""

    async def init_weights_update_group(
        self, *, address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join a process group; collective with its other members."""

    async def update_weights_from_distributed(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: str,
    ) -> None:
        """Receive one broadcast of all bytes in this order; collective."""

    async def destroy_weights_update_group(self, *, group_name: str) -> None:
        """Leave the group."""

    async def update_weight_version(self, version: int) -> None:
        """Stamp what follows."""

    async def weights_checksum(self) -> dict[str, str]:
        """Hash of every tensor, under the server's own (fused) names, tensor-parallel rank 0."""
