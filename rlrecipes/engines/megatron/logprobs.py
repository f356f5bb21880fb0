"""Log-probabilities of target tokens from logits split over the vocabulary. Owns their gradient; refuses masks.

Rows of the vocabulary that only pad it take no part: their logits may hold anything and get no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 24
"""Most logits turned to float32 at a time."""


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
        num_tokens = len(targets)
        log_normalizer, target_logit, mean_logit = logits.new_empty((3, num_tokens), dtype=torch.float32)
        for rows in _chunks(num_tokens, width):
            z = logits[rows, :width].float() / temperature
            highest = z.amax(1) if width else z.new_full((len(z),), -torch.inf)
            if group.size() > 1:
                dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            z = z - highest[:, None]
            p = z.exp()
            chosen = z.gather(1, local_targets[rows, None]).squeeze(1) if width else torch.zeros_like(highest)
            sums = torch.stack([p.sum(1), (p * z).sum(1), torch.where(is_local[rows], chosen, 0)])
            if group.size() > 1:
                dist.all_reduce(sums, group=group)
            log_normalizer[rows] = sums[0].log() + highest
            target_logit[rows] = sums[2] + highest
            mean_logit[rows] = sums[1] / sums[0] + highest
        entropy = log_normalizer - mean_logit
        ctx.save_for_backward(logits, local_targets, is_local, log_normalizer, entropy)
        ctx.temperature, ctx.width = temperature, width
        ctx.set_materialize_grads(False)
        return target_logit - log_normalizer, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """``d logprob / d z = onehot - p`` and ``d entropy / d z = -p (log p + entropy)``, z = logits / temperature."""
        logits, local_targets, is_local, log_normalizer, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = grads
        out = torch.zeros_like(logits) if ctx.width < logits.shape[1] else torch.empty_like(logits)
        for rows in _chunks(len(log_normalizer), ctx.width):
            log_p = logits[rows, : ctx.width].float() / ctx.temperature - log_normalizer[rows, None]
            p = log_p.exp()
            grad = torch.zeros_like(p) if grad_logprobs is None else p * -grad_logprobs[rows, None]
            if grad_logprobs is not None and ctx.width:
                local = torch.where(is_local[rows], grad_logprobs[rows], 0)
                grad.scatter_add_(1, local_targets[rows, None], local[:, None])
            if grad_entropy is not None:
                grad -= p * (log_p + entropy[rows, None]) * grad_entropy[rows, None]
            out[rows, : ctx.width] = grad / ctx.temperature
        return out, None, None, None, None


def _chunks(num_tokens: int, width: int) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS // max(1, width))
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
