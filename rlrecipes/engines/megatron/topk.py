"""Logits at chosen tokens, and the likeliest tokens, over a vocabulary split over TP. Owns both; refuses losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Gather(torch.autograd.Function):
    """Logits [N, K] of tokens whose rows lie on any rank; the gradient goes to the rank that has them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, token_ids: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Take what lies here and add up over ranks."""
        first = group.rank() * logits.shape[1]
        is_local = (token_ids >= first) & (token_ids < first + logits.shape[1])
        local_ids = torch.where(is_local, token_ids - first, 0)
        ctx.save_for_backward(is_local, local_ids)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        found = torch.where(is_local, logits.gather(1, local_ids).float(), 0.0)
        if group.size() > 1:
            dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Add each gradient to its row; a token asked for twice gets both."""
        is_local, local_ids = ctx.saved_tensors
        grad = grads[0].new_zeros(ctx.shape)
        grad.scatter_add_(1, local_ids, torch.where(is_local, grads[0], 0.0))
        return grad.to(ctx.dtype), None, None


def gather_logits(logits: Tensor, token_ids: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Logits of chosen tokens.

    Args:
        logits: [N, V / TP], this rank's rows of the vocabulary.
        token_ids: [N, K] int64, of the whole vocabulary.
        group: TP ranks, in order of their rows; all of them call this together.

    Returns:
        [N, K] float32, the same on every rank of the group; carries gradient.
    """
    found: Tensor = _Gather.apply(logits, token_ids, group)  # type: ignore[no-untyped-call]
    return found


def find_topk(logits: Tensor, num_tokens: int, *, vocab_size: int, group: dist.ProcessGroup) -> Tensor:
    """The likeliest tokens of each position, likeliest first.

    Args:
        logits: [N, V / TP], this rank's rows of the padded vocabulary.
        num_tokens: K, at most ``vocab_size``.
        vocab_size: rows that are no padding.
        group: TP ranks, in order of their rows; all of them call this together.

    Returns:
        [N, K] int64, the same on every rank of the group.
    """
    first = group.rank() * logits.shape[1]
    is_padding = torch.arange(first, first + logits.shape[1], device=logits.device) >= vocab_size
    local = logits.detach().float().masked_fill(is_padding, -torch.inf)
    values, ids = local.topk(min(num_tokens, logits.shape[1]), dim=1)
    ids = ids + first
    if group.size() > 1:
        all_values, all_ids = ([torch.empty_like(x) for _ in range(group.size())] for x in (values, ids))
        dist.all_gather(all_values, values, group=group)
        dist.all_gather(all_ids, ids, group=group)
        values, ids = torch.cat(all_values, 1), torch.cat(all_ids, 1)
    return ids.gather(1, values.topk(num_tokens, dim=1).indices)


def compute_logprobs_at(
    logits: Tensor,
    targets: Tensor,
    logprobs: Tensor,
    token_ids: Tensor,
    *,
    temperature: float,
    group: dist.ProcessGroup,
) -> Tensor:
    """Logprobs of chosen tokens, by the normaliser that the target's logprob already has.

    Formula::

        logprobs[token] = (logits[token] - logits[target]) / temperature + logprobs[target]

    Args:
        logits: [N, V / TP], this rank's rows of the vocabulary.
        targets: [N] int64.
        logprobs: [N] nats, of the targets in the whole distribution at ``temperature``, with gradient.
        token_ids: [N, K] int64.
        temperature: > 0.
        group: TP ranks.

    Returns:
        [N, K] float32 nats; carries gradient.
    """
    found = gather_logits(logits, torch.cat((token_ids, targets[:, None]), 1), group)
    return (found[:, :-1] - found[:, -1:]) / temperature + logprobs[:, None]
