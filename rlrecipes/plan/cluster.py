"""The cluster a Plan is made for, as this host describes itself. Asks the operating system only, no GPU library."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from rlrecipes.plan.nodes import HostNode

_NVIDIA = Path("/proc/driver/nvidia/gpus")


def read_local_hosts() -> tuple[HostNode, ...]:
    """This machine as a cluster of one host."""
    num_gpus = len(list(_NVIDIA.iterdir())) if _NVIDIA.is_dir() else 0
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (HostNode(name=platform.node(), num_cpus=os.cpu_count() or 1, num_gpus=num_gpus, memory_bytes=memory_bytes),)
