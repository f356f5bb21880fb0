"""Named tensors grouped into messages of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rlrecipes.weight_sync.protocols import NamedTensors


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one message.

    Attributes:
        tensors: (HF name, tensor), contiguous.
        num_bytes: of all of them.
    """

    tensors: tuple[tuple[str, torch.Tensor], ...]
    num_bytes: int


def to_buckets(named_tensors: NamedTensors, bucket_bytes: int) -> Iterator[Bucket]:
    """Group tensors in order; a tensor larger than a bucket is a bucket of its own.

    Args:
        named_tensors: consumed lazily, so that at most one bucket is held.
        bucket_bytes: most bytes of a bucket.
    """
    held: list[tuple[str, torch.Tensor]] = []
    num_bytes = 0
    for name, tensor in named_tensors:
        size = tensor.numel() * tensor.element_size()
        if held and num_bytes + size > bucket_bytes:
            yield Bucket(tuple(held), num_bytes)
            held, num_bytes = [], 0
        held.append((name, tensor.detach().contiguous()))
        num_bytes += size
    if held:
        yield Bucket(tuple(held), num_bytes)
