"""This machine: cores, memory, GPUs, free disk. Asks the operating system only, no GPU library."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlrecipes.plan.nodes import HostNode


@dataclass(frozen=True, slots=True)
class FoundHost:
    """A machine as it was found.

    Attributes:
        node: its place in the Plan.
        gpu_names: what its GPUs call themselves, each name once; empty where nobody says.
    """

    node: HostNode
    gpu_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Gpu:
    name: str
    uuid: str


def read_local_host(root: Path = Path("/")) -> FoundHost:
    """What a process started here may use.

    Cores by its affinity, memory by its control groups, GPUs by ``CUDA_VISIBLE_DEVICES``.

    Args:
        root: where /proc and /sys lie.
    """
    gpus = _select_visible(_read_gpus(root), os.environ.get("CUDA_VISIBLE_DEVICES"))
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


def read_free_disk(path: Path) -> int:
    """Bytes that a user may still write under a directory, which need not exist yet.

    Args:
        path: the directory.
    """
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def _read_gpus(root: Path) -> list[_Gpu]:
    gpus = []
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        lines = (line.partition(":") for line in file.read_text(encoding="utf-8").splitlines())
        facts = {key.strip(): value.strip() for key, _, value in lines}
        gpus.append(_Gpu(facts.get("Model", "unnamed"), facts.get("GPU UUID", "")))
    return gpus


def _select_visible(gpus: Sequence[_Gpu], visible: str | None) -> list[_Gpu]:
    """As CUDA reads ``CUDA_VISIBLE_DEVICES``: indices or starts of UUIDs, up to the first that names nothing."""
    if visible is None:
        return list(gpus)
    chosen = []
    for word in map(str.strip, visible.split(",")):
        if word.isdecimal() and int(word) < len(gpus):
            chosen.append(gpus[int(word)])
        elif word.startswith("MIG-"):
            chosen.append(_Gpu("a MIG slice", word))
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
