"""Sums over the samples of a packed micro-batch. Owns the way from tokens to samples and back; knows no losses."""

from __future__ import annotations

import torch
from torch import Tensor

from rlrecipes.algos.shapes import check_same_shape


def compute_sample_sums(*, values: Tensor, loss_mask: Tensor, sample_index: Tensor) -> Tensor:
    """Add up the trained tokens of each packed sample, and give every token its sample's sum.

    Formula::

        sums[t] = sum(values[u] for u where sample_index[u] == sample_index[t] and loss_mask[u])

    Args:
        values: [T] float or bool.
        loss_mask: [T] bool, True where trained.
        sample_index: [T] int64, which packed sample a position belongs to, in 0 .. T - 1; padding is a sample of its
            own.

    Returns:
        [T], float64, so that rounding does not grow with a sample's length. Gradients reach trained ``values`` alone.

    Raises:
        ContractError: shapes differ.

    Source:
        Definition of a segmented sum.
    """
    check_same_shape("compute_sample_sums", values=values, loss_mask=loss_mask, sample_index=sample_index)
    chosen = torch.where(loss_mask, values.double(), 0.0)
    # There are at most T samples. Asking how many exactly would make an accelerator wait for the answer.
    return torch.zeros_like(chosen).index_add(0, sample_index, chosen)[sample_index]


def compute_sample_means(*, values: Tensor, loss_mask: Tensor, sample_index: Tensor) -> Tensor:
    """Average the trained tokens of each packed sample, and give every token its sample's mean.

    Formula::

        means[t] = sum(values over t's sample where trained) / max(number of trained tokens of t's sample, 1)

    Args:
        values: [T] float.
        loss_mask: [T] bool, True where trained.
        sample_index: [T] int64, as in ``compute_sample_sums``.

    Returns:
        [T], float64; 0 for a sample without a trained token.

    Raises:
        ContractError: shapes differ.

    Source:
        Definition of a segmented mean.
    """
    sums = compute_sample_sums(values=values, loss_mask=loss_mask, sample_index=sample_index)
    counts = compute_sample_sums(values=loss_mask, loss_mask=loss_mask, sample_index=sample_index)
    return sums / counts.clamp(min=1.0)
