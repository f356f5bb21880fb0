"""Log-probabilities of target tokens from logits split over the vocabulary. Owns their gradient; refuses masks.

Rows of the vocabulary that only pad it take no part: their logits may hold anything and get no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 26}
"""Most logits turned to float32 at a time: on a CPU what a core's cache holds, so that many passes read memory once."""


class _VocabularyLogprobs(torch.autograd.Function):
    """See :func:`compute_logprobs`; probabilities are computed again in backward, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, vocab_size: int, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        """Compute logprobs and entropy, [T] each."""
        first = group.rank() * logits.shape[1]
        width = min(max(vocab_size - first, 0), logits.shape[1])
        is_local = (targets >= first) & (targets < first + width)
        local_targets = torch.where(is_local, targets - first, 0)
        highest, sums = _compute_local_sums(logits[:, :width], local_targets, temperature)
        sums[2].masked_fill_(~is_local, 0)
        if group.size() > 1:
            local_highest = highest.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            _move_sums(sums, local_highest, highest, is_local)
            dist.all_reduce(sums, group=group)
        log_normalizer = sums[0].log()
        logprobs, entropy = sums[2] - log_normalizer, log_normalizer - sums[1] / sums[0]
        ctx.save_for_backward(logits, local_targets, is_local, log_normalizer + highest, entropy)
        ctx.temperature, ctx.width = temperature, width
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """``d logprob / d z = onehot - p`` and ``d entropy / d z = -p (log p + entropy)``, z = logits / temperature."""
        logits, local_targets, is_local, log_normalizer, entropy = ctx.saved_tensors
        width, scale = ctx.width, 1 / ctx.temperature
        grad_logprobs, grad_entropy = (None if grad is None else grad * scale for grad in grads)
        out = torch.empty_like(logits)
        out[:, width:] = 0
        for rows in _chunks(logits[:, :width]):
            z = torch.add(-log_normalizer[rows, None], logits[rows, :width], alpha=scale)  # log p
            factor = torch.zeros_like(entropy[rows, None]) if grad_logprobs is None else -grad_logprobs[rows, None]
            if grad_entropy is not None:
                factor = factor - (z + entropy[rows, None]) * grad_entropy[rows, None]
            out[rows, :width] = z.exp_().mul_(factor)
        if grad_logprobs is not None and width:
            local = torch.where(is_local, grad_logprobs, 0).to(out.dtype)
            out.scatter_add_(1, local_targets[:, None], local[:, None])
        return out, None, None, None, None


def _compute_local_sums(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Highest z = logits / temperature, [T]; sums of e^y, y e^y, and y of the target, [3, T], with y = z - highest."""
    num_tokens, width = logits.shape
    highest = logits.new_full((num_tokens,), -torch.inf, dtype=torch.float32)
    sums = logits.new_zeros((3, num_tokens), dtype=torch.float32)
    for rows in _chunks(logits) if width else ():
        z = logits[rows].float() * (1 / temperature)
        highest[rows] = z.amax(1)
        z.sub_(highest[rows, None])
        sums[2, rows] = z.gather(1, targets[rows, None]).squeeze(1)
        p = z.exp()
        sums[0, rows] = p.sum(1)
        sums[1, rows] = torch.linalg.vecdot(p, z)
    return highest, sums


def _move_sums(sums: Tensor, local: Tensor, highest: Tensor, is_local: Tensor) -> None:
    """Make sums taken relative to ``local`` relative to ``highest``."""
    shift = torch.where(local == -torch.inf, 0, local - highest)  # a rank may hold nothing but padding
    factor = shift.exp()
    sums[1] = (sums[1] + shift * sums[0]) * factor
    sums[0] *= factor
    sums[2] += torch.where(is_local, shift, 0)


def _chunks(logits: Tensor) -> list[slice]:
    num_tokens, width = logits.shape
    size = max(1, _CHUNK_ELEMENTS[logits.device.type] // max(1, width))
    return [slice(start, start + size) for start in range(0, num_tokens, size)]


def compute_logprobs(
    logits: Tensor, targets: Tensor, *, temperature: float, vocab_size: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and the entropy of the distribution it was taken from.

    Formula, over the ``vocab_size`` real rows::

        logprob_t = log_softmax(logits_t / temperature)[target_t]
        entropy_t = -sum_v p_tv log p_tv

    Args:
        logits: [T, V / TP], this rank's rows of the padded vocabulary.
        targets: [T] int64, below ``vocab_size``.
        temperature: > 0.
        vocab_size: rows that are no padding.
        group: TP ranks, in order of their rows; all of them call this together.

    Returns:
        (logprobs, entropy): [T] float32 nats, the same on every rank of the group; both carry gradient.
    """
    both: tuple[Tensor, Tensor] = _VocabularyLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, targets, temperature, vocab_size, group
    )
    return both
