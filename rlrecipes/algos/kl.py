"""Kullback-Leibler estimates per token and their share in the reward. Owns the estimators; refuses to average."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from rlrecipes.algos.shapes import check_same_shape
from rlrecipes.errors import ContractError

KlEstimator = Literal["k1", "k2", "k3", "k3_clamped", "k1_straight_through"]

_CLAMP = 10.0
_EXPONENT = 20.0
"""exp of it is far beyond the clamp, and finite: infinity times the clamp's gradient of 0 would be NaN."""


def compute_kl(
    *, logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator, old_logprobs: Tensor | None = None
) -> Tensor:
    """Estimate KL(policy || reference) at sampled tokens.

    Formula::

        d = logprobs - ref_logprobs
        w = exp(logprobs - old_logprobs)           its gradient included; 1 without old_logprobs

        k1                   w d                            gradient to logprobs    w (d + 1), without weight 1
        k2                   w d^2 / 2                                              w (d^2 / 2 + d), without weight d
        k3                   w (exp(-d) - 1 + d)                                    w d, without weight 1 - exp(-d)
        k3_clamped           min(k3, 10)                                            of k3, and 0 where clamped
        k1_straight_through  d                                                      d

    In expectation over tokens drawn from the policy:

    ====================  ====================  =================================================
    estimator             value                 gradient
    ====================  ====================  =================================================
    k1                    KL(policy || ref)     0: E[grad log policy] = 0, it only adds noise
    k2                    biased                of KL(policy || ref)
    k3                    KL(policy || ref)     of KL(ref || policy)
    k3_clamped            less or equal to k3   of k3 over tokens that are not clamped
    k1_straight_through   KL(policy || ref)     of KL(policy || ref)
    ====================  ====================  =================================================

    With ``old_logprobs``, in expectation over tokens drawn from the *old* policy, weighted k1 and k3 have the value and
    the gradient of KL(policy || ref), also on the first train step, where the weight is 1 but its gradient is not 0.
    Weighted k2 has the gradient of its own expectation. k2 and k3 are never negative.

    Args:
        logprobs: any shape, nats, of the current policy.
        ref_logprobs: same shape, nats, of the reference.
        estimator: one of the above.
        old_logprobs: same shape, nats, of the policy that drew the tokens: weights the estimate. None for no weight.

    Returns:
        Same shape, nats. Gradients reach ``logprobs`` alone.

    Raises:
        ContractError: shapes differ, the estimator is unknown, or the straight-through form is to be weighted, which
            would count the correction twice.

    Differs:
        k3_clamped is slime's low_var_kl: clamped after the weight, not before. slime clamps at -10 too, which k3 never
        reaches, and without bounds on the exponents, so that a difference beyond 88 gives NaN in its gradient; here
        they are held to [-20, 20] in this estimator.

    Source:
        Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html; k3 is equation 4 of Shao et al.
        2024, arXiv:2402.03300; weighted k3 the "Unbiased KL Estimate" of DeepSeek-AI 2025 (V3.2), arXiv:2512.02556.
    """
    given = {"logprobs": logprobs, "ref_logprobs": ref_logprobs.detach()}
    if old_logprobs is not None:
        given["old_logprobs"] = old_logprobs.detach()
    check_same_shape("compute_kl", **given)
    bound = _EXPONENT if estimator == "k3_clamped" else None
    difference = _subtract(logprobs, given["ref_logprobs"], bound)
    match estimator:
        case "k1":
            kl = difference
        case "k2":
            kl = difference.square() / 2
        case "k3" | "k3_clamped":
            # expm1: exp(-d) - 1 + d loses every digit of a KL below 1e-8 in float32.
            kl = torch.expm1(-difference) + difference
        case "k1_straight_through" if old_logprobs is None:
            surrogate = difference.square() / 2
            kl = difference.detach() + (surrogate - surrogate.detach())
        case _:
            raise ContractError(
                "algos.compute_kl.estimator",
                f"unknown estimator {estimator!r}, weighted: {old_logprobs is not None}",
                "use k1, k2, k3 or k3_clamped, or k1_straight_through without old_logprobs",
            )
    if old_logprobs is not None:
        kl = _subtract(logprobs, given["old_logprobs"], bound).exp() * kl
    return kl.clamp(max=_CLAMP) if estimator == "k3_clamped" else kl


def compute_kl_loss(
    *, logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator, old_logprobs: Tensor | None = None
) -> Tensor:
    """Estimate a KL to be minimised: ``compute_kl``, refused where its gradient is 0 in expectation.

    Formula::

        compute_kl(...)                 k1 only with old_logprobs

    Args:
        logprobs: any shape, nats, of the current policy.
        ref_logprobs: same shape, nats, of the reference.
        estimator: see ``compute_kl``.
        old_logprobs: see ``compute_kl``.

    Returns:
        Same shape, nats. Gradients reach ``logprobs`` alone.

    Raises:
        ContractError: k1 without weight; or as ``compute_kl``.

    Source:
        See ``compute_kl``.
    """
    if estimator == "k1" and old_logprobs is None:
        raise ContractError(
            "algos.compute_kl_loss.estimator",
            "k1 as a loss has no gradient in expectation: it adds noise and pulls nowhere",
            "use k1_straight_through, k2 or k3, or weight it with old_logprobs",
        )
    return compute_kl(logprobs=logprobs, ref_logprobs=ref_logprobs, estimator=estimator, old_logprobs=old_logprobs)


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


def _subtract(logprobs: Tensor, others: Tensor, bound: float | None) -> Tensor:
    difference = logprobs - others
    return difference if bound is None else difference.clamp(-bound, bound)
