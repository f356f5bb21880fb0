"""Memory of keys and values, one slot a token. Owns the pool and its free list; refuses to know whose they are."""

from __future__ import annotations

import numpy as np
import torch

from rlrecipes.engines.embedded.architecture import Architecture


class KVCache:
    """A pool of token slots with a stack of free ones.

    Slot 0 is never handed out: padding reads and writes it.

    Args:
        architecture: gives the shapes.
        num_slots: tokens it can hold.
        dtype: of keys and values.
    """

    def __init__(self, architecture: Architecture, num_slots: int, dtype: torch.dtype) -> None:
        self.num_slots = num_slots
        self._shape = (num_slots + 1, 2 * architecture.num_kv_heads * architecture.head_dim)
        self._num_layers = architecture.num_layers
        self._dtype = dtype
        self.layers: list[torch.Tensor] = []
        self.allocate_memory()
        self._free = np.arange(num_slots, 0, -1, dtype=np.int64)
        self._num_free = num_slots

    @property
    def num_free(self) -> int:
        """Slots that can be handed out now."""
        return self._num_free

    @property
    def num_bytes(self) -> int:
        """Of all layers."""
        return self._num_layers * self._shape[0] * self._shape[1] * torch.empty(0, dtype=self._dtype).element_size()

    def allocate_memory(self) -> None:
        """Get the tensors, zeroed: [slots, key heads then value heads, head_dim] a layer, flattened."""
        self.layers = [torch.zeros(self._shape, dtype=self._dtype) for _ in range(self._num_layers)]

    def release_memory(self) -> None:
        """Give the tensors back; the bookkeeping stays."""
        self.layers = []

    def take(self, count: int) -> np.ndarray:
        """Hand out ``count`` slots, int64; the caller has checked ``num_free``."""
        assert count <= self._num_free, "the scheduler took more slots than are free"
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count].copy()

    def give_back(self, slots: np.ndarray) -> None:
        """Take slots back."""
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)
