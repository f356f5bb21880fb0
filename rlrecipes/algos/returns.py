"""Rewards, returns and advantages per token. Owns time: what is a step, what is discounted, where the reward falls.

A step is a trained token. Whatever lies between two trained tokens (a tool's answer, the next turn's prompt) is part of
the transition from one to the other: it is skipped, costs no discount and is never read. The last trained token of a
sample ends its episode, so nothing runs on through prompts or padding. Every function takes the S samples of the train
step as lists of [L_i] tensors, one beside its ``loss_mask``, and gives exactly 0 wherever the mask is False.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from rlrecipes.algos.shapes import check_same_shape
from rlrecipes.errors import ContractError

_BLOCK = 64
"""Steps that one matrix product sums; any size gives the same numbers, this one is fast."""


def compute_token_rewards(
    *, rewards: Tensor, loss_masks: Sequence[Tensor], token_kls: Sequence[Tensor] | None = None, kl_coef: float = 0.0
) -> list[Tensor]:
    """Spread the reward of each sample over its tokens, less the KL to the reference.

    Formula::

        token_rewards[i][t] = -kl_coef * token_kls[i][t] + (rewards[i] if t is the last trained token of i else 0)
        token_rewards[i][t] = 0                                                          where loss_masks[i] is False

    A sample without a trained token has nowhere to put its reward: all 0.

    Args:
        rewards: [S] float, one entry a sample; samples of one rollout each carry its whole reward.
        loss_masks: S tensors [L_i], bool, True where trained.
        token_kls: S tensors [L_i], nats, policy before the update against reference; None for none.
        kl_coef: reward units per nat.

    Returns:
        S tensors [L_i], dtype of ``rewards``, in units of the reward. No gradient.

    Raises:
        ContractError: a KL and its mask differ in shape, or a reward is not a finite floating-point number.
        ValueError: the sequences differ in length.

    Differs:
        The reward falls on the last *trained* token. slime's PPO puts it on the last response token, trained or not,
        and its REINFORCE++ refuses a sample without a trained token.

    Source:
        Ziegler et al. 2019, arXiv:1909.08593, equation 2, token by token as Hu et al. 2025 (REINFORCE++),
        arXiv:2501.03262, section 3, writes it.
    """
    if not rewards.is_floating_point() or not bool(rewards.isfinite().all()):
        raise ContractError(
            "algos.compute_token_rewards.rewards",
            f"rewards must be finite floats, these are {rewards.dtype}: {rewards.tolist()}",
            "make the reward function return a finite number for every rollout",
        )
    token_rewards = []
    kls = [None] * len(loss_masks) if token_kls is None else token_kls
    for reward, loss_mask, token_kl in zip(rewards.detach(), loss_masks, kls, strict=True):
        spread = rewards.new_zeros(loss_mask.shape)
        if token_kl is not None:
            check_same_shape("compute_token_rewards", token_kls=token_kl, loss_masks=loss_mask)
            spread = torch.where(loss_mask, -kl_coef * token_kl.detach().to(rewards.dtype), spread)
        spread[loss_mask.nonzero()[-1:]] += reward
        token_rewards.append(spread)
    return token_rewards


def compute_token_advantages(
    *,
    advantages: Tensor,
    loss_masks: Sequence[Tensor],
    token_kls: Sequence[Tensor] | None = None,
    kl_coef: float = 0.0,
) -> list[Tensor]:
    """Give every trained token its rollout's advantage, less its own KL to the reference.

    Formula::

        token_advantages[i][t] = advantages[i] - kl_coef * token_kls[i][t]      0 where loss_masks[i] is False

    Without a KL this is GRPO's outcome supervision; with one, and whitened afterwards, the REINFORCE++ baseline. The
    KL of a token lowers that token alone: ``compute_discounted_returns`` also charges it to the tokens before.

    Args:
        advantages: [S] float, of each sample's rollout (``compute_group_advantages``).
        loss_masks: S tensors [L_i], bool, True where trained.
        token_kls: S tensors [L_i], nats, policy before the update against reference; None for none.
        kl_coef: units of the advantage per nat.

    Returns:
        S tensors [L_i], dtype of ``advantages``. No gradient.

    Raises:
        ContractError: a KL and its mask differ in shape.
        ValueError: the sequences differ in length.

    Source:
        Shao et al. 2024, arXiv:2402.03300, section 4.1.2. With the KL: slime's ``reinforce_plus_plus_baseline``; the
        paper (Hu et al. 2025, arXiv:2501.03262) keeps the KL of this variant in the loss.
    """
    token_advantages = []
    kls = [None] * len(loss_masks) if token_kls is None else token_kls
    for advantage, loss_mask, token_kl in zip(advantages.detach(), loss_masks, kls, strict=True):
        spread = advantage
        if token_kl is not None:
            check_same_shape("compute_token_advantages", token_kls=token_kl, loss_masks=loss_mask)
            spread = advantage - kl_coef * token_kl.detach().to(advantages.dtype)
        token_advantages.append(torch.where(loss_mask, spread, 0.0))
    return token_advantages


def compute_discounted_returns(
    *, token_rewards: Sequence[Tensor], loss_masks: Sequence[Tensor], gamma: float
) -> list[Tensor]:
    """Sum what each trained token is followed by, itself included (REINFORCE++ before whitening).

    Formula, over the trained tokens 0 .. n - 1 of a sample::

        returns[k] = token_rewards[k] + gamma * returns[k + 1]        returns[n] = 0

    Args:
        token_rewards: S tensors [L_i] (``compute_token_rewards``).
        loss_masks: S tensors [L_i], bool, True where trained.
        gamma: discount per trained token, in [0, 1].

    Returns:
        S tensors [L_i], dtype of ``token_rewards``, in units of the reward. No gradient.

    Raises:
        ContractError: shapes differ, or gamma is outside [0, 1].
        ValueError: the sequences differ in length.

    Differs:
        Untrained tokens between trained ones take no part: they neither discount nor cut the sum, and their rewards
        are not read. Summed in float64, in blocks: no loop over tokens.

    Source:
        Hu et al. 2025 (REINFORCE++), arXiv:2501.03262, section 3: reward less the KL of this and all later tokens is
        the case gamma = 1. With gamma: Sutton and Barto 2018, equation 3.8.
    """
    _check_fractions("compute_discounted_returns", gamma=gamma)
    rewards, lengths = _pack("compute_discounted_returns", "token_rewards", token_rewards, loss_masks)
    return _unpack(_sum_discounted(rewards, lengths, gamma), token_rewards, loss_masks)


def compute_gae(
    *,
    token_rewards: Sequence[Tensor],
    values: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    gamma: float,
    gae_lambda: float,
) -> tuple[list[Tensor], list[Tensor]]:
    """Estimate advantages with a critic (generalised advantage estimation), and what the critic should have said.

    Formula, over the trained tokens 0 .. n - 1 of a sample::

        delta[k]      = token_rewards[k] + gamma * values[k + 1] - values[k]                  values[n] = 0
        advantages[k] = delta[k] + gamma * gae_lambda * advantages[k + 1]                     advantages[n] = 0
        returns[k]    = advantages[k] + values[k]

    ``values[n] = 0`` also for a truncated rollout: its reward is final, nothing is bootstrapped.

    Args:
        token_rewards: S tensors [L_i] (``compute_token_rewards``).
        values: S tensors [L_i], in units of the reward; entry t is the critic's value of all that precedes token t,
            as entry t of the logprobs is of token t.
        loss_masks: S tensors [L_i], bool, True where trained.
        gamma: discount per trained token, in [0, 1].
        gae_lambda: in [0, 1]; 1 is return minus value, 0 the one-step difference.

    Returns:
        (advantages, returns), S tensors [L_i] each, dtypes of ``token_rewards`` and ``values``, in units of the reward.
        Returns are the critic's targets; take them before advantages are whitened. No gradient.

    Raises:
        ContractError: shapes differ, or gamma or gae_lambda is outside [0, 1].
        ValueError: the sequences differ in length.

    Differs:
        The value after a token is that of the next *trained* token, however many tool tokens lie between; other
        implementations step into them, or carry the last trained value through. Actor and critic see the same rewards,
        KL included (slime's critic leaves it out). Summed in float64, in blocks: no loop over tokens.

    Source:
        Schulman et al. 2016, arXiv:1506.02438, equation 16, of the temporal differences in its section 3.
    """
    _check_fractions("compute_gae", gamma=gamma, gae_lambda=gae_lambda)
    rewards, lengths = _pack("compute_gae", "token_rewards", token_rewards, loss_masks)
    packed, _ = _pack("compute_gae", "values", values, loss_masks)
    following = _next_step(packed, lengths)
    advantages = _sum_discounted(rewards + gamma * following - packed, lengths, gamma * gae_lambda)
    return _unpack(advantages, token_rewards, loss_masks), _unpack(advantages + packed, values, loss_masks)


def compute_whitened_advantages(
    *, advantages: Sequence[Tensor], loss_masks: Sequence[Tensor], ddof: Literal[0, 1] = 1, eps: float = 1e-8
) -> list[Tensor]:
    """Shift and scale advantages to mean 0 and variance 1 over all trained tokens of the train step.

    Formula, over the N trained tokens of all samples::

        whitened = (advantages - mean) / sqrt(variance + eps)        variance = sum((advantages - mean)^2) / (N - ddof)

    One trained token, or equal advantages, give exactly 0.

    Args:
        advantages: S tensors [L_i], of **all** samples of the train step.
        loss_masks: S tensors [L_i], bool, True where trained.
        ddof: 1 divides the squares by N - 1 (Bessel), 0 by N.
        eps: added to the variance; in squared units of the advantage.

    Returns:
        S tensors [L_i], dtypes of ``advantages``, without unit. No gradient.

    Raises:
        ContractError: shapes differ.
        ValueError: the sequences differ in length.

    Differs:
        Two passes in float64. Masked tokens stay 0; slime transforms them as well. ``eps`` stands under the root, as in
        slime and unlike ``compute_group_advantages``.

    Source:
        Hu et al. 2025 (REINFORCE++), arXiv:2501.03262, section 3 (normalisation over the global batch); for PPO:
        Andrychowicz et al. 2020, arXiv:2006.05990, choice C67.
    """
    packed, _ = _pack("compute_whitened_advantages", "advantages", advantages, loss_masks)
    if packed.numel() == 0 or bool(packed.min() == packed.max()):
        whitened = torch.zeros_like(packed)
    else:
        centred = packed - packed.mean()
        whitened = centred / (centred.square().sum() / (packed.numel() - ddof) + eps).sqrt()
    return _unpack(whitened, advantages, loss_masks)


def _check_fractions(function: str, **fractions: float) -> None:
    for name, fraction in fractions.items():
        if not 0 <= fraction <= 1:
            raise ContractError(f"algos.{function}.{name}", f"{fraction} is outside [0, 1]", "give a fraction")


def _pack(function: str, name: str, tensors: Sequence[Tensor], loss_masks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Trained entries of all samples, [N] float64, and how many each sample has, [S] int64."""
    trained = []
    for tensor, loss_mask in zip(tensors, loss_masks, strict=True):
        check_same_shape(function, **{name: tensor, "loss_masks": loss_mask})
        trained.append(tensor.detach()[loss_mask].double())
    lengths = torch.tensor([len(entries) for entries in trained], dtype=torch.int64)
    return torch.cat([*trained, torch.zeros(0)]), lengths


def _unpack(packed: Tensor, tensors: Sequence[Tensor], loss_masks: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of ``_pack``: shapes and dtypes of ``tensors``, 0 where nothing is trained."""
    unpacked = []
    start = 0
    # ``_pack`` has checked the lengths: strict only says so.
    for tensor, loss_mask in zip(tensors, loss_masks, strict=True):
        filled = torch.zeros_like(tensor)
        end = start + int(loss_mask.sum())
        filled[loss_mask] = packed[start:end].to(tensor.dtype)
        unpacked.append(filled)
        start = end
    return unpacked


def _next_step(packed: Tensor, lengths: Tensor) -> Tensor:
    """The entry after each one in its own sequence, 0 after the last."""
    following = torch.zeros_like(packed)
    following[:-1] = packed[1:]
    following[lengths.cumsum(0)[lengths > 0] - 1] = 0.0
    return following


def _sum_discounted(packed: Tensor, lengths: Tensor, factor: float) -> Tensor:
    """``out[k] = packed[k] + factor * out[k + 1]`` within each of the sequences that lie packed one after another.

    A sequence is cut into blocks. Inside a block, a triangular matrix of powers does the sum; what later blocks add is
    the same recurrence over blocks with ``factor ** _BLOCK``, so it is solved by this function: log(length) levels.
    """
    num_blocks = -(-lengths // _BLOCK)
    first_blocks, first_steps = num_blocks.cumsum(0) - num_blocks, lengths.cumsum(0) - lengths
    shifts = torch.repeat_interleave(first_blocks * _BLOCK - first_steps, lengths)
    slots = torch.arange(len(packed)) + shifts
    blocks = packed.new_zeros(int(num_blocks.sum()) * _BLOCK).index_copy(0, slots, packed).view(-1, _BLOCK)
    distances = torch.arange(_BLOCK) - torch.arange(_BLOCK).unsqueeze(1)
    powers = torch.tensor(factor, dtype=packed.dtype) ** torch.arange(_BLOCK + 1)
    sums = blocks @ torch.where(distances >= 0, powers[distances.clamp(min=0)], 0.0).T
    if len(sums) > int((num_blocks > 0).sum()):
        totals = _sum_discounted(sums[:, 0], num_blocks, factor**_BLOCK)
        sums += _next_step(totals, num_blocks).unsqueeze(1) * powers[1:].flip(0)
    return sums.view(-1)[slots]
