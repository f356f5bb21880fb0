"""How far trainer and engine are apart: statistics that add up over micro-batches and ranks, and the gate on them.

Owns what is read from log ratios and weights. Quantiles do not add up, counts do: ranks add the counts of a histogram
with fixed bins, and the driver reads quantiles from the sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlrecipes.algos.policy_loss import LOG_RATIO_BOUND
from rlrecipes.algos.shapes import check_same_shape
from rlrecipes.errors import TrainerError

NUM_BINS = 512
_SCALE = 1e-4
_REACH = math.asinh(LOG_RATIO_BOUND / _SCALE)


def compute_log_ratio_counts(*, log_ratios: Tensor, loss_mask: Tensor) -> Tensor:
    """Count trained tokens by their log ratio, in bins that are the same everywhere.

    Formula::

        bin = floor((asinh(log ratio / 1e-4) / asinh(20 / 1e-4) + 1) / 2 * 512)

    Bins are 5 % of a log ratio wide, and 5e-6 nats around 0. Counts of micro-batches and ranks add up exactly.

    Args:
        log_ratios: [T] nats, within 20 of 0.
        loss_mask: [T] bool, True where trained.

    Returns:
        [512] float64, whole numbers that sum to the trained tokens; no gradient.

    Raises:
        ContractError: shapes differ.

    Source:
        None: a histogram.
    """
    check_same_shape("compute_log_ratio_counts", log_ratios=log_ratios, loss_mask=loss_mask)
    chosen = torch.where(loss_mask, log_ratios, 0.0)
    places = (torch.asinh(chosen / _SCALE) / _REACH + 1) / 2 * NUM_BINS
    bins = places.long().clamp(max=NUM_BINS - 1)
    return torch.zeros(NUM_BINS, dtype=torch.float64, device=chosen.device).index_add(0, bins, loss_mask.double())


def compute_ratio_quantiles(*, counts: Tensor, levels: Sequence[float]) -> list[float]:
    """Read quantiles of the ratio from counts of its logarithm.

    Formula::

        quantile(level) = exp(middle of the first bin at which the share of tokens up to it reaches level)

    Args:
        counts: [512] float64, sums of ``compute_log_ratio_counts``.
        levels: in (0, 1].

    Returns:
        One ratio a level; 1 when nothing was counted. Their logarithms are within 3 % or 5e-6 nats of the true ones.

    Source:
        None: a histogram.
    """
    total = float(counts.sum())
    if not total:
        return [1.0] * len(levels)
    cumulated = counts.cumsum(0)
    places = torch.searchsorted(cumulated, torch.tensor([level * total for level in levels], dtype=torch.float64))
    middles = ((places + 0.5) / NUM_BINS * 2 - 1) * _REACH
    found: list[float] = (torch.sinh(middles) * _SCALE).exp().tolist()
    return found


def compute_effective_sample_fraction(*, weight_mean: float, weight_square_mean: float) -> float:
    """Share of the tokens that would tell as much, were all weighted alike.

    Formula::

        (sum of w)^2 / (n * sum of w^2) = mean(w)^2 / mean(w^2)

    Args:
        weight_mean: mean weight over trained tokens.
        weight_square_mean: mean squared weight over the same tokens.

    Returns:
        In [0, 1]; 0 when every weight is 0.

    Source:
        Kish 1965, "Survey sampling"; as effective sample size: Kong 1992, "A note on importance sampling using
        standardized weights".
    """
    return weight_mean**2 / weight_square_mean if weight_square_mean else 0.0


def compute_off_policy_summary(*, counts: Tensor, weight_mean: float, weight_square_mean: float) -> dict[str, float]:
    """What a train step's off-policy sums tell, once they are added up over micro-batches and ranks.

    Formula::

        off_policy_ratio_p01, _p50, _p99   quantiles of the correction's ratio over trained tokens
        off_policy_effective_fraction      see ``compute_effective_sample_fraction``

    Args:
        counts: [512], sum of ``off_policy_log_ratio_counts``.
        weight_mean: ``off_policy_weight_mean``.
        weight_square_mean: ``off_policy_weight_square_mean``.

    Returns:
        Metric -> value.

    Source:
        See the two functions.
    """
    low, middle, high = compute_ratio_quantiles(counts=counts, levels=(0.01, 0.5, 0.99))
    return {
        "off_policy_ratio_p01": low,
        "off_policy_ratio_p50": middle,
        "off_policy_ratio_p99": high,
        "off_policy_effective_fraction": compute_effective_sample_fraction(
            weight_mean=weight_mean, weight_square_mean=weight_square_mean
        ),
    }


def check_logprob_agreement(
    metrics: Mapping[str, float], *, logprob_diff_mean_limit: float, logprob_diff_max_limit: float
) -> None:
    """Stop a run whose trainer and engine disagree about the tokens that were drawn.

    Args:
        metrics: with ``rollout_logprob_abs_diff_mean`` and ``_max`` in nats, of the first train step after a weight
            sync (later ones add how far the policy has moved).
        logprob_diff_mean_limit: largest acceptable mean, nats.
        logprob_diff_max_limit: largest acceptable maximum, nats.

    Raises:
        TrainerError: one is larger, or not a number.
    """
    limits = {"mean": logprob_diff_mean_limit, "max": logprob_diff_max_limit}
    found = {name: metrics[f"rollout_logprob_abs_diff_{name}"] for name in limits}
    # Written so that NaN, which is neither larger nor smaller, is too much.
    beyond = [name for name, limit in limits.items() if not found[name] <= limit]
    if beyond:
        raise TrainerError(
            "train.rollout_logprob_abs_diff",
            "trainer and engine disagree about the log probability of trained tokens: "
            + ", ".join(f"{name} {found[name]:.4g} nats, limit {limits[name]:.4g}" for name in beyond),
            "compare weights (weight_sync/is_verified), precision and sampling fields (temperature, top_p, top_k) of "
            "trainer and engine; raise the limits only if the difference is their precision",
        )
