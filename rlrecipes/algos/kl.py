"""Kullback-Leibler estimates per token and their share in the reward. Owns the estimators; refuses to average."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from rlrecipes.algos.shapes import check_same_shape
from rlrecipes.errors import ContractError

KlEstimator = Literal["k1", "k2", "k3"]


def compute_kl(*, logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate KL(policy || reference) at tokens drawn from the policy.

    Formula::

        d  = logprobs - ref_logprobs
        k1 = d                      d k1 / d logprobs = 1
        k2 = d^2 / 2                d k2 / d logprobs = d
        k3 = exp(-d) - 1 + d        d k3 / d logprobs = 1 - exp(-d)

    Values: k1 and k3 are unbiased, k2 is not; k2 and k3 are never negative. Gradients, in expectation over tokens
    drawn from the policy: k1 has none (E[grad log policy] = 0, it only adds noise), k2 has that of
    KL(policy || reference), k3 that of KL(reference || policy). As a loss use k2 or k3; k1 belongs in the reward.

    Args:
        logprobs: any shape, nats, of the current policy.
        ref_logprobs: same shape, nats, of the reference.
        estimator: k1, k2 or k3.

    Returns:
        Same shape, nats.

    Raises:
        ContractError: shapes differ, or the estimator is unknown.

    Source:
        Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html; k3 is equation 4 of Shao et al.
        2024, arXiv:2402.03300.
    """
    check_same_shape("compute_kl", logprobs=logprobs, ref_logprobs=ref_logprobs)
    difference = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            # expm1: exp(-d) - 1 + d loses every digit of a KL below 1e-8 in float32.
            return torch.expm1(-difference) + difference
    raise ContractError("algos.compute_kl.estimator", f"unknown estimator {estimator!r}", "use k1, k2 or k3")


def compute_kl_penalized_rewards(
    *,
    rewards: Tensor,
    token_kls: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    rollout_indices: Sequence[int],
    kl_coef: float,
) -> Tensor:
    """Take a rollout's KL to the reference out of its reward, before any baseline.

    Formula::

        rewards[r] - kl_coef * sum(token_kls[i][t] for samples i of rollout r, for t where loss_masks[i][t])

    Args:
        rewards: [R] float, one entry a rollout.
        token_kls: S tensors [L_i], nats, policy before the update against reference (``compute_kl``, usually k1).
        loss_masks: S tensors [L_i], bool, True where trained.
        rollout_indices: [S], the entry of ``rewards`` that each sample belongs to.
        kl_coef: reward units per nat.

    Returns:
        [R], dtype of ``rewards``. No gradient: the KL is part of the reward.

    Raises:
        ContractError: a KL and its mask differ in shape.
        ValueError: the sequences differ in length.

    Source:
        Ziegler et al. 2019, arXiv:1909.08593, equation 2.
    """
    penalties = torch.zeros_like(rewards, dtype=torch.float64)
    for token_kl, loss_mask, rollout in zip(token_kls, loss_masks, rollout_indices, strict=True):
        check_same_shape("compute_kl_penalized_rewards", token_kls=token_kl, loss_masks=loss_mask)
        penalties[rollout] += token_kl.detach()[loss_mask].double().sum()
    return (rewards.detach().double() - kl_coef * penalties).to(rewards.dtype)
