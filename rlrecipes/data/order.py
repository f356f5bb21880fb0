"""The order in which rows are asked, epoch after epoch. Owns the permutation and the stream; keeps no cursor."""

from __future__ import annotations

from collections.abc import Sequence
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


class RowStream[T]:
    """Rows of a file, epoch after epoch, each epoch in its own order.

    Args:
        rows: at least one.
        seed: of the run; decides the order.
        should_shuffle: False keeps the file's order.
    """

    def __init__(self, rows: Sequence[T], *, seed: int, should_shuffle: bool) -> None:
        self._rows = rows
        self._seed = seed
        self._should_shuffle = should_shuffle

    @property
    def num_rows(self) -> int:
        """Rows of the file: what one epoch holds."""
        return len(self._rows)

    def __len__(self) -> int:
        return self.num_rows

    def row(self, index: int) -> T:
        """Row at a position of the endless stream.

        Args:
            index: 0 or more; ``index // num_rows`` is the epoch.
        """
        number = compute_row_number(index, num_rows=self.num_rows, seed=self._seed, should_shuffle=self._should_shuffle)
        return self._rows[number]
