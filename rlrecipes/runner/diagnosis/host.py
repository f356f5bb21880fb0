"""This machine beside its packages: shared memory, limits, disk, ports."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from rlrecipes.config.schema import RunConfig
from rlrecipes.engines.sglang.process import find_free_port
from rlrecipes.plan.hosts import SHARED_MEMORY_BYTES, read_free_disk
from rlrecipes.plan.nodes import Plan, ProcessNode
from rlrecipes.plan.rules.host import compute_disk_bytes
from rlrecipes.runner.diagnosis.finding import Finding

_SHARED_MEMORY = Path("/dev/shm")
_SCRATCH = Path("/tmp")
_SCRATCH_BYTES = 1 << 30
_FILES_OF_A_PROCESS = 256
"""Open files of a process that asks nothing yet: libraries, pipes, Ray's sockets."""
_FILES_OF_A_REQUEST = 2
"""The router holds one connection to who asks and one to the engine."""
_NUM_THREADS = 2048
"""A small run on two cores has 380 in 16 processes; many are Ray's, which grow with the cores."""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_GIB = 1 << 30


def check_host(config: RunConfig, plan: Plan | None, *, has_gpus: bool) -> Iterator[Finding]:
    """What a run would meet here.

    Args:
        config: the recipe.
        plan: of it; None where it was refused, and then nothing is said of its ports and its share of memory.
        has_gpus: whether it is for GPUs, or there are any.
    """
    yield from _check_shared_memory(plan)
    yield from _check_limits(config, has_gpus=has_gpus)
    yield from _check_disk(config, plan)
    yield from _check_ports(plan)


def _check_shared_memory(plan: Plan | None) -> Iterator[Finding]:
    if not _SHARED_MEMORY.is_dir():  # macOS has none, and no limit
        return
    free = read_free_disk(_SHARED_MEMORY)
    weights = 0
    if plan is not None and plan.weight_sync.transport == "tensor" and plan.trainer.device == "cpu":
        weights = min(plan.weight_sync.bucket_bytes, plan.model.num_parameters * _DTYPE_BYTES[plan.model.dtype])
    is_enough = free >= SHARED_MEMORY_BYTES + weights
    fix = "" if is_enough else f"give {_gib(SHARED_MEMORY_BYTES + weights)}: docker run --shm-size, or mount -o size="
    # Without its gibibyte Ray takes a file in /tmp and is slow; without room for them weights do not travel.
    found = f"{_gib(free)} free in {_SHARED_MEMORY}"
    yield Finding("shared memory", found, "weights to engines, Ray's objects", fix, is_needed=free < weights)


def _check_limits(config: RunConfig, *, has_gpus: bool) -> Iterator[Finding]:
    files = _FILES_OF_A_PROCESS + _FILES_OF_A_REQUEST * config.rollout.max_concurrent_requests
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield Finding("open files", _tell(soft), "connections to router and engines", _raise(soft, f"-n {files}", files))
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    fix = _raise(soft, f"-u {_NUM_THREADS}", _NUM_THREADS)
    yield Finding("processes and threads", _tell(soft), "Ray, engines", fix)
    if has_gpus:
        soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        fix = "" if soft == resource.RLIM_INFINITY else "ulimit -l unlimited"
        yield Finding("locked memory", _tell(soft), "NCCL and NIXL over InfiniBand", fix, is_needed=False)


def _tell(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def _raise(soft: int, words: str, needed: int) -> str:
    return "" if soft == resource.RLIM_INFINITY or soft >= needed else f"ulimit {words}"


def _check_disk(config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
    runs_dir = Path(config.runs_dir).absolute()
    existing = next(parent for parent in (runs_dir, *runs_dir.parents) if parent.exists())
    needed = compute_disk_bytes(config, plan.model.shapes) if plan is not None else 0
    free, fix = read_free_disk(runs_dir), ""
    if not os.access(existing, os.W_OK):
        fix = "make it writable, or set runs_dir"
    elif free < needed:
        fix = f"free {_gib(needed)}, or set runs_dir"
    writable = "" if os.access(existing, os.W_OK) else "not writable, "
    yield Finding("disk", f"{writable}{_gib(free)} free under {config.runs_dir}", "checkpoints, exports", fix)
    free = read_free_disk(_SCRATCH)
    fix = "" if free >= _SCRATCH_BYTES else f"free {_gib(_SCRATCH_BYTES)}"
    yield Finding("disk of /tmp", f"{_gib(free)} free", "Ray's sockets and logs", fix)


def _check_ports(plan: Plan | None) -> Iterator[Finding]:
    try:
        yield Finding("ports", f"{find_free_port()} is free, as others are", "engines, routers, trainers")
    except OSError as error:
        fix = "bring the loopback interface up: ip link set lo up"
        yield Finding("ports", f"none can be had: {error.strerror}", "engines, routers, trainers", fix)
    for process in _list_processes(plan) if plan is not None else ():
        for port in _list_fixed_ports(process):
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
                probe.bind(("", port))
                continue
            fix = "end who listens there (ss -ltnp), or give another port, or none to have one found"
            yield Finding(f"port {port}", "taken", process.name, fix)


def _list_processes(plan: Plan) -> Iterator[ProcessNode]:
    for model in plan.served_models:
        yield model.router
        yield from model.engines


def _list_fixed_ports(process: ProcessNode) -> list[int]:
    """Those that the recipe names; others are placeholders until the process starts."""
    return [int(word) for flag, word in pairwise(process.command) if flag.endswith("port") and word.isdecimal()]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:,.1f} GiB"
