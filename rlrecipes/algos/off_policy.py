"""Weights for tokens that another policy drew, and what they tell. Owns corrections and their statistics; no losses.

Three policies meet: the engine that drew the tokens (``rollout_logprobs``), the trainer before the update
(``old_logprobs``) and the current one (``logprobs``). A loss's own ratio leads from old to current; the weights here
lead from rollout to old, so the loss times the weight estimates what tokens drawn by the trainer would have given.
Weights change the numerator only: every denominator stays that of ``aggregation.compute_loss_weights``.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from rlrecipes.algos.policy_loss import LOG_RATIO_BOUND
from rlrecipes.algos.segments import compute_sample_means, compute_sample_sums
from rlrecipes.algos.shapes import check_same_shape
from rlrecipes.errors import ContractError

Correction = Literal[
    "none", "token_tis", "sequence_tis", "token_mis", "sequence_mis", "geometric_mis", "icepop", "decoupled"
]
Level = Literal["token", "sequence", "geometric"]

_LEVELS: dict[Correction, Level] = {
    "token_tis": "token",
    "sequence_tis": "sequence",
    "token_mis": "token",
    "sequence_mis": "sequence",
    "geometric_mis": "geometric",
    "icepop": "token",
    "decoupled": "token",
}
_TRUNCATING = ("token_tis", "sequence_tis", "decoupled")


@dataclasses.dataclass(frozen=True, slots=True)
class OffPolicy:
    """The corrections of an objective, which multiply.

    Attributes:
        correction: see ``compute_off_policy_weights``.
        low: see ``compute_off_policy_weights``.
        high: see ``compute_off_policy_weights``.
        veto: see ``compute_off_policy_weights``.
        opsm_delta: see ``compute_opsm_mask``; None: no such mask.
        staleness_power: see ``compute_staleness_weights``; 0: age does not matter.
    """

    correction: Correction = "none"
    low: float = 0.0
    high: float = 2.0
    veto: float | None = None
    opsm_delta: float | None = None
    staleness_power: float = 0.0


def compute_off_policy_log_ratios(
    *, old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, sample_index: Tensor | None, level: Level
) -> Tensor:
    """Log ratio of the trainer's probability before the update to the engine's.

    Formula::

        d[t]      = old_logprobs[t] - rollout_logprobs[t]
        token     = clip(d[t], -20, 20)
        sequence  = clip(sum of d over the trained tokens of t's sample, -20, 20)
        geometric = clip(mean of d over the trained tokens of t's sample, -20, 20)

    A sequence is one packed sample, as in ``policy_loss.compute_gspo_policy_loss``.

    Args:
        old_logprobs: [T] nats, by the trainer before the update.
        rollout_logprobs: [T] nats, by the engine.
        loss_mask: [T] bool, True where trained.
        sample_index: [T] int64, which packed sample a position belongs to; the token level does without.
        level: token, sequence or geometric.

    Returns:
        [T] nats, without gradient; 0 where masked.

    Raises:
        ContractError: shapes differ, or a level over samples has no ``sample_index``.

    Source:
        Token: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training",
        fengyao.notion.site/off-policy-rl. Sequence and geometric: Liu et al. 2025, "When speed kills stability:
        demystifying RL collapse from the training-inference mismatch", richardli.xyz/rl-collapse.
    """
    check_same_shape(
        "compute_off_policy_log_ratios",
        old_logprobs=old_logprobs,
        rollout_logprobs=rollout_logprobs,
        loss_mask=loss_mask,
    )
    differences = torch.where(loss_mask, old_logprobs.detach() - rollout_logprobs.detach(), 0.0)
    if level != "token":
        if sample_index is None:
            raise ContractError(
                "algos.compute_off_policy_log_ratios.sample_index",
                f"a {level} ratio needs to know which sample a token belongs to",
                "give sample_index, or choose a correction of tokens",
            )
        compute = compute_sample_sums if level == "sequence" else compute_sample_means
        over_sample = compute(values=differences, loss_mask=loss_mask, sample_index=sample_index)
        differences = torch.where(loss_mask, over_sample.to(differences.dtype), 0.0)
    return differences.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def compute_off_policy_weights(
    *,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    sample_index: Tensor | None,
    correction: Correction,
    low: float,
    high: float,
    veto: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weigh each token by how much likelier the trainer was to draw it than the engine that did.

    Formula::

        w = exp(log ratio of the level)                           see ``compute_off_policy_log_ratios``

        token_tis, sequence_tis:     clip(w, low, high)           truncated importance sampling
        token_mis, sequence_mis,
        geometric_mis:               w where low <= w <= high, else 0     masked importance sampling
        icepop:                      as token_mis
        decoupled:                   min(w, high)                 decoupled PPO: rollout policy is the behaviour, old
                                                                  the proximal policy
        none:                        1

        veto: 0 for all tokens of a sample with a trained token whose token ratio < veto

    Args:
        old_logprobs: [T] nats, by the trainer before the update.
        rollout_logprobs: [T] nats, by the engine.
        loss_mask: [T] bool, True where trained.
        sample_index: [T] int64, which packed sample a position belongs to; None where neither a correction of
            sequences nor a veto asks for it.
        correction: one of the above.
        low: least ratio; ``decoupled`` has none.
        high: largest ratio.
        veto: token ratio below which the whole sample is dropped; None for no veto.

    Returns:
        (weights, is_changed, log_ratios), [T] each, without gradient; weights are 1 and log ratios 0 where masked.
        ``is_changed`` is bool: a bound or the veto changed the weight. ``log_ratios`` are those of the level.

    Raises:
        ContractError: shapes differ, the correction is unknown, or a level over samples has no ``sample_index``.

    Differs:
        A sequence is a sample, not a rollout. Bounds of masks are inclusive. No weight is normalised by the mean of
        its micro-batch, which would make the loss depend on the split.

    Source:
        token_tis: Yao et al. 2025, fengyao.notion.site/off-policy-rl. sequence_tis, masks, veto: Liu et al. 2025,
        richardli.xyz/rl-collapse. icepop: Ling team 2025, arXiv:2510.18855, section on IcePop (M(k) = k within
        [alpha, beta], else 0). decoupled: Hilton et al. 2021, arXiv:2110.00641, the decoupled clipped
        objective; for language models Fu et al. 2025 (AReaL), arXiv:2505.24298, the decoupled PPO objective.
    """
    if correction != "none" and correction not in _LEVELS:
        raise ContractError(
            "algos.compute_off_policy_weights.correction",
            f"unknown correction {correction!r}",
            f"use none, {', '.join(_LEVELS)}",
        )

    def log_ratios_of(level: Level) -> Tensor:
        return compute_off_policy_log_ratios(
            old_logprobs=old_logprobs,
            rollout_logprobs=rollout_logprobs,
            loss_mask=loss_mask,
            sample_index=sample_index,
            level=level,
        )

    log_ratios = log_ratios_of(_LEVELS.get(correction, "token"))
    ratios = log_ratios.exp() if correction != "none" else torch.ones_like(log_ratios)
    if correction == "none":
        weights = ratios
    elif correction in _TRUNCATING:
        weights = ratios.clamp(0.0 if correction == "decoupled" else low, high)
    else:
        weights = torch.where((ratios >= low) & (ratios <= high), ratios, 0.0)
    if veto is not None:
        is_vetoed = _compute_vetoes(log_ratios_of("token"), loss_mask, sample_index, veto)
        weights = torch.where(is_vetoed, 0.0, weights)
    weights = torch.where(loss_mask, weights, 1.0)
    return weights, loss_mask & (weights != ratios), log_ratios


def compute_opsm_mask(
    *, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, sample_index: Tensor, delta: float
) -> Tensor:
    """Leave out tokens that the policy has moved away from and that were worse than their group (OPSM).

    Formula::

        kl[t]      = mean(old_logprobs - logprobs over the trained tokens of t's sample)
        is_kept[t] = not (advantages[t] < 0 and kl[t] > delta)

    Args:
        logprobs: [T] nats, of the current policy.
        old_logprobs: [T] nats, of the policy before the update.
        advantages: [T].
        loss_mask: [T] bool, True where trained.
        sample_index: [T] int64, which packed sample a position belongs to.
        delta: nats a token.

    Returns:
        [T] bool; True where masked.

    Raises:
        ContractError: shapes differ.

    Differs:
        A sequence is a sample, not a rollout.

    Source:
        DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, "Off-Policy Sequence Masking", equation 9.
    """
    check_same_shape("compute_opsm_mask", logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    kl = compute_sample_means(values=old_logprobs - logprobs, loss_mask=loss_mask, sample_index=sample_index)
    return ~(loss_mask & (advantages < 0) & (kl > delta))


def compute_staleness_weights(*, staleness: Tensor, power: float) -> Tensor:
    """Let tokens of older weights count less.

    Formula::

        weight = max(staleness, 1) ** -power

    Args:
        staleness: any shape, weight versions: trained version - version that drew the token; 0 or 1 is on-policy
            enough to count in full.
        power: at least 0; 0 leaves every weight 1, 1 divides by the age.

    Returns:
        Same shape and dtype, in (0, 1].

    Raises:
        ContractError: the power is negative, or ages are no floating-point numbers.

    Differs:
        The source divides the learning rate of a whole gradient; here each token of the loss is divided, so one train
        step may hold tokens of many ages. The power is an addition.

    Source:
        Zhang et al. 2015, arXiv:1511.05950, the staleness-dependent learning rate.
    """
    if power < 0 or not staleness.is_floating_point():
        raise ContractError(
            "algos.compute_staleness_weights",
            f"power must not be negative (it is {power}) and ages must be floats (they are {staleness.dtype})",
            "give a power of 0 or more, and ages as floating-point numbers",
        )
    return staleness.clamp(min=1.0).pow(-power)


def _compute_vetoes(token_log_ratios: Tensor, loss_mask: Tensor, sample_index: Tensor | None, veto: float) -> Tensor:
    if sample_index is None:
        raise ContractError(
            "algos.compute_off_policy_weights.veto",
            "a veto needs to know which sample a token belongs to",
            "give sample_index, or leave the veto out",
        )
    is_extreme = token_log_ratios.exp() < veto
    return compute_sample_sums(values=is_extreme, loss_mask=loss_mask, sample_index=sample_index) > 0
