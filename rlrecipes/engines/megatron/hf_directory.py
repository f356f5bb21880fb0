"""Writing an HF directory so that a reader never sees half of one. Owns shards, index and the final rename."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlrecipes.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"

_SHARD_BYTES = 4 << 30
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pth", ".gguf")


@contextmanager
def reported_writes(path: Path) -> Iterator[None]:
    """Turn a failed write below ``path`` into a CheckpointError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            str(path), f"cannot be written: {error}", "free space or fix permissions there; nothing earlier was lost"
        ) from error


def create_partial(path: Path) -> Path:
    """Make an empty directory beside ``path``, replacing one a killed run left there."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def publish(partial: Path, path: Path) -> None:
    """Give a complete directory its name, in place of an earlier one."""
    if path.exists():
        earlier = path.with_name(f".{path.name}.earlier")
        shutil.rmtree(earlier, ignore_errors=True)
        path.rename(earlier)
        partial.rename(path)
        shutil.rmtree(earlier)
    else:
        partial.rename(path)


def run_write_shards(directory: Path, stem: str, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[str, int]]:
    """Write tensors as safetensors of at most about 4 GiB each, holding one of these in memory.

    Args:
        directory: where.
        stem: start of every file name; distinct for each writer.
        tensors: (HF name, tensor).

    Returns:
        HF name -> (file, bytes).
    """
    written: dict[str, tuple[str, int]] = {}
    shard: dict[str, Tensor] = {}
    num_shards = shard_bytes = 0

    def write() -> None:
        file = f"{stem}-{num_shards:05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        written.update({name: (file, tensor.nbytes) for name, tensor in shard.items()})

    for name, tensor in tensors:
        if shard and shard_bytes + tensor.nbytes > _SHARD_BYTES:
            write()
            shard, shard_bytes, num_shards = {}, 0, num_shards + 1
        shard[name] = tensor.cpu().contiguous()
        shard_bytes += tensor.nbytes
    if shard:
        write()
    return written


def run_write_index(directory: Path, written: Mapping[str, tuple[str, int]]) -> None:
    """Write the index that names the file of each tensor."""
    index = {
        "metadata": {"total_size": sum(size for _, size in written.values())},
        "weight_map": {name: file for name, (file, _) in sorted(written.items())},
    }
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=1), encoding="utf-8")


def run_copy_but_weights(source: Path, directory: Path) -> None:
    """Copy config.json, tokenizer and whatever else stands beside the weights of an HF directory."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(file, directory / file.name)
