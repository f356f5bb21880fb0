"""To what multiples the tokens of a trainer's micro-batch are padded. Pure arithmetic of the layout."""

from __future__ import annotations

import math


def compute_sample_multiple(context_parallel_size: int) -> int:
    """Each sample is padded to a multiple of so many tokens: CP cuts it into two chunks a rank.

    Args:
        context_parallel_size: CP.
    """
    return 2 * context_parallel_size if context_parallel_size > 1 else 1


def compute_micro_batch_multiple(
    tensor_model_parallel_size: int, context_parallel_size: int, is_sequence_parallel: bool
) -> int:
    """Each micro-batch is padded to a multiple of so many tokens: SP splits a CP rank's share over TP.

    Args:
        tensor_model_parallel_size: TP.
        context_parallel_size: CP.
        is_sequence_parallel: SP.
    """
    split = tensor_model_parallel_size if is_sequence_parallel else 1
    return math.lcm(compute_sample_multiple(context_parallel_size), split * context_parallel_size)
