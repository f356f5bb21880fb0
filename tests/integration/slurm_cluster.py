"""A real SLURM for tests: its daemons, started here, with as many nodes and fake GPUs as a test asks for."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from rlrecipes.engines.sglang.process import find_free_port

PATH = f"{os.environ['PATH']}:/usr/sbin"
_DAEMONS = ("slurmctld", "slurmd", "sinfo", "scontrol", "sbatch")
_MISSING = [name for name in _DAEMONS if not shutil.which(name, path=PATH)]
NEEDS_SLURM = [
    pytest.mark.skipif(bool(_MISSING), reason=f"no {', '.join(_MISSING)}: make debian"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd runs as root only"),
]
_START_TIMEOUT_S = 90


@contextlib.contextmanager
def run_slurm(directory: Path, nodes: Mapping[str, str], partitions: Sequence[str]) -> Iterator[None]:
    """Start it, let every command here find it, and end it with all jobs.

    Args:
        directory: for its files.
        nodes: name -> GRES, ``gpu:2``, ``gpu:KIND:2`` or none.
        partitions: lines of slurm.conf.
    """
    config = _write_config(directory, nodes, partitions)
    environment = os.environ | {"SLURM_CONF": str(config), "PATH": PATH}
    daemons = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in nodes)]
    started = [
        subprocess.Popen([*d, "-f", str(config)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for d in daemons
    ]
    patch = pytest.MonkeyPatch()
    patch.setenv("SLURM_CONF", str(config))
    patch.setenv("PATH", PATH)
    try:
        _wait_until_idle(directory)
        yield
    finally:
        _end_jobs()
        patch.undo()
        for process in started:
            process.terminate()
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            process.kill()


def _end_jobs() -> None:
    """A node that has a job left does not end before it could tell the controller of it."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        subprocess.run(["scancel", "-u", "root"], capture_output=True, timeout=30, check=False)
        left = subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, timeout=30, check=False).stdout
        if not left.strip():
            return
        time.sleep(0.5)


def _write_config(directory: Path, nodes: Mapping[str, str], partitions: Sequence[str]) -> Path:
    for name in ("state", "log", "spool", "dev"):
        (directory / name).mkdir(parents=True)
    for index in range(8):
        (directory / "dev" / f"nvidia{index}").symlink_to("/dev/null")
    host = os.uname().nodename.partition(".")[0]
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={find_free_port()}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/none",
        "CredType=cred/none",
        "AuthInfo=cred_expire=5",  # a job that was requeued waits for so long
        "MpiDefault=none",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        "GresTypes=gpu",
        "SwitchType=switch/none",
        "ReturnToService=2",
        "AccountingStorageType=accounting_storage/none",
        "SlurmdParameters=config_overrides",
        "SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,requeue_setup_env_fail",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "JobRequeue=1",
        "KillWait=60",
        f"SlurmctldPidFile={directory}/slurmctld.pid",
        f"SlurmdPidFile={directory}/slurmd.%n.pid",
        f"SlurmdSpoolDir={directory}/spool/%n",
        f"StateSaveLocation={directory}/state",
        f"SlurmctldLogFile={directory}/log/slurmctld.log",
        f"SlurmdLogFile={directory}/log/slurmd.%n.log",
    ]
    lines += [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={find_free_port()} CPUs=16 RealMemory=16000"
        f"{' Gres=' + gres if gres else ''} State=UNKNOWN"
        for name, gres in nodes.items()
    ]
    config = directory / "slurm.conf"
    config.write_text("\n".join([*lines, *partitions]) + "\n")
    gres_lines = []
    for name, gres in nodes.items():
        _, *kind, count = gres.split(":") if gres else ("", "0")
        if int(count):
            of_kind = f" Type={kind[0]}" if kind else ""
            gres_lines.append(f"NodeName={name} Name=gpu{of_kind} File={directory}/dev/nvidia[0-{int(count) - 1}]")
    (directory / "gres.conf").write_text("\n".join(gres_lines) + "\n")
    (directory / "cgroup.conf").write_text("CgroupAutomount=no\n")
    return config


def _wait_until_idle(directory: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        done = subprocess.run(["sinfo", "-hN", "-o", "%N %T"], capture_output=True, text=True, timeout=60, check=False)
        if {line.split()[1] for line in done.stdout.splitlines()} == {"idle"}:
            return
        time.sleep(0.2)
    logs = "\n".join(path.read_text()[-1000:] for path in (directory / "log").iterdir())
    pytest.fail(f"SLURM did not come up: {done.stdout}{done.stderr}\n{logs}")
