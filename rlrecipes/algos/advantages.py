"""Advantages from rewards. Owns group baselines and scales; refuses to decide which rollouts belong to the batch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlrecipes.algos.shapes import check_same_shape
from rlrecipes.errors import ContractError

Baseline = Literal["group_mean", "leave_one_out", "none"]


def compute_group_advantages(
    *,
    rewards: Tensor,
    group_ids: Tensor,
    normalize_std: bool,
    baseline: Baseline = "group_mean",
    is_counted: Tensor | None = None,
    ddof: Literal[0, 1] = 1,
    eps: float = 1e-6,
) -> Tensor:
    """Compare each rollout with its group.

    Formula, with mean, std and n over the counted rollouts of the group of i::

        group_mean:     advantages[i] = rewards[i] - mean
        leave_one_out:  advantages[i] = rewards[i] - mean of the others = (rewards[i] - mean) * n / (n - 1)
        none:           advantages[i] = rewards[i]

        advantages[i] = advantages[i] / (std + eps)                          if normalize_std
        std           = sqrt(sum((rewards - mean)^2) / (n - ddof))
        advantages[i] = 0                                                    where not is_counted[i]

    ========================================================  =================  ==============================
    algorithm                                                 baseline           beside
    ========================================================  =================  ==============================
    GRPO, DAPO, GSPO, CISPO                                   group_mean         normalize_std
    Dr.GRPO                                                   group_mean         aggregation constant
    RLOO                                                      leave_one_out      normalize_std is a scale of ours
    REINFORCE++ baseline                                      group_mean         whitened over tokens
    REINFORCE, REINFORCE++, PPO                               none               rewards per token, see returns.py
    ========================================================  =================  ==============================

    Groups may differ in size. With a baseline, a group of one, or of equal rewards, gets exactly 0 in any precision.

    Args:
        rewards: [R] float, one entry a rollout (not a sample: a rollout that yields several samples counts once).
        group_ids: [R] int64; equal where the prompt is the same. Any values, in any order.
        normalize_std: whether to divide by the group's standard deviation; needs a baseline.
        baseline: what a reward is compared with.
        is_counted: [R] bool, False for rejected rollouts: their reward, whatever it is, reaches no other rollout. None
            counts all.
        ddof: 1 divides the squares by n - 1 (unbiased), 0 by n.
        eps: added to the standard deviation; in units of the reward.

    Returns:
        [R], dtype of ``rewards``, in units of the reward (of its standard deviation when normalised). No gradient.

    Raises:
        ContractError: shapes differ, a counted reward is not a finite floating-point number, the baseline is unknown,
            or there is a standard deviation without a baseline.

    Differs:
        The paper leaves ``ddof`` and ``eps`` open. Mean and variance are two passes in float64, so that rounding
        cannot turn equal rewards into advantages.

    Source:
        group_mean: Shao et al. 2024, arXiv:2402.03300, section 4.1.2 (outcome supervision), under equation 3. Without
        the division: Liu et al. 2025, arXiv:2503.20783, section 3.2. leave_one_out: Ahmadian et al. 2024,
        arXiv:2402.14740, "REINFORCE Leave-One-Out". none: Williams 1992, "Simple statistical gradient-following
        algorithms", theorem 1 with a baseline of 0. Group mean, then whitening: Hu et al. 2025, arXiv:2501.03262,
        section 3.
    """
    if baseline not in ("group_mean", "leave_one_out", "none") or (baseline == "none" and normalize_std):
        raise ContractError(
            "algos.compute_group_advantages.baseline",
            f"no algorithm has baseline {baseline!r} with normalize_std={normalize_std}",
            "use group_mean or leave_one_out, or none without normalize_std",
        )
    counted = _all_or_given(rewards, is_counted)
    is_flat = compute_zero_variance(rewards=rewards, group_ids=group_ids, is_counted=is_counted)
    _, group_of = torch.unique(group_ids, return_inverse=True)
    exact = torch.where(counted, rewards.detach().double(), 0.0)
    if baseline == "none":
        return exact.to(rewards.dtype)
    zeros = torch.zeros(len(is_flat), dtype=torch.float64)
    sizes = zeros.index_add(0, group_of, counted.double())
    # A flat group divides 0 by 0 below and is chosen away at the end.
    advantages = torch.where(counted, exact - (zeros.index_add(0, group_of, exact) / sizes)[group_of], 0.0)
    scales = zeros + 1
    if normalize_std:
        variances = zeros.index_add(0, group_of, advantages.square()) / (sizes - ddof)
        scales = 1 / (variances.sqrt() + eps)
    if baseline == "leave_one_out":
        scales = scales * sizes / (sizes - 1)
    return torch.where(is_flat[group_of] | ~counted, 0.0, advantages * scales[group_of]).to(rewards.dtype)


def compute_zero_variance(*, rewards: Tensor, group_ids: Tensor, is_counted: Tensor | None = None) -> Tensor:
    """Find the groups that teach nothing, because all their rewards are equal.

    Formula::

        is_flat[g] = max(rewards of group g) == min(rewards of group g)        over counted rollouts

    Args:
        rewards: [R] float, one entry a rollout.
        group_ids: [R] int64; equal where the prompt is the same.
        is_counted: [R] bool, see ``compute_group_advantages``.

    Returns:
        [G] bool, groups in ascending order of their id; True for a group of one, and of none that counts.

    Raises:
        ContractError: shapes differ, or a counted reward is not a finite floating-point number.

    Source:
        The groups that dynamic sampling drops: Yu et al. 2025 (DAPO), arXiv:2503.14476, equation 11.
    """
    counted = _all_or_given(rewards, is_counted)
    check_same_shape("compute_zero_variance", rewards=rewards, group_ids=group_ids, is_counted=counted)
    if not rewards.is_floating_point() or not bool(rewards[counted].isfinite().all()):
        raise ContractError(
            "algos.compute_zero_variance.rewards",
            f"rewards must be finite floats, these are {rewards.dtype}: {rewards.tolist()}",
            "make the reward function return a finite number for every rollout",
        )
    groups, group_of = torch.unique(group_ids, return_inverse=True)
    lowest, highest = (
        rewards.new_zeros(len(groups)).scatter_reduce(
            0, group_of[counted], rewards[counted].detach(), reduce=reduce, include_self=False
        )
        for reduce in ("amin", "amax")
    )
    return lowest == highest


def _all_or_given(rewards: Tensor, is_counted: Tensor | None) -> Tensor:
    return torch.ones_like(rewards, dtype=torch.bool) if is_counted is None else is_counted
