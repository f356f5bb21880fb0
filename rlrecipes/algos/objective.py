"""What the trainer minimises, per token. Owns the composition of losses and their metrics; refuses to reduce them.

An objective is a module-level function ``(batch, logprobs, entropy) -> (loss, metrics)`` whose options are bound with
``functools.partial``, so it pickles to trainer ranks. The trainer sums loss x ``loss_weights``. ``batch`` holds a
``MicroBatch``'s arrays as tensors under the same names, aligned to the position that predicts; an array that is None
there is absent here.

A metric's name says how micro-batches and ranks combine it: ``_max`` is the largest over trained tokens, ``_counts`` is
a vector that is added up as it is (masked tokens are not in it), ``_loss`` is a part of the loss and summed like it, x
``loss_weights``; any other is the mean over trained tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rlrecipes.algos.agreement import compute_log_ratio_counts
from rlrecipes.algos.distillation import compute_topk_reverse_kl
from rlrecipes.algos.kl import KlEstimator, compute_kl, compute_kl_loss
from rlrecipes.algos.off_policy import (
    OffPolicy,
    compute_off_policy_log_ratios,
    compute_off_policy_weights,
    compute_opsm_mask,
    compute_staleness_weights,
)
from rlrecipes.algos.policy_loss import (
    compute_cispo_policy_loss,
    compute_clipped_policy_loss,
    compute_gspo_policy_loss,
    compute_sft_loss,
)
from rlrecipes.algos.shapes import check_same_shape
from rlrecipes.errors import ContractError

PolicyLoss = Literal["clipped", "gspo", "cispo"]
Metrics = dict[str, Tensor]

_MASKED = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs", "staleness")
_MASKED_ROWS = ("topk_logprobs", "teacher_topk_logprobs")
_NO_CORRECTION = OffPolicy()


class CustomLoss(Protocol):
    """A loss of one's own, ``module:function``; its options are its keyword arguments.

    It gets what every objective gets, with 0 in masked slots, and returns what every objective returns: a loss [T] and
    metrics [T]. It must not reduce, and must not know micro-batches: the trainer sums loss x ``loss_weights``.
    """

    def __call__(
        self, batch: Mapping[str, Tensor], logprobs: Tensor, entropy: Tensor | None, **options: Any
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics, [T] each; see the class."""
        ...


