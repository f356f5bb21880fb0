"""From losses per token to one number. Owns every denominator; refuses to know micro-batches, ranks or packing.

The weight of a token is settled once, from the whole train step, before anything is split. Summing weight x loss then
gives the same loss and gradient however the samples are packed, split or spread over ranks; nobody divides again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor

from rlrecipes.errors import ContractError

Aggregation = Literal["per_sequence", "per_token"]


def compute_loss_weights(
    *, mode: Aggregation, loss_masks: Sequence[Tensor], rollout_ids: Sequence[Hashable]
) -> list[Tensor]:
    """Settle the share of every token in the train step's loss, ``sum(weight * token loss)`` over all tokens.

    Formula::

        n[r] = number of trained tokens of rollout r, over all its samples
        per_sequence: weight = 1 / (number of rollouts * n[r])        mean over rollouts of the mean over their tokens
        per_token:    weight = 1 / sum(n)                             mean over all trained tokens
        weight = 0 where the loss mask is False

    A rollout without a trained token adds nothing to the loss. Under per_sequence it still counts as a rollout, so
    masking a rollout does not raise the share of the others; under per_token it counts nothing.

    Args:
        mode: per_sequence or per_token.
        loss_masks: S tensors [L_i], bool, of **all** samples of the train step.
        rollout_ids: [S], equal for samples of one rollout, e.g. ``(prompt_index, sibling)``.

    Returns:
        S tensors [L_i], float64, none negative; they sum to the fraction of rollouts that are trained (per_sequence)
        or to 1 (per_token), or to 0 when nothing is trained.

    Raises:
        ContractError: the mode is unknown.
        ValueError: the sequences differ in length.

    Differs:
        per_sequence divides by a rollout's tokens, not by a sample's, so a rollout that yields many samples weighs as
        much as any other.

    Source:
        per_sequence: Shao et al. 2024, arXiv:2402.03300, equation 3 (1/G sum of 1/|o_i| sums). per_token: Yu et al.
        2025 (DAPO), arXiv:2503.14476, equation 12.
    """
    num_tokens: dict[Hashable, int] = {}
    for loss_mask, rollout_id in zip(loss_masks, rollout_ids, strict=True):
        num_tokens[rollout_id] = num_tokens.get(rollout_id, 0) + int(loss_mask.sum())
    match mode:
        case "per_sequence":
            denominators = {rollout: len(num_tokens) * max(num, 1) for rollout, num in num_tokens.items()}
        case "per_token":
            denominators = dict.fromkeys(num_tokens, max(sum(num_tokens.values()), 1))
        case _:
            raise ContractError(
                "algos.compute_loss_weights.mode", f"unknown mode {mode!r}", "use per_sequence or per_token"
            )
    return [
        loss_mask.to(torch.float64) / denominators[rollout_id]
        for loss_mask, rollout_id in zip(loss_masks, rollout_ids, strict=True)
    ]
