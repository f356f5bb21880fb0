"""The critic's loss per token and how well it explains returns. Owns both; refuses to reduce the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlrecipes.algos.shapes import check_same_shape


def compute_clipped_value_loss(
    *, values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Squared error of the critic, without reward for moving further than ``value_clip`` in one update.

    Formula::

        clipped = old_values + clamp(values - old_values, -value_clip, value_clip)
        loss    = max((values - returns)^2, (clipped - returns)^2)

        d loss / d values = 2 (values - returns), and 0 where the clipped error is the larger one

    Args:
        values: any shape, in units of the reward, of the critic now.
        old_values: same shape, of the critic before the update.
        returns: same shape, the targets (``compute_gae``).
        value_clip: > 0, in units of the reward; None for the plain squared error.

    Returns:
        (loss, is_clipped), each of the input's shape; the loss in squared units of the reward. ``is_clipped`` is bool:
        the bound took the token's gradient. Gradients reach ``values`` alone.

    Raises:
        ContractError: shapes differ.

    Differs:
        No factor 1/2, as slime has none: a learning rate or coefficient taken from a source that halves the error has
        to be halved. The larger error counts, as in OpenAI baselines; with the smaller one, as some texts print it,
        the clip would not bound the update.

    Source:
        Schulman et al. 2017, arXiv:1707.06347, the squared error under equation 9; clip: OpenAI baselines' ppo2, as
        described by Engstrom et al. 2020, arXiv:2005.12729, "Value function clipping".
    """
    check_same_shape("compute_clipped_value_loss", values=values, old_values=old_values, returns=returns)
    old_values, returns = old_values.detach(), returns.detach()
    unclipped = (values - returns).square()
    if value_clip is None:
        return unclipped, torch.zeros_like(unclipped, dtype=torch.bool)
    moved = values - old_values
    clipped = (old_values + moved.clamp(-value_clip, value_clip) - returns).square()
    # Within the bound both errors are one number, which rounding makes two.
    is_clipped = (moved.abs() > value_clip) & (clipped > unclipped)
    return torch.where(is_clipped, clipped, unclipped), is_clipped


def compute_value_objective(
    batch: Mapping[str, Tensor], values: Tensor, *, value_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """What the critic's trainer minimises, per token (``compute_clipped_value_loss`` where the mask is True).

    Formula::

        loss = compute_clipped_value_loss(values, old_values, returns)        0 where loss_mask is False

    Args:
        batch: [T] each: ``loss_mask`` (bool), ``old_values`` and ``returns`` in units of the reward.
        values: [T] in units of the reward, of the critic now.
        value_clip: see ``compute_clipped_value_loss``.

    Returns:
        (loss, metrics): [T] each, finite in masked slots whatever stands there in the inputs. Metrics carry no
        gradient and mean something only where ``loss_mask``: ``value_loss``, ``value_clip_fraction`` (1 where clipped),
        ``value_mean`` and ``return_mean``.

    Raises:
        ContractError: shapes differ.

    Source:
        See ``compute_clipped_value_loss``.
    """
    loss_mask = batch["loss_mask"]
    given = {"values": values, "old_values": batch["old_values"], "returns": batch["returns"]}
    check_same_shape("compute_value_objective", loss_mask=loss_mask, **given)
    chosen = {name: torch.where(loss_mask, tensor, 0.0) for name, tensor in given.items()}
    loss, is_clipped = compute_clipped_value_loss(**chosen, value_clip=value_clip)
    metrics = {
        "value_loss": loss.detach(),
        "value_clip_fraction": is_clipped.to(loss.dtype),
        "value_mean": chosen["values"].detach(),
        "return_mean": chosen["returns"].detach(),
    }
    return loss, metrics


def compute_explained_variance(
    *, values: Sequence[Tensor], returns: Sequence[Tensor], loss_masks: Sequence[Tensor]
) -> float:
    """Measure how much of the returns' spread the critic foresaw.

    Formula, over the trained tokens of all samples::

        1 - variance(returns - values) / variance(returns)

    1: all of it. 0: no more than a constant would. Negative: worse than a constant. Returns without spread leave
    nothing to explain: 0.

    Args:
        values: S tensors [L_i], in units of the reward, of **all** samples of the train step.
        returns: S tensors [L_i], the targets.
        loss_masks: S tensors [L_i], bool, True where trained.

    Returns:
        A number without unit, at most 1.

    Raises:
        ContractError: shapes differ.
        ValueError: the sequences differ in length.

    Differs:
        Two passes in float64. OpenAI baselines and Stable-Baselines3 give NaN where returns have no spread.

    Source:
        Coefficient of determination with a free constant; ``explained_variance`` of OpenAI baselines.
    """
    rows = []
    for value, target, loss_mask in zip(values, returns, loss_masks, strict=True):
        check_same_shape("compute_explained_variance", values=value, returns=target, loss_masks=loss_mask)
        rows.append(torch.stack([target.detach()[loss_mask].double(), value.detach()[loss_mask].double()]))
    targets, predicted = torch.cat([*rows, torch.zeros(2, 0)], dim=1)
    if targets.numel() == 0 or bool(targets.min() == targets.max()):
        return 0.0
    unexplained, spread = ((x - x.mean()).square().sum() for x in (targets - predicted, targets))
    return float(1 - unexplained / spread)