def compute_policy_objective(  # noqa: PLR0913 (one keyword a config key)
    batch: Mapping[str, Tensor],
    logprobs: Tensor,
    entropy: Tensor | None,
    *,
    policy_loss: PolicyLoss = "clipped",
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    kl_coef_in_loss: float,
    kl_estimator: KlEstimator,
    kl_is_unbiased: bool = False,
    entropy_coef: float,
    off_policy: OffPolicy = _NO_CORRECTION,
    old_is_rollout: bool = False,
    distillation_topk_coef: float = 0.0,
) -> tuple[Tensor, Metrics]:
    """Policy loss with its off-policy weight, KL to the reference, distillation and entropy bonus, per token.

    Formula::

        loss = weight * policy_loss + kl_coef_in_loss * kl(logprobs, ref_logprobs)
               + distillation_topk_coef * kl(top-k of policy, top-k of teacher) - entropy_coef * entropy
        weight = off-policy weight * staleness weight, 0 where OPSM leaves the token out

    Args:
        batch: [T] each: ``loss_mask`` (bool), ``advantages``, and where there are any, ``old_logprobs``,
            ``ref_logprobs`` and ``rollout_logprobs`` (nats), ``sample_index`` (int64, which packed sample a position
            belongs to) and ``staleness`` (float, weight versions); [T, K] each: ``topk_logprobs`` (of the current
            policy, with gradient, at the teacher's likeliest tokens) and ``teacher_topk_logprobs``. Without
            ``old_logprobs`` the policy before the update is the current one: the ratio is 1, its gradient that of
            ``logprobs``.
        logprobs: [T] nats, of the current policy.
        entropy: [T] nats, of the current policy; None when nobody asks for it.
        policy_loss: clipped, gspo or cispo, see policy_loss.py.
        clip_low: see ``compute_clipped_policy_loss``.
        clip_high: see ``compute_clipped_policy_loss``.
        dual_clip: see ``compute_clipped_policy_loss``; cispo has none.
        kl_coef_in_loss: weight of the KL; 0 leaves it to the metrics.
        kl_estimator: see ``compute_kl``.
        kl_is_unbiased: whether the KL is weighted by exp(logprobs - old_logprobs), with its gradient.
        entropy_coef: weight of the entropy bonus.
        off_policy: corrections of the policy loss, see off_policy.py.
        old_is_rollout: whether ``old_logprobs`` are the engine's; the loss is the same, the mismatch metrics are then
            of the current policy.
        distillation_topk_coef: weight of ``compute_topk_reverse_kl``; 0 leaves it to the metrics.

    Returns:
        (loss, metrics): [T] each, finite in masked slots whatever stands there in the inputs. Metrics carry no
        gradient and mean something only where ``loss_mask``; the module says how they combine:

        - ``policy_loss`` (weighted), ``ratio_mean`` and ``_max``, ``clip_fraction`` (1 where clipped).
        - ``approx_kl``: k3 estimate of KL(old policy || current policy).
        - ``ref_kl``: ``kl_estimator``'s estimate of KL(current policy || reference), with ``ref_logprobs``.
        - ``entropy``: of the current policy, when given.
        - ``teacher_topk_kl``: with ``teacher_topk_logprobs``.
        - with ``rollout_logprobs``: ``rollout_logprob_abs_diff_mean`` and ``_max``, abs(logprobs - rollout_logprobs):
          in the first train step after a weight sync what trainer and engine disagree on, later also how far the
          policy has moved. ``mismatch_kl_k1`` and ``_k3``, estimates of KL(rollout policy || old policy), and
          ``off_policy_log_ratio_counts`` ([512], see ``compute_log_ratio_counts``); with ``old_is_rollout`` of the
          current policy in the old one's place, since a policy agrees with itself. ``off_policy_weight_mean`` and
          ``off_policy_weight_square_mean``, ``off_policy_clip_fraction`` (1 where a bound or the veto changed the
          weight).
        - ``opsm_fraction``: 1 where OPSM left the token out, when asked for.

    Raises:
        ContractError: a term is weighted but its input is missing, shapes differ, cispo is given a dual clip, or the
            KL in the loss has no gradient in expectation (``compute_kl_loss``).

    Source:
        Shao et al. 2024, arXiv:2402.03300, equation 3; entropy bonus: Schulman et al. 2017, arXiv:1707.06347,
        equation 9; the parts: see their functions.
    """
    chosen = _select_trained(batch, logprobs=logprobs, entropy=entropy)
    chosen.setdefault("old_logprobs", chosen["logprobs"].detach())
    loss, is_clipped, ratio = _compute_policy_loss(batch, chosen, policy_loss, clip_low, clip_high, dual_clip)
    weights, correction_metrics = _compute_weights(batch, chosen, off_policy, old_is_rollout)
    loss = torch.where(weights > 0, weights * loss, 0.0)
    metrics = {
        "policy_loss": loss,
        "ratio_mean": ratio,
        "ratio_max": ratio,
        "clip_fraction": is_clipped.to(ratio.dtype),
        "approx_kl": compute_kl(logprobs=chosen["old_logprobs"], ref_logprobs=chosen["logprobs"], estimator="k3"),
        **correction_metrics,
    }
    if "ref_logprobs" in chosen:
        metrics["ref_kl"] = (compute_kl_loss if kl_coef_in_loss else compute_kl)(
            logprobs=chosen["logprobs"],
            ref_logprobs=chosen["ref_logprobs"],
            estimator=kl_estimator,
            old_logprobs=chosen["old_logprobs"] if kl_is_unbiased else None,
        )
    if "teacher_topk_logprobs" in chosen:
        metrics["teacher_topk_kl"] = compute_topk_reverse_kl(
            topk_logprobs=chosen["topk_logprobs"], teacher_topk_logprobs=chosen["teacher_topk_logprobs"]
        )
    if "entropy" in chosen:
        metrics["entropy"] = chosen["entropy"]
    terms = {"ref_kl": kl_coef_in_loss, "teacher_topk_kl": distillation_topk_coef, "entropy": -entropy_coef}
    for name, coef in terms.items():
        loss = loss + coef * _take(metrics, name) if coef else loss
    return loss, {name: metric.detach() for name, metric in metrics.items()}


