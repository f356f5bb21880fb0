"""This machine: cores, memory, GPUs, free disk. Asks the operating system and NVIDIA's driver; no CUDA, no torch."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.nvml import Gpu, read_gpus

LAST_PORT = 65535
SHARED_MEMORY_BYTES = 1 << 30
"""Of /dev/shm, kept by every run for the objects that its processes hand each other."""


@dataclass(frozen=True, slots=True)
class FoundHost:
    """A machine as it was found.

    Attributes:
        node: its place in the Plan.
        gpu_names: what its GPUs call themselves, each name once; empty where nobody says.
    """

    node: HostNode
    gpu_names: tuple[str, ...] = ()


def read_local_host(root: Path = Path("/")) -> FoundHost:
    """What a process started here may use.

    Cores by its affinity, memory by its control groups, GPUs by ``CUDA_VISIBLE_DEVICES``.

    Args:
        root: where /proc and /sys lie.

    Raises:
        ConfigError: it has GPUs, and their driver does not answer.
    """
    gpus = read_visible_gpus()
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # macOS has no affinity
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    node = HostNode(
        name=platform.node(),
        num_cpus=num_cpus,
        num_gpus=len(gpus),
        memory_bytes=min([physical, *_read_memory_limits(root)]),
    )
    return FoundHost(node, tuple(dict.fromkeys(gpu.name for gpu in gpus)))


def read_visible_gpus() -> list[Gpu]:
    """The GPUs that a process started here may use, in the order in which it counts them.

    Raises:
        ConfigError: their driver does not answer.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [] if visible == "" else _select_visible(read_gpus(), visible)


def read_free_disk(path: Path) -> int:
    """Bytes that a user may still write under a directory, which need not exist yet.

    Args:
        path: the directory.
    """
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def _select_visible(gpus: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """As CUDA reads ``CUDA_VISIBLE_DEVICES``: indices or starts of UUIDs, up to the first that names nothing."""
    if visible is None:
        return list(gpus)
    chosen = []
    for word in map(str.strip, visible.split(",")):
        if word.isdecimal() and int(word) < len(gpus):
            chosen.append(gpus[int(word)])
        elif word.startswith("MIG-"):
            chosen.append(Gpu("a MIG slice", word))
        elif word.startswith("GPU-") and (same := [gpu for gpu in gpus if gpu.uuid.startswith(word)]):
            chosen.append(same[0])
        else:
            break
    return chosen


def _read_memory_limits(root: Path) -> Iterator[int]:
    """Limits of this process's control groups and of all around them, version 1 and 2."""
    groups = root / "proc/self/cgroup"
    for line in groups.read_text(encoding="utf-8").splitlines() if groups.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")  # in a container it may not be mounted, its parents are
        for directory in (group, *group.parents):
            file = directory / name
            text = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
            if text.isdecimal():  # or "max"
                yield int(text)
            if directory == base:
                break
