"""RMSNorm for Megatron's local layer spec. Owns the mark that sequence parallelism needs; refuses kernels."""

from __future__ import annotations

from typing import Any

import torch


class RMSNorm(torch.nn.RMSNorm):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.

    Under sequence parallelism each TP rank sees part of the tokens; the mark on ``weight`` makes Megatron sum its
    gradient over the TP group.

    Args:
        hidden_size: width of the last dimension.
        eps: added to the mean of squares.
        is_sequence_parallel: whether the input is split over TP by tokens.
    """

    def __init__(self, hidden_size: int, eps: float, is_sequence_parallel: bool) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = is_sequence_parallel  # type: ignore[attr-defined]


def build_rms_norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> RMSNorm:
    """Build what ``WrappedTorchNorm(config, hidden_size, eps)`` stands for in a model of this package."""
    return RMSNorm(hidden_size, eps, config.sequence_parallel)
