"""Which tokens of packed samples a context-parallel rank holds, and the exchanges between these ranks.

Every sample is cut into 2 CP equal chunks; rank r holds chunks r and 2 CP - 1 - r, so that causal attention is as much
work on each. Samples must be padded to a multiple of 2 CP before. Transformer Engine's kernels expect this very split.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def pad_starts(cu_seqlens: Tensor, cp_size: int) -> Tensor:
    """Where samples start once each is padded to a multiple of 2 CP.

    Args:
        cu_seqlens: [S + 1] int32, where each sample starts, and the end.
        cp_size: CP.

    Returns:
        [S + 1] int32; ``cu_seqlens`` itself without context parallelism.
    """
    if cp_size == 1:
        return cu_seqlens
    multiple = 2 * cp_size
    lengths = (cu_seqlens.diff() + multiple - 1) // multiple * multiple
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=cu_seqlens.dtype), (1, 0))


@functools.lru_cache(maxsize=32)  # by identity of the tensor: every layer asks for the same ones
def find_positions(cu_seqlens: Tensor, cp_size: int, cp_rank: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Which tokens a rank holds, in order.

    Args:
        cu_seqlens: [S + 1], where each padded sample starts, and the end.
        cp_size: CP.
        cp_rank: whose tokens.
        num_tokens: T / CP; given, so that a GPU need not be waited for.

    Returns:
        The sample of each and its position within the sample, [T / CP] int64 both.
    """
    lengths = cu_seqlens.diff().long()
    held = lengths // cp_size
    sample = torch.arange(len(lengths), device=held.device).repeat_interleave(held, output_size=num_tokens)
    within = torch.arange(len(sample), device=held.device) - (held.cumsum(0) - held)[sample]
    if cp_size == 1:
        return sample, within
    chunk = (held // 2)[sample]
    return sample, within + torch.where(within < chunk, cp_rank, 2 * cp_size - 2 - cp_rank) * chunk


@functools.lru_cache(maxsize=32)
def find_slots(cu_seqlens: Tensor, cp_size: int, cp_rank: int, num_tokens: int) -> Tensor:
    """Where the tokens of a rank lie among all, [T / CP] int64; see :func:`find_positions`."""
    sample, position = find_positions(cu_seqlens, cp_size, cp_rank, num_tokens)
    return cu_seqlens[sample] + position


class _Sum(torch.autograd.Function):
    """The sum over ranks. Each rank goes on to compute the same with it, so each keeps its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Add up."""
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Nothing to exchange."""
        return grads[0], None


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of x over ranks, of whose result every rank computes the same loss.

    The gradient of that one loss stays what it is: it is neither summed nor divided.

    Args:
        x: of this rank.
        group: CP ranks; all of them call this together.
    """
    if group.size() == 1:
        return x
    total: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return total


class _GatherTokens(torch.autograd.Function):
    """See :func:`gather_tokens`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cu_seqlens: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Gather, then put in order."""
        size = group.size()
        ctx.order = torch.cat([find_slots(cu_seqlens, size, rank, len(x)) for rank in range(size)])
        ctx.group = group
        gathered = x.new_empty(size * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return torch.empty_like(gathered).index_copy_(0, ctx.order, gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Add up what every rank's queries ask of this rank's tokens."""
        by_rank = grads[0].index_select(0, ctx.order)
        own = by_rank.new_empty(len(by_rank) // ctx.group.size(), *by_rank.shape[1:])
        dist.reduce_scatter_tensor(own, by_rank, group=ctx.group)
        return own, None, None


def gather_tokens(x: Tensor, cu_seqlens: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All tokens in packed order, from the shares of all ranks; each rank computes something else with them.

    Args:
        x: [T / CP, ...], this rank's tokens.
        cu_seqlens: [S + 1], where each padded sample starts; the last is T.
        group: CP ranks; all of them call this together.

    Returns:
        [T, ...]; the gradient of a token is the sum over ranks.
    """
    gathered: Tensor = _GatherTokens.apply(x, cu_seqlens, group)  # type: ignore[no-untyped-call]
    return gathered
