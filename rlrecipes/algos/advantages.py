"""Advantages from rewards. Owns group baselines and scales; refuses to decide which rollouts belong to the batch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlrecipes.algos.shapes import check_same_shape
from rlrecipes.errors import ContractError


def compute_group_advantages(
    *, rewards: Tensor, group_ids: Tensor, normalize_std: bool, ddof: Literal[0, 1] = 1, eps: float = 1e-6
) -> Tensor:
    """Compare each rollout with its group (GRPO; without the division, Dr.GRPO).

    Formula::

        advantages[i] = rewards[i] - mean(rewards of i's group)
        advantages[i] = advantages[i] / (std(rewards of i's group) + eps)        if normalize_std
        std           = sqrt(sum((rewards - mean)^2) / (group size - ddof))

    Groups may differ in size. A group of one, or of equal rewards, gets exactly 0 in any precision.

    Args:
        rewards: [R] float, one entry a rollout (not a sample: a rollout that yields several samples counts once).
        group_ids: [R] int64; equal where the prompt is the same. Any values, in any order.
        normalize_std: whether to divide by the group's standard deviation.
        ddof: 1 divides the squares by size - 1 (unbiased), 0 by size.
        eps: added to the standard deviation; in units of the reward.

    Returns:
        [R], dtype of ``rewards``, in units of the reward (of its standard deviation when normalised). No gradient.

    Raises:
        ContractError: shapes differ, or a reward is not a finite floating-point number.

    Differs:
        The paper leaves ``ddof`` and ``eps`` open. Mean and variance are two passes in float64, so that rounding
        cannot turn equal rewards into advantages.

    Source:
        Shao et al. 2024, arXiv:2402.03300, section 4.1.2 (outcome supervision), under equation 3. Without the
        division: Liu et al. 2025, arXiv:2503.20783, section 3.2.
    """
    is_flat = compute_zero_variance(rewards=rewards, group_ids=group_ids)
    _, group_of, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    zeros = torch.zeros_like(sizes, dtype=torch.float64)
    exact = rewards.detach().double()
    advantages = exact - (zeros.index_add(0, group_of, exact) / sizes)[group_of]
    if normalize_std:
        variances = zeros.index_add(0, group_of, advantages.square()) / (sizes - ddof)
        advantages = advantages / (variances.sqrt() + eps)[group_of]
    return torch.where(is_flat[group_of], 0.0, advantages).to(rewards.dtype)


def compute_zero_variance(*, rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Find the groups that teach nothing, because all their rewards are equal.

    Formula::

        is_flat[g] = max(rewards of group g) == min(rewards of group g)

    Args:
        rewards: [R] float, one entry a rollout.
        group_ids: [R] int64; equal where the prompt is the same.

    Returns:
        [G] bool, groups in ascending order of their id; True for a group of one.

    Raises:
        ContractError: shapes differ, or a reward is not a finite floating-point number.

    Source:
        The groups that dynamic sampling drops: Yu et al. 2025 (DAPO), arXiv:2503.14476, equation 11.
    """
    check_same_shape("compute_zero_variance", rewards=rewards, group_ids=group_ids)
    if not rewards.is_floating_point() or not bool(rewards.isfinite().all()):
        raise ContractError(
            "algos.compute_zero_variance.rewards",
            f"rewards must be finite floats, these are {rewards.dtype}: {rewards.tolist()}",
            "make the reward function return a finite number for every rollout",
        )
    groups, group_of = torch.unique(group_ids, return_inverse=True)
    lowest, highest = (
        rewards.new_zeros(len(groups)).scatter_reduce(0, group_of, rewards, reduce=reduce, include_self=False)
        for reduce in ("amin", "amax")
    )
    return lowest == highest
