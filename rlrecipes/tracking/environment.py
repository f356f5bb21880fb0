"""What a run ran on: git, Python, packages, machine. Owns collecting it; never fails and never changes anything.

No environment variable but SLURM's few, and no remote address is read: they hold secrets.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

GIT_TIMEOUT_S = 10.0
MAX_DIFF_CHARACTERS = 5_000_000


@dataclass(frozen=True, slots=True)
class GitState:
    """Where a checkout stands.

    Attributes:
        commit: the full hash.
        branch: its name; empty when detached.
        status: ``git status --porcelain``, untracked files included; empty when clean.
        diff: the tracked changes against the commit, cut at 5 million characters.
    """

    commit: str
    branch: str
    status: str
    diff: str

    @property
    def is_dirty(self) -> bool:
        """Whether the commit alone does not say what ran."""
        return bool(self.status)


def collect_git(directory: Path) -> GitState | None:
    """Look at the checkout that holds a directory.

    Args:
        directory: any directory of it.

    Returns:
        Its state; None without git, outside a checkout, before the first commit, or when git hangs.
    """
    try:
        commit = _run_git(directory, "rev-parse", "HEAD").strip()
        branch = _run_git(directory, "branch", "--show-current").strip()
        status = _run_git(directory, "status", "--porcelain")
        diff = _run_git(directory, "diff", "HEAD") if status else ""
    except (OSError, subprocess.SubprocessError):
        return None
    return GitState(commit, branch, status, diff[:MAX_DIFF_CHARACTERS])


def _run_git(directory: Path, *arguments: str) -> str:
    # GIT_OPTIONAL_LOCKS=0: looking must not take the index lock from under somebody's commit.
    finished = subprocess.run(
        ["git", "-C", str(directory), *arguments],
        capture_output=True,
        check=True,
        timeout=GIT_TIMEOUT_S,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
    )
    return finished.stdout.decode(errors="replace")


def collect_job() -> dict[str, str]:
    """The SLURM job that this process belongs to, and how often it was queued again; empty outside of one."""
    names = {"id": "SLURM_JOB_ID", "restart_count": "SLURM_RESTART_COUNT", "nodes": "SLURM_JOB_NODELIST"}
    found = {f"slurm.{key}": os.environ[name] for key, name in names.items() if name in os.environ}
    return {"slurm.restart_count": "0"} | found if "slurm.id" in found else {}


def collect_packages() -> list[str]:
    """The installed distributions, as ``name==version``, sorted."""
    found = {(d.metadata["Name"] or "", d.version) for d in metadata.distributions()}
    return sorted((f"{name}=={version}" for name, version in found if name), key=str.lower)


def collect_machine() -> dict[str, str | int]:
    """Python, operating system, cores and memory."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": platform.node(),
        "processor": _read_processor(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _read_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
