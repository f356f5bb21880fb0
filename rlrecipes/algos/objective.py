"""What the trainer minimises, per token. Owns the composition of losses and their metrics; refuses to reduce them.

An objective is a module-level function ``(batch, logprobs, entropy) -> (loss, metrics)`` whose options are bound with
``functools.partial``, so it pickles to trainer ranks. The trainer sums loss x ``loss_weights`` and averages metrics
over trained tokens. ``batch`` holds a ``MicroBatch``'s arrays as tensors under the same names, aligned to the
position that predicts; an array that is None there is absent here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlrecipes.algos.kl import KlEstimator, compute_kl
from rlrecipes.algos.policy_loss import compute_clipped_policy_loss, compute_sft_loss
from rlrecipes.algos.shapes import check_same_shape
from rlrecipes.errors import ContractError

_MASKED = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")


def compute_policy_objective(  # noqa: PLR0913 (one keyword a config key)
    batch: Mapping[str, Tensor],
    logprobs: Tensor,
    entropy: Tensor | None,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    kl_coef_in_loss: float,
    kl_estimator: KlEstimator,
    entropy_coef: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy loss, KL to the reference and entropy bonus, per token.

    Formula::

        loss = policy_loss + kl_coef_in_loss * kl(logprobs, ref_logprobs) - entropy_coef * entropy

    Args:
        batch: [T] each: ``loss_mask`` (bool), ``advantages``, and where there are any, ``old_logprobs``,
            ``ref_logprobs`` and ``rollout_logprobs`` (nats). Without ``old_logprobs`` the policy before the update is
            the current one: the ratio is 1, its gradient that of ``logprobs``.
        logprobs: [T] nats, of the current policy.
        entropy: [T] nats, of the current policy; None when nobody asks for it.
        clip_low: see ``compute_clipped_policy_loss``.
        clip_high: see ``compute_clipped_policy_loss``.
        dual_clip: see ``compute_clipped_policy_loss``.
        kl_coef_in_loss: weight of the KL; 0 leaves it to the metrics.
        kl_estimator: see ``compute_kl``.
        entropy_coef: weight of the entropy bonus.

    Returns:
        (loss, metrics): [T] each, finite in masked slots whatever stands there in the inputs. Metrics carry no
        gradient and mean something only where ``loss_mask``; a name that ends in ``_max`` asks for the largest value
        over tokens, any other for the mean:

        - ``policy_loss``, ``ratio_mean`` and ``_max``, ``clip_fraction`` (1 where clipped): see
          ``compute_clipped_policy_loss``.
        - ``approx_kl``: k3 estimate of KL(old policy || current policy).
        - ``ref_kl``: ``kl_estimator``'s estimate of KL(current policy || reference), with ``ref_logprobs``.
        - ``entropy``: of the current policy, when given.
        - ``rollout_logprob_abs_diff_mean`` and ``_max``: abs(logprobs - rollout_logprobs). In the first train step
          after a weight sync it is what trainer and engine disagree on; later ones add how far the policy has moved.

    Raises:
        ContractError: a term is weighted but its input is missing, shapes differ, or k1 is asked for in the loss,
            where its gradient is zero in expectation.

    Source:
        Shao et al. 2024, arXiv:2402.03300, equation 3; entropy bonus: Schulman et al. 2017, arXiv:1707.06347,
        equation 9.
    """
    if kl_coef_in_loss and (kl_estimator == "k1" or "ref_logprobs" not in batch):
        raise ContractError(
            "algos.compute_policy_objective.kl_coef_in_loss",
            f"a KL in the loss needs ref_logprobs (given: {'ref_logprobs' in batch}) and an estimator whose gradient "
            f"is not zero in expectation (given: {kl_estimator})",
            "keep a reference, and use k2 or k3",
        )
    if entropy_coef and entropy is None:
        raise ContractError(
            "algos.compute_policy_objective.entropy_coef", "the entropy bonus has no entropy", "compute the entropy"
        )
    chosen = _select_trained(batch, logprobs=logprobs, entropy=entropy)
    chosen.setdefault("old_logprobs", chosen["logprobs"].detach())
    loss, is_clipped, ratio = compute_clipped_policy_loss(
        logprobs=chosen["logprobs"],
        old_logprobs=chosen["old_logprobs"],
        advantages=chosen["advantages"],
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    metrics = {
        "policy_loss": loss,
        "ratio_mean": ratio,
        "ratio_max": ratio,
        "clip_fraction": is_clipped.to(ratio.dtype),
        "approx_kl": compute_kl(logprobs=chosen["old_logprobs"], ref_logprobs=chosen["logprobs"], estimator="k3"),
    }
    if "ref_logprobs" in chosen:
        kl = compute_kl(logprobs=chosen["logprobs"], ref_logprobs=chosen["ref_logprobs"], estimator=kl_estimator)
        metrics["ref_kl"] = kl
        loss = loss + kl_coef_in_loss * kl if kl_coef_in_loss else loss
    if "entropy" in chosen:
        metrics["entropy"] = chosen["entropy"]
        loss = loss - entropy_coef * chosen["entropy"] if entropy_coef else loss
    if "rollout_logprobs" in chosen:
        distance = (chosen["logprobs"] - chosen["rollout_logprobs"]).abs()
        metrics |= {"rollout_logprob_abs_diff_mean": distance, "rollout_logprob_abs_diff_max": distance}
    return loss, {name: metric.detach() for name, metric in metrics.items()}


def compute_sft_objective(
    batch: Mapping[str, Tensor], logprobs: Tensor, entropy: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood per token (``compute_sft_loss``).

    Formula::

        loss = -logprobs

    Args:
        batch: [T]: ``loss_mask`` (bool).
        logprobs: [T] nats, of the current policy.
        entropy: [T] nats, of the current policy; None when nobody asks for it.

    Returns:
        (loss, metrics): [T] each, finite in masked slots; metrics hold ``entropy`` when given, without gradient.

    Source:
        See ``compute_sft_loss``.
    """
    chosen = _select_trained(batch, logprobs=logprobs, entropy=entropy)
    metrics = {"entropy": chosen["entropy"].detach()} if "entropy" in chosen else {}
    return compute_sft_loss(logprobs=chosen["logprobs"]), metrics


def _select_trained(batch: Mapping[str, Tensor], **current: Tensor | None) -> dict[str, Tensor]:
    """Put 0 wherever the mask is False, before any arithmetic can spread what stands there."""
    named = {name: batch[name] for name in _MASKED if name in batch}
    named |= {name: tensor for name, tensor in current.items() if tensor is not None}
    check_same_shape("objective", loss_mask=batch["loss_mask"], **named)
    return {name: torch.where(batch["loss_mask"], tensor, 0.0) for name, tensor in named.items()}
