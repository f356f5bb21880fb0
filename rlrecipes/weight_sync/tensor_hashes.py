"""Hashes of tensors as SGLang (0.5.17) makes them: one on a CPU, another on a GPU, which the bytes need not leave.

Both take a tensor in parts, since an engine hashes several of the trainer's as one.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

_MASK = 0xFFFFFFFF
_MIX = (0x85EBCA6B, 0xC2B2AE35)
_POSITIONS = ((0x27D4EB2D, 15), (0x165667B1, 13))
"""Factor and rotation of a word's place, for each half of the hash."""
_SEED = 0x243F6A88
_SEEDS = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _MASK)
_TILE_WORDS = 8192
_CHUNK_WORDS = 512 * _TILE_WORDS
"""Worked on at once: 64-bit copies of them lie beside the tensor."""


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

    Source:
        ``gpu_tensor_hash`` of SGLang 0.5.17, a Triton kernel; here in torch, on any device.
    """

    def __init__(self) -> None:
        self._num_words = 0
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._sums: list[tuple[int, Tensor]] = []
        """First tile -> [2, tiles] sums of mixed words, modulo 2^32."""

    def update(self, flat: Tensor) -> None:
        """Take more; [N] uint8."""
        if len(self._rest) or flat.storage_offset() % 4:
            flat = torch.cat((self._rest.to(flat.device), flat))
        num_whole = len(flat) // 4 * 4
        self._rest = flat[num_whole:].clone()
        words = flat[:num_whole].view(torch.int32)
        for start in range(0, len(words), _CHUNK_WORDS):
            self._take(words[start : start + _CHUNK_WORDS])

    def _take(self, words: Tensor) -> None:
        places = torch.arange(self._num_words, self._num_words + len(words), device=words.device)
        values, first, before = words.long() & _MASK, self._num_words // _TILE_WORDS, self._num_words % _TILE_WORDS
        halves = []
        for seed, (factor, rotation) in zip(_SEEDS, _POSITIONS, strict=True):
            turned = (places << rotation | places >> 32 - rotation) & _MASK
            mixed = _mix(values ^ (places * factor + seed & _MASK) ^ turned)
            padded = functional.pad(mixed, (before, -(before + len(words)) % _TILE_WORDS))
            halves.append(padded.view(-1, _TILE_WORDS).sum(1) & _MASK)
        self._sums.append((first, torch.stack(halves)))
        self._num_words += len(words)

    def hexdigest(self) -> str:
        """16 hex digits of all that came."""
        if len(self._rest):
            self.update(torch.zeros(4 - len(self._rest), dtype=torch.uint8, device=self._rest.device))
        if not self._num_words:
            return f"{0:016x}"
        tiles = torch.zeros(2, -(-self._num_words // _TILE_WORDS), dtype=torch.int64)
        for first, sums in self._sums:
            tiles[:, first : first + sums.shape[1]] += sums.cpu()
        high, low = _mix((tiles & _MASK) ^ (4 * self._num_words & _MASK)).numpy().astype(np.uint64)
        total = int(((high << np.uint64(32)) | low).sum(dtype=np.uint64))
        return f"{_splitmix64(total):016x}"


def _mix(x: Tensor) -> Tensor:
    """MurmurHash3's finalizer over 32-bit numbers kept in 64 bits."""
    x = (x ^ (x >> 16)) * _MIX[0] & _MASK
    x = (x ^ (x >> 13)) * _MIX[1] & _MASK
    return x ^ (x >> 16)


def _splitmix64(x: int) -> int:
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
