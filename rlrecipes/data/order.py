"""The order in which rows are asked, epoch after epoch. Owns the permutation; keeps no cursor."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(num_rows)


def compute_row_number(index: int, *, num_rows: int, seed: int, should_shuffle: bool) -> int:
    """Row that stands at a position of the endless stream.

    Every epoch of ``num_rows`` positions holds each row once; epoch e is the permutation drawn from ``seed + e``.

    Args:
        index: position, 0 or more.
        num_rows: rows of the file, at least 1.
        seed: of the run.
        should_shuffle: False keeps the file's order in every epoch.

    Returns:
        A row number in [0, num_rows); a pure function of the arguments.
    """
    epoch, position = divmod(index, num_rows)
    return int(_permutation(num_rows, seed + epoch)[position]) if should_shuffle else position
