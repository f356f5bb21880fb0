"""What length does to a rollout's reward and loss. Owns both rules; refuses to know statuses and configuration."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rlrecipes.errors import ContractError


def compute_overlong_penalties(*, num_tokens: Tensor, max_tokens: int, buffer_tokens: int) -> Tensor:
    """Punish a response softly as it nears the length at which it is cut (DAPO's soft overlong punishment).

    Formula::

        penalty = 0                                                num_tokens <= max_tokens - buffer_tokens
        penalty = (max_tokens - buffer_tokens - num_tokens) / buffer_tokens                       in the buffer
        penalty = -1                                               num_tokens > max_tokens

    Add it to the reward, times a coefficient in units of the reward, before any baseline.

    Args:
        num_tokens: [R] integer, generated tokens of each rollout over all its turns (tool answers do not count).
        max_tokens: the length at which generation stops.
        buffer_tokens: the last so many tokens below ``max_tokens`` are punished, in 1 .. max_tokens.

    Returns:
        [R] float64, in [-1, 0], without unit.

    Raises:
        ContractError: the buffer is empty or larger than ``max_tokens``, or lengths are not integers.

    Differs:
        The paper's reward is 1 or -1, so its coefficient is 1.

    Source:
        Yu et al. 2025 (DAPO), arXiv:2503.14476, equation 13; L_max is ``max_tokens``, L_cache ``buffer_tokens``.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ContractError(
            "algos.compute_overlong_penalties.buffer_tokens",
            f"a buffer of {buffer_tokens} tokens does not lie inside {max_tokens}",
            "choose 1 <= buffer_tokens <= max_tokens",
        )
    if num_tokens.is_floating_point():
        raise ContractError(
            "algos.compute_overlong_penalties.num_tokens", f"lengths are {num_tokens.dtype}", "count tokens as integers"
        )
    return ((max_tokens - buffer_tokens - num_tokens).double() / buffer_tokens).clamp(-1.0, 0.0)


def compute_filtered_loss_masks(*, loss_masks: Sequence[Tensor], is_rejected: Tensor) -> list[Tensor]:
    """Take rejected samples out of the loss, for example those that were cut (DAPO's overlong filtering).

    Formula::

        filtered[i] = loss_masks[i] and not is_rejected[i]

    The rollout stays in the train step without a trained token, so ``compute_loss_weights`` counts it as such. Its
    reward says nothing either: hand the same rollouts to ``compute_group_advantages`` as not counted.

    Args:
        loss_masks: S tensors [L_i], bool, True where trained.
        is_rejected: [S] bool; equal for all samples of one rollout.

    Returns:
        S tensors [L_i], bool; none shares memory with its input.

    Raises:
        ValueError: there is not one entry a sample.

    Source:
        Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.4, "Overlong Filtering".
    """
    return [loss_mask & ~rejected for loss_mask, rejected in zip(loss_masks, is_rejected, strict=True)]
