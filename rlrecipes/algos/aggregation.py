"""From losses per token to one number. Owns every denominator; refuses to know micro-batches, ranks or packing.

The weight of a token is settled once, from the whole train step, before anything is split. Summing weight x loss then
gives the same loss and gradient however the samples are packed, split or spread over ranks; nobody divides again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor

from rlrecipes.errors import ContractError

Aggregation = Literal["per_sequence", "per_rollout", "per_prompt", "per_token", "constant"]


def compute_loss_weights(
    *,
    mode: Aggregation,
    loss_masks: Sequence[Tensor],
    rollout_ids: Sequence[Hashable],
    prompt_ids: Sequence[Hashable] | None = None,
    divisor: float | None = None,
) -> list[Tensor]:
    """Settle the share of every token in the train step's loss, ``sum(weight * token loss)`` over all tokens.

    Formula, where n[u] is the number of trained tokens of unit u, over all its samples::

        per_sequence: weight = 1 / (number of samples * n[sample])       mean over samples of their token means
        per_rollout:  weight = 1 / (number of rollouts * n[rollout])     mean over rollouts of their token means
        per_prompt:   weight = 1 / (number of prompts * n[prompt])       mean over prompts of their token means
        per_token:    weight = 1 / n[train step]                         mean over all trained tokens
        constant:     weight = 1 / (number of rollouts * divisor)        mean over rollouts of their sums / divisor

        weight = 0 where the loss mask is False

    As long as every rollout yields one sample, per_sequence and per_rollout are the same. When some yield several,
    per_rollout still gives each rollout one share, its samples share one denominator; under per_sequence a rollout of
    three samples weighs three times as much.

    A unit without a trained token adds nothing to the loss and still counts as one, so masking a rollout does not
    raise the share of the others; under per_token, and inside a prompt, it has no token to count.

    Args:
        mode: one of the above.
        loss_masks: S tensors [L_i], bool, of **all** samples of the train step.
        rollout_ids: [S], equal for samples of one rollout, e.g. ``(prompt_index, sibling)``.
        prompt_ids: [S], equal for samples of one prompt; per_prompt needs it.
        divisor: > 0, in tokens, e.g. the longest response allowed; constant needs it.

    Returns:
        S tensors [L_i], float64, none negative; they sum to the fraction of units that are trained (per_sequence,
        per_rollout, per_prompt), to 1 (per_token), to the mean number of trained tokens of a rollout over the divisor
        (constant), or to 0 when nothing is trained.

    Raises:
        ContractError: the mode is unknown, or lacks what it needs.
        ValueError: the sequences differ in length.

    Differs:
        The papers have one sample a rollout and groups of one size; here both may vary. slime's default, "per sample
        mean", is per_rollout.

    Source:
        per_sequence: Shao et al. 2024, arXiv:2402.03300, equation 3 (1/G sum of 1/|o_i| sums). per_token: Yu et al.
        2025 (DAPO), arXiv:2503.14476, equation 12. per_prompt: "prompt average" of Khatri et al. 2025 (ScaleRL),
        arXiv:2510.13786. constant: Liu et al. 2025 (Dr.GRPO), arXiv:2503.20783, section 3.2, with the constant of its
        code.
    """
    rows = list(zip(loss_masks, _units(mode, rollout_ids, prompt_ids), strict=True))
    num_tokens: Counter[Hashable] = Counter()
    for loss_mask, unit in rows:
        num_tokens[unit] += int(loss_mask.sum())
    if mode == "constant":
        if divisor is None or not divisor > 0:
            raise ContractError(
                "algos.compute_loss_weights.divisor", f"constant cannot divide by {divisor}", "give a divisor above 0"
            )
        denominators = dict.fromkeys(num_tokens, len(num_tokens) * divisor)
    else:
        denominators = {unit: len(num_tokens) * max(num, 1) for unit, num in num_tokens.items()}
    return [loss_mask.to(torch.float64) / denominators[unit] for loss_mask, unit in rows]


def _units(
    mode: Aggregation, rollout_ids: Sequence[Hashable], prompt_ids: Sequence[Hashable] | None
) -> Sequence[Hashable]:
    """What each sample shares its denominator with."""
    match mode:
        case "per_sequence":
            return range(len(rollout_ids))
        case "per_rollout" | "constant":
            return rollout_ids
        case "per_token":
            return [mode] * len(rollout_ids)
        case "per_prompt" if prompt_ids is not None:
            return prompt_ids
    raise ContractError(
        "algos.compute_loss_weights.mode",
        f"{mode!r} is unknown, or its prompt_ids are missing",
        "use per_sequence, per_rollout, per_token or constant, or per_prompt with prompt_ids",
    )
