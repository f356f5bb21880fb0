"""Losses per token. Owns their value and gradient; refuses masks and means (objective.py and aggregation.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from rlrecipes.algos.shapes import check_same_shape


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

        ratio = exp(logprobs - old_logprobs)
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
        Bounds are two numbers instead of one epsilon (DAPO's clip-higher). A loss, so the sign is turned.

    Source:
        Schulman et al. 2017, arXiv:1707.06347, equation 7; two bounds: Yu et al. 2025 (DAPO), arXiv:2503.14476,
        equation 10; dual clip: Ye et al. 2020, arXiv:1912.09729, paragraph "Dual-clip PPO".
    """
    check_same_shape("compute_clipped_policy_loss", logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    old_logprobs, advantages = old_logprobs.detach(), advantages.detach()
    ratio = torch.exp(logprobs - old_logprobs)
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
