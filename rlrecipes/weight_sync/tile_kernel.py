"""Sums of mixed words, tile by tile, in one pass over a GPU's memory. Owns the kernel; hashes nothing to the end."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_WORDS = 8192
SEED = 0x243F6A88
_SEEDS = (SEED, ((SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
_BLOCK = 2048
"""Words that a program works on at a time."""


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    """MurmurHash3's finalizer."""
    x = (x ^ (x >> 16)) * tl.full((), 0x85EBCA6B, tl.uint32)
    x = (x ^ (x >> 13)) * tl.full((), 0xC2B2AE35, tl.uint32)
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["start", "num_words", "num_tiles"])  # type: ignore[untyped-decorator]
def _sum_tiles(  # type: ignore[no-untyped-def]  # noqa: PLR0913 (pointers and numbers, one by one)
    words,
    sums,
    start,
    num_words,
    num_tiles,
    SEED_1: tl.constexpr,
    SEED_2: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile a program; words of it that lie in other parts count 0 here."""
    number = tl.program_id(0).to(tl.int64)
    first = (start // TILE + number) * TILE
    sum_1 = tl.zeros((BLOCK,), tl.uint32)
    sum_2 = tl.zeros((BLOCK,), tl.uint32)
    for offset in range(0, TILE, BLOCK):
        places = first + offset + tl.arange(0, BLOCK)
        at = places - start
        is_real = (at >= 0) & (at < num_words)
        value = tl.load(words + at, mask=is_real, other=0).to(tl.uint32)
        place = places.to(tl.uint32)
        placed_1 = place * tl.full((), 0x27D4EB2D, tl.uint32) + tl.full((), SEED_1, tl.uint32)
        placed_2 = place * tl.full((), 0x165667B1, tl.uint32) + tl.full((), SEED_2, tl.uint32)
        mixed_1 = _mix(value ^ placed_1 ^ ((place << 15) | (place >> 17)))
        mixed_2 = _mix(value ^ placed_2 ^ ((place << 13) | (place >> 19)))
        sum_1 += tl.where(is_real, mixed_1, 0).to(tl.uint32)
        sum_2 += tl.where(is_real, mixed_2, 0).to(tl.uint32)
    tl.store(sums + number, tl.sum(sum_1, 0).to(tl.int32))
    tl.store(sums + num_tiles + number, tl.sum(sum_2, 0).to(tl.int32))


def compute_tile_sums(words: Tensor, start: int) -> Tensor:
    """Sums of mixed words, by tile, modulo 2^32.

    Formula, with words ``v_i``, i counted from ``start``, in tiles of 8192 counted from 0::

        sum_{i in tile} mix(v_i ^ (i c + s) ^ rotate(i, r))     for two (c, s, r)

    Args:
        words: [N] int32, at least one.
        start: place of the first.

    Returns:
        [2, tiles] int32, of the tiles that ``words`` reach into, the first being ``start // TILE_WORDS``.
    """
    num_tiles = (start + len(words) - 1) // TILE_WORDS - start // TILE_WORDS + 1
    sums = torch.empty((2, num_tiles), dtype=torch.int32, device=words.device)
    _sum_tiles[(num_tiles,)](
        words, sums, start, len(words), num_tiles, SEED_1=_SEEDS[0], SEED_2=_SEEDS[1], TILE=TILE_WORDS, BLOCK=_BLOCK
    )
    return sums
