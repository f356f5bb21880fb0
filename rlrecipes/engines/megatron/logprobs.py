"""Log-probabilities of target tokens from logits split over the vocabulary. Owns their gradient; refuses masks.

The distribution is the one an engine samples from: logits over temperature, and of the softmax the tokens that top_k
and top_p leave, renormalised. Rows of the vocabulary that only pad it take no part: their logits may hold anything and
get no gradient.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlrecipes.engines.megatron.kept_set import KeptSet, find_kept_set

_CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 26}
"""Most logits turned to float32 at a time: on a CPU what a core's cache holds, so that many passes read memory once.

On a GPU only a cut distribution is computed so: see vocabulary_kernels.py for the whole one.
"""


class Logprobs(NamedTuple):
    """What :func:`compute_logprobs` finds.

    Attributes:
        logprobs: [T] float32 nats, with gradient.
        entropy: [T] float32 nats, with gradient.
        kept_log_mass: [T] float32 nats, at most 0, without gradient: how likely the kept tokens are together, 0 where
            nothing is cut. ``logprobs + kept_log_mass`` is the logprob in the whole distribution.
    """

    logprobs: Tensor
    entropy: Tensor
    kept_log_mass: Tensor


@dataclasses.dataclass(frozen=True)
class _Shard:
    """This rank's part of the vocabulary, and what is asked of it; see :func:`compute_logprobs`."""

    targets: Tensor
    """[T] rows of this shard; 0 where the target is elsewhere."""
    is_local: Tensor
    width: int
    """Leading columns that are no padding."""
    scale: float
    """1 / temperature."""
    top_p: float
    top_k: int
    group: dist.ProcessGroup

    @property
    def is_cut(self) -> bool:
        return self.top_p < 1 or self.top_k > 0