def compute_sft_objective(
    batch: Mapping[str, Tensor], logprobs: Tensor, entropy: Tensor | None
) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood per token (``compute_sft_loss``).

    Formula::

        loss = -logprobs

    Args:
        batch: [T]: ``loss_mask`` (bool).
        logprobs: [T] nats, of the current policy.
        entropy: [T] nats, of the current policy; None when nobody asks for it.

    Returns:
        (loss, metrics): [T] each, finite in masked slots; metrics hold ``nll``, the loss of a token whatever it weighs,
        and ``entropy`` when given, without gradient.

    Source:
        See ``compute_sft_loss``.
    """
    chosen = _select_trained(batch, logprobs=logprobs, entropy=entropy)
    loss = compute_sft_loss(logprobs=chosen["logprobs"])
    metrics = {"nll": loss.detach()}
    if "entropy" in chosen:
        metrics["entropy"] = chosen["entropy"].detach()
    return loss, metrics


def compute_custom_objective(
    batch: Mapping[str, Tensor],
    logprobs: Tensor,
    entropy: Tensor | None,
    *,
    function: CustomLoss,
    options: Mapping[str, Any],
) -> tuple[Tensor, Metrics]:
    """Run a loss of one's own and hold it to what every objective promises.

    Formula::

        loss, metrics = function(batch with 0 where masked, logprobs, entropy, **options)

    Args:
        batch: as in ``compute_policy_objective``.
        logprobs: [T] nats, of the current policy.
        entropy: [T] nats, of the current policy; None when nobody asks for it.
        function: see ``CustomLoss``.
        options: its keyword arguments.

    Returns:
        (loss, metrics): [T] each; metrics without gradient.

    Raises:
        ContractError: loss or a metric has another shape than ``logprobs``.

    Source:
        The user's.
    """
    chosen = _select_trained(batch, logprobs=logprobs, entropy=entropy)
    clean, clean_entropy = chosen.pop("logprobs"), chosen.pop("entropy", None)
    loss, metrics = function({**batch, **chosen}, clean, clean_entropy, **options)
    check_same_shape("compute_custom_objective", logprobs=logprobs, loss=loss, **metrics)
    return loss, {name: metric.detach() for name, metric in metrics.items()}


def _select_trained(batch: Mapping[str, Tensor], **current: Tensor | None) -> dict[str, Tensor]:
    """Put 0 wherever the mask is False, before any arithmetic can spread what stands there."""
    mask = batch["loss_mask"]
    named = {name: batch[name] for name in _MASKED if name in batch}
    named |= {name: tensor for name, tensor in current.items() if tensor is not None}
    check_same_shape("objective", loss_mask=mask, **named)
    rows = {name: batch[name] for name in _MASKED_ROWS if name in batch}
    check_same_shape("objective", loss_mask=mask, **{name: tensor[:, 0] for name, tensor in rows.items()})
    chosen = {name: torch.where(mask, tensor, 0.0) for name, tensor in named.items()}
    return chosen | {name: torch.where(mask.unsqueeze(1), tensor, 0.0) for name, tensor in rows.items()}


def _take(mapping: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in mapping:
        raise ContractError(
            "algos.compute_policy_objective", f"the loss asks for {name}, but there is no {name}", f"compute {name}"
        )
    return mapping[name]


def _compute_policy_loss(
    batch: Mapping[str, Tensor],
    chosen: Mapping[str, Tensor],
    kind: PolicyLoss,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    shared: dict[str, Any] = {name: chosen[name] for name in ("logprobs", "old_logprobs", "advantages")}
    shared |= {"clip_low": clip_low, "clip_high": clip_high}
    match kind:
        case "clipped":
            return compute_clipped_policy_loss(**shared, dual_clip=dual_clip)
        case "gspo":
            sample_index = _take(batch, "sample_index")
            return compute_gspo_policy_loss(
                **shared, loss_mask=batch["loss_mask"], sample_index=sample_index, dual_clip=dual_clip
            )
        case "cispo" if dual_clip is None:
            return compute_cispo_policy_loss(**shared)
    raise ContractError(
        "algos.compute_policy_objective.policy_loss",
        f"there is no policy loss {kind!r} with dual_clip={dual_clip}",
        "use clipped or gspo, or cispo without a dual clip",
    )


def _compute_weights(
    batch: Mapping[str, Tensor], chosen: Mapping[str, Tensor], options: OffPolicy, old_is_rollout: bool
) -> tuple[Tensor, Metrics]:
    """Weights [T] of the policy loss, and what they and their ratios tell."""
    mask, old_logprobs = batch["loss_mask"], chosen["old_logprobs"].detach()
    weights, metrics = torch.ones_like(old_logprobs), {}
    if options.correction != "none" or "rollout_logprobs" in chosen:
        rollout_logprobs = _take(chosen, "rollout_logprobs")
        weights, is_changed, log_ratios = compute_off_policy_weights(
            old_logprobs=old_logprobs,
            rollout_logprobs=rollout_logprobs,
            loss_mask=mask,
            sample_index=batch.get("sample_index"),
            correction=options.correction,
            low=options.low,
            high=options.high,
            veto=options.veto,
        )
        trainer_logprobs = old_logprobs
        if old_is_rollout:
            trainer_logprobs = chosen["logprobs"].detach()
            log_ratios = compute_off_policy_log_ratios(
                old_logprobs=trainer_logprobs,
                rollout_logprobs=rollout_logprobs,
                loss_mask=mask,
                sample_index=None,
                level="token",
            )
        distance = (chosen["logprobs"] - rollout_logprobs).abs()
        metrics = {
            "rollout_logprob_abs_diff_mean": distance,
            "rollout_logprob_abs_diff_max": distance,
            "mismatch_kl_k1": rollout_logprobs - trainer_logprobs,
            "mismatch_kl_k3": compute_kl(logprobs=rollout_logprobs, ref_logprobs=trainer_logprobs, estimator="k3"),
            "off_policy_log_ratio_counts": compute_log_ratio_counts(log_ratios=log_ratios, loss_mask=mask),
            "off_policy_clip_fraction": is_changed.to(weights.dtype),
        }
    if options.staleness_power:
        staleness = _take(chosen, "staleness")
        weights = weights * compute_staleness_weights(staleness=staleness, power=options.staleness_power)
    if options.opsm_delta is not None:
        is_kept = compute_opsm_mask(
            logprobs=chosen["logprobs"],
            old_logprobs=old_logprobs,
            advantages=chosen["advantages"],
            loss_mask=mask,
            sample_index=_take(batch, "sample_index"),
            delta=options.opsm_delta,
        )
        weights = torch.where(is_kept, weights, 0.0)
        metrics["opsm_fraction"] = (~is_kept).to(weights.dtype)
    if metrics:
        metrics |= {"off_policy_weight_mean": weights, "off_policy_weight_square_mean": weights.square()}
    return weights, metrics
