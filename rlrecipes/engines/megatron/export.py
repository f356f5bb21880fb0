"""The policy as an HF directory, written by all pipeline stages. Owns the order of their steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from rlrecipes.engines.megatron.agreement import run_together
from rlrecipes.engines.megatron.hf_directory import (
    create_partial,
    publish,
    run_copy_but_weights,
    run_write_index,
    run_write_shards,
)

_FIX = "free space or fix permissions there; nothing earlier was lost"


def run_export_hf(tensors: Iterator[tuple[str, Tensor]], path: Path, source_dir: Path, is_writer: bool) -> None:
    """Write an HF directory that transformers loads; every rank calls this.

    Args:
        tensors: (HF name, whole tensor) of this rank's stage; empty on ranks without a part in gathering them.
        path: the directory.
        source_dir: where config.json and tokenizer come from.
        is_writer: whether this rank writes its stage's tensors.

    Raises:
        CheckpointError: it cannot be written; on every rank.
    """
    rank, partial = dist.get_rank(), path.with_name(f".{path.name}.partial")
    written: dict[str, tuple[str, int]] = {}

    def write_shards() -> None:
        if is_writer:
            written.update(run_write_shards(partial, f"model-{rank:05d}", tensors))
        else:
            for _ in tensors:  # takes part in the gathering
                pass

    def finish() -> None:
        if rank == 0:
            run_write_index(partial, {name: file for part in parts for name, file in part.items()})
            publish(partial, path)

    def begin() -> None:
        if rank == 0:
            run_copy_but_weights(source_dir, create_partial(path))

    run_together(str(path), _FIX, begin)
    run_together(str(path), _FIX, write_shards)
    parts: list[dict[str, tuple[str, int]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, written)
    run_together(str(path), _FIX, finish)