class _VocabularyLogprobs(torch.autograd.Function):
    """See :func:`compute_logprobs`; probabilities are computed again in backward, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, shard: _Shard) -> tuple[Tensor, Tensor, Tensor]:
        """Compute logprobs, entropy and kept log-mass, [T] each."""
        highest, sums = _compute_local_sums(logits[:, : shard.width], shard)
        if shard.group.size() > 1:
            local_highest = highest.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=shard.group)
            _move_sums(sums, local_highest, highest, shard.is_local)
            dist.all_reduce(sums, group=shard.group)
        mass, moment, target = sums
        total, kept = mass, None
        if shard.is_cut:
            kept, mass, moment = _compute_kept_sums(logits, shard, highest, total)
        log_mass = mass.log()
        logprobs, entropy = target - log_mass, log_mass - moment / mass
        cut = () if kept is None else (kept.cut, kept.share, kept.mass)
        ctx.save_for_backward(logits, highest, mass, entropy, *cut)
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        kept_log_mass = log_mass - total.log()
        ctx.mark_non_differentiable(kept_log_mass)
        return logprobs, entropy, kept_log_mass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """``d logprob / d z = onehot - p`` and ``d entropy / d z = -p (log p + entropy)``, z = logits / temperature.

        p is 0 for tokens that were cut: which ones these are does not follow the logits.
        """
        logits, highest, mass, entropy, *cut = ctx.saved_tensors
        shard = ctx.shard
        if has_kernels(logits) and shard.width and not cut:
            from rlrecipes.engines.megatron.vocabulary_kernels import compute_logits_gradient

            targets, given = torch.where(shard.is_local, shard.targets, -1), (grads[0], grads[1])
            state = highest, mass, entropy
            return compute_logits_gradient(logits, targets, state, given, width=shard.width, scale=shard.scale), None
        grad_logprobs, grad_entropy = (None if grad is None else grad * shard.scale for grad in grads[:2])
        width, log_mass = shard.width, mass.log()
        out = torch.empty_like(logits)
        out[:, width:] = 0
        for rows in _chunks(logits) if width else ():
            y = torch.add(-highest[rows, None], logits[rows, :width], alpha=shard.scale)
            factor = torch.zeros_like(entropy[rows, None]) if grad_logprobs is None else -grad_logprobs[rows, None]
            if grad_entropy is not None:
                factor = factor - (y + (entropy - log_mass)[rows, None]) * grad_entropy[rows, None]
            p = y.exp_()
            if cut:
                p.mul_(_weigh(KeptSet(*(part[rows] for part in cut)), p, shard, rows))
            out[rows, :width] = p.mul_(factor.div_(mass[rows, None]))
        if grad_logprobs is not None and width:
            local = torch.where(shard.is_local, grad_logprobs, 0).to(out.dtype)
            out.scatter_add_(1, shard.targets[:, None], local[:, None])
        return out, None


def has_kernels(logits: Tensor) -> bool:
    """Whether vocabulary_kernels.py computes what nothing is cut from."""
    return logits.is_cuda


def _compute_local_sums(logits: Tensor, shard: _Shard) -> tuple[Tensor, Tensor]:
    """Highest z = logits / temperature, [T]; sums of e^y, y e^y, and y of the target, [3, T], with y = z - highest."""
    num_tokens, width = logits.shape
    if has_kernels(logits) and width:
        from rlrecipes.engines.megatron.vocabulary_kernels import compute_row_sums

        highest, sums = compute_row_sums(logits, shard.targets, width=width, scale=shard.scale)
        sums[2].masked_fill_(~shard.is_local, 0)
        return highest, sums
    highest = logits.new_full((num_tokens,), -torch.inf, dtype=torch.float32)
    sums = logits.new_zeros((3, num_tokens), dtype=torch.float32)
    for rows in _chunks(logits) if width else ():
        z = logits[rows].float() * shard.scale
        highest[rows] = z.amax(1)
        z.sub_(highest[rows, None])
        sums[2, rows] = z.gather(1, shard.targets[rows, None]).squeeze(1)
        p = z.exp()
        sums[0, rows] = p.sum(1)
        sums[1, rows] = torch.linalg.vecdot(p, z)
    sums[2].masked_fill_(~shard.is_local, 0)
    return highest, sums


def _move_sums(sums: Tensor, local: Tensor, highest: Tensor, is_local: Tensor) -> None:
    """Make sums taken relative to ``local`` relative to ``highest``."""
    shift = torch.where(local == -torch.inf, 0, local - highest)  # a rank may hold nothing but padding
    factor = shift.exp()
    sums[1] = (sums[1] + shift * sums[0]) * factor
    sums[0] *= factor
    sums[2] += torch.where(is_local, shift, 0)


def _compute_kept_sums(
    logits: Tensor, shard: _Shard, highest: Tensor, totals: Tensor
) -> tuple[KeptSet, Tensor, Tensor]:
    """Find the kept set, without the target; and with it the sums of e^y and y e^y over kept tokens, [T] each."""
    sums = torch.zeros_like(torch.stack((highest, highest)))  # y e^y, and e^y of the target
    found = []
    for rows in _chunks(logits):  # as many on every rank, and the very ones of backward: equal floats are compared
        y = torch.add(-highest[rows, None], logits[rows, : shard.width], alpha=shard.scale)
        p = y.exp()
        kept = find_kept_set(p, totals[rows], top_k=shard.top_k, top_p=shard.top_p, group=shard.group)
        found.append((kept.cut, kept.share, kept.mass))
        if shard.width:
            at_target = p.gather(1, shard.targets[rows, None]).squeeze(1)
            sums[1, rows] = torch.where(shard.is_local[rows], at_target, 0)
            sums[0, rows] = torch.linalg.vecdot(_weigh(kept, p, shard, rows).mul_(p), y)
    if shard.group.size() > 1:
        dist.all_reduce(sums, group=shard.group)
    kept = KeptSet(*(torch.cat(parts) for parts in zip(*found, strict=True)))
    return kept, kept.mass + torch.where(sums[1] < kept.cut, sums[1], 0), sums[0]


def _weigh(kept: KeptSet, p: Tensor, shard: _Shard, rows: slice) -> Tensor:
    """Weights of tokens as ``KeptSet.weigh`` has them, and 1 for a target that would not be kept."""
    weights, targets = kept.weigh(p), shard.targets[rows, None]
    is_lost = shard.is_local[rows, None] & (p.gather(1, targets) < kept.cut[:, None])
    return weights.scatter_(1, targets, torch.where(is_lost, 1.0, weights.gather(1, targets)))


def _chunks(logits: Tensor) -> list[slice]:
    num_tokens, width = logits.shape
    size = max(1, _CHUNK_ELEMENTS[logits.device.type] // max(1, width))
    return [slice(start, start + size) for start in range(0, num_tokens, size)]


def compute_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = -1,
    vocab_size: int,
    group: dist.ProcessGroup,
) -> Logprobs:
    """Log-probability of each target, and the entropy of the distribution it was taken from.

    Formula, over the ``vocab_size`` real rows, with the kept set S of ``find_kept_set``::

        q_tv = softmax(logits_t / temperature)[v]
        p_tv = q_tv / sum_{u in S_t} q_tu  for v in S_t, else 0
        logprob_t = log p_t,target   entropy_t = -sum_v p_tv log p_tv   kept_log_mass_t = log sum_{v in S_t} q_tv

    S is found from these logits, which are not bit for bit the engine's, and in later train steps not of its weights. A
    token at the edge may so be kept by one and not by the other; the target was drawn, so it is always kept here: one
    that these logits would cut is added to S. S is a constant for the gradient.

    Args:
        logits: [T, V / TP], this rank's rows of the padded vocabulary.
        targets: [T] int64, below ``vocab_size``.
        temperature: > 0.
        top_p: in (0, 1]; 1 cuts nothing.
        top_k: at least 1, or -1 to cut nothing.
        vocab_size: rows that are no padding.
        group: TP ranks, in order of their rows; all of them call this together.

    Returns:
        The same on every rank of the group.

    Source:
        The kept set: SGLang 0.5.17, see kept_set.py. That its token must not change what a ratio compares:
        DeepSeek-AI 2025, arXiv:2512.02556, section 3.1, "Keep Sampling Mask".

    Differs:
        There the engine's own set travels with each token; here it is found again, because sglang-router 0.3.2 lets no
        request through that asks for it.
    """
    first = group.rank() * logits.shape[1]
    width = min(max(vocab_size - first, 0), logits.shape[1])
    is_local = (targets >= first) & (targets < first + width)
    shard = _Shard(torch.where(is_local, targets - first, 0), is_local, width, 1 / temperature, top_p, top_k, group)
    return Logprobs(*_VocabularyLogprobs.apply(logits, shard))  # type: ignore[no-untyped-call]
