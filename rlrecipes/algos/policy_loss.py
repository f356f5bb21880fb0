"""Losses per token. Owns their value and gradient; refuses masks and means (objective.py and aggregation.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from rlrecipes.algos.segments import compute_sample_means
from rlrecipes.algos.shapes import check_same_shape

LOG_RATIO_BOUND = 20.0
"""Log ratios are held within this many nats, so that no exponential overflows and no gradient becomes 0 x infinity."""


def compute_clipped_policy_loss(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Clip the policy gradient where the policy has moved far enough in the advantage's direction.

    Formula::

        ratio = exp(clip(logprobs - old_logprobs, -20, 20))
        loss  = max(-ratio * advantages, -clip(ratio, 1 - clip_low, 1 + clip_high) * advantages)
        loss  = min(loss, -dual_clip * advantages)                               where advantages < 0, with dual_clip

        d loss / d logprobs = -ratio * advantages, and 0 where clipped

    Args:
        logprobs: any shape, nats, of the current policy.
        old_logprobs: same shape, nats, of the policy before the update.
        advantages: same shape.
        clip_low: the ratio is clipped below at 1 - clip_low.
        clip_high: the ratio is clipped above at 1 + clip_high.
        dual_clip: > 1, most that ratio counts for a negative advantage; None for no bound.

    Returns:
        (loss, is_clipped, ratio), each of the input's shape. ``is_clipped`` is bool: a bound took the token's gradient
        (the dual clip included). Gradients reach ``logprobs`` through ``loss`` and ``ratio``.

    Raises:
        ContractError: shapes differ.

    Differs:
        Bounds are two numbers instead of one epsilon (DAPO's clip-higher). A loss, so the sign is turned. The log
        ratio is held within 20 nats: beyond, a token has no gradient instead of one that is not finite.

    Source:
        Schulman et al. 2017, arXiv:1707.06347, equation 7; two bounds: Yu et al. 2025 (DAPO), arXiv:2503.14476,
        equation 10; dual clip: Ye et al. 2020, arXiv:1912.09729, paragraph "Dual-clip PPO".
    """
    check_same_shape("compute_clipped_policy_loss", logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    return _clip(_to_ratio(logprobs - old_logprobs.detach()), advantages.detach(), clip_low, clip_high, dual_clip)


def compute_gspo_policy_loss(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    sample_index: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Clip by the ratio of a whole sequence, length-normalised (GSPO).

    Formula::

        ratio[t] = exp(clip(mean(logprobs - old_logprobs over the trained tokens of t's sample), -20, 20))
        loss     = as in ``compute_clipped_policy_loss``, of this ratio

        d loss[t] / d logprobs[u] = -ratio * advantages[t] / n    for trained u of t's sample with n trained tokens,
                                     0 where clipped

    A sequence is one packed sample: its tokens were drawn one after the other in one context. A rollout that yields
    several samples has a ratio for each of them. A sample lies in one micro-batch, so no way of splitting the train
    step changes a ratio, which one over a whole rollout could not promise.

    Args:
        logprobs: [T] nats, of the current policy.
        old_logprobs: [T] nats, of the policy before the update.
        advantages: [T].
        loss_mask: [T] bool, True where trained.
        sample_index: [T] int64, which packed sample a position belongs to; see ``segments.compute_sample_sums``.
        clip_low: the ratio is clipped below at 1 - clip_low.
        clip_high: the ratio is clipped above at 1 + clip_high.
        dual_clip: > 1, most that the ratio counts for a negative advantage; None for no bound.

    Returns:
        (loss, is_clipped, ratio), [T] each, 0, False and 1 for samples without a trained token. Masked positions hold
        the ratio of their sample, and a loss that is for the caller to leave out.

    Raises:
        ContractError: shapes differ.

    Differs:
        The paper's sequence is a rollout; here it is a sample, which is the same unless a rollout yields several.

    Source:
        Zheng et al. 2025, arXiv:2507.18071, equation 5 and the sequence ratio defined for it.
    """
    check_same_shape("compute_gspo_policy_loss", logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    log_ratio = logprobs - old_logprobs.detach()
    means = compute_sample_means(values=log_ratio, loss_mask=loss_mask, sample_index=sample_index)
    ratio = _to_ratio(means.to(log_ratio.dtype))
    return _clip(ratio, torch.where(loss_mask, advantages.detach(), 0.0), clip_low, clip_high, dual_clip)


def compute_cispo_policy_loss(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weigh each token's log-likelihood by its clipped ratio, which takes no gradient (CISPO).

    Formula::

        ratio = exp(clip(logprobs - old_logprobs, -20, 20))
        loss  = -stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * advantages * logprobs

        d loss / d logprobs = -clip(ratio, 1 - clip_low, 1 + clip_high) * advantages

    A clipped token keeps its gradient; only its weight is bounded.

    Args:
        logprobs: any shape, nats, of the current policy.
        old_logprobs: same shape, nats, of the policy before the update.
        advantages: same shape.
        clip_low: the weight is at least 1 - clip_low; 1 or more leaves it without a lower bound.
        clip_high: the weight is at most 1 + clip_high.

    Returns:
        (loss, is_clipped, ratio), each of the input's shape. ``is_clipped`` is bool: a bound changed the weight.

    Raises:
        ContractError: shapes differ.

    Source:
        MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, equations 4 and 5.
    """
    check_same_shape("compute_cispo_policy_loss", logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    ratio = _to_ratio(logprobs.detach() - old_logprobs.detach())
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages.detach() * logprobs, weight != ratio, ratio


def compute_sft_loss(*, logprobs: Tensor) -> Tensor:
    """Negative log-likelihood of each token.

    Formula::

        loss = -logprobs                    d loss / d logprobs = -1

    Args:
        logprobs: any shape, nats, of the current policy at the tokens to imitate.

    Returns:
        Same shape, nats.

    Source:
        Maximum likelihood; equation 1 of Radford et al. 2018, "Improving language understanding by generative
        pre-training".
    """
    return -logprobs


def _to_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _clip(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    is_clipped = clipped > unclipped
    loss = torch.where(is_clipped, clipped, unclipped)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        is_bounded = (advantages < 0) & (loss > bound)
        loss = torch.where(is_bounded, bound, loss)
        is_clipped = is_clipped | is_bounded
    return loss, is_clipped, ratio
