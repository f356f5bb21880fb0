"""Hashes of tensors as SGLang (0.5.17) makes them: one on a CPU, another on a GPU, which the bytes need not leave.

Both take a tensor in parts, since an engine hashes several of the trainer's as one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class TensorHasher(Protocol):
    """Hashes bytes that come in parts."""

    def update(self, flat: Tensor) -> None:
        """Take more; [N] uint8."""

    def hexdigest(self) -> str:
        """16 hex digits of all that came."""


def build_hasher(device_type: str) -> TensorHasher:
    """The hash of an engine on that kind of device.

    Args:
        device_type: ``cpu`` or ``cuda``.
    """
    return TileHasher() if device_type == "cuda" else Sha256Hasher()


def bring_to_host(hashers: Iterable[TensorHasher]) -> None:
    """Read what hashers hold on a GPU in one copy: hundreds of small ones would each wait for the GPU.

    Args:
        hashers: that have taken everything.
    """
    tiled = [hasher for hasher in hashers if isinstance(hasher, TileHasher)]
    held = [sums for hasher in tiled for _, sums in hasher.sums]
    if not held:
        return
    read = iter(torch.cat(held, 1).cpu().tensor_split(list(accumulate(sums.shape[1] for sums in held[:-1])), 1))
    for hasher in tiled:
        hasher.sums = [(first, next(read)) for first, _ in hasher.sums]


class Sha256Hasher:
    """The first 8 bytes of SHA-256."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, flat: Tensor) -> None:
        """Take more; [N] uint8."""
        # A copy: memory that numpy has seen cannot be given away any more, and on a CPU this is the trainer's own.
        self._hash.update(memoryview(flat.to("cpu", copy=True).numpy()))

    def hexdigest(self) -> str:
        """16 hex digits of all that came."""
        return self._hash.hexdigest()[:16]


class TileHasher:
    """Sums of mixed words, tile by tile, mixed again: every word counts with its place, and the order of sums does not.

    Formula, with 32-bit words ``v_i`` of the bytes, padded with zeros, n of them, in tiles of 8192::

        h = mix(sum_{i in tile} mix(v_i ^ (i c + s) ^ rotate(i, r)) ^ 4 n)      for two (c, s, r), modulo 2^32
        hash = splitmix64(sum over tiles of (h_1 << 32 | h_2))                   modulo 2^64

    Attributes:
        sums: first tile -> sums of the words of one part, [2, tiles] int32.

    Source:
        ``gpu_tensor_hash`` of SGLang 0.5.17. The inner sums are a kernel's (:mod:`tile_kernel`), one for a part.
    """

    def __init__(self) -> None:
        self._num_words = 0
        self._rest = torch.empty(0, dtype=torch.uint8)
        self.sums: list[tuple[int, Tensor]] = []

    def update(self, flat: Tensor) -> None:
        """Take more; [N] uint8."""
        from rlrecipes.weight_sync.tile_kernel import TILE_WORDS, compute_tile_sums

        if len(self._rest) or flat.storage_offset() % 4:
            flat = torch.cat((self._rest.to(flat.device), flat))
        num_whole = len(flat) // 4 * 4
        self._rest = flat[num_whole:].clone()
        words = flat[:num_whole].view(torch.int32)
        if len(words):
            self.sums.append((self._num_words // TILE_WORDS, compute_tile_sums(words, self._num_words)))
            self._num_words += len(words)

    def hexdigest(self) -> str:
        """16 hex digits of all that came."""
        if len(self._rest):
            self.update(torch.zeros(4 - len(self._rest), dtype=torch.uint8, device=self._rest.device))
        if not self._num_words:
            return f"{0:016x}"
        num_tiles = max(first + sums.shape[1] for first, sums in self.sums)
        tiles = np.zeros((2, num_tiles), np.uint32)
        for first, sums in self.sums:
            tiles[:, first : first + sums.shape[1]] += sums.cpu().numpy().view(np.uint32)
        high, low = _mix(tiles ^ np.uint32(4 * self._num_words & 0xFFFFFFFF)).astype(np.uint64)
        total = int(((high << np.uint64(32)) | low).sum(dtype=np.uint64))
        return f"{_splitmix64(total):016x}"


def _mix(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """MurmurHash3's finalizer, modulo 2^32."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    mixed: NDArray[np.uint32] = x ^ (x >> np.uint32(16))
    return mixed


def _splitmix64(x: int) -> int:
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
