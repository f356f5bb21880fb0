"""The nodes of a SLURM partition, as sinfo tells them: the same words from SLURM 20 to 25, one line a node."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from rlrecipes.errors import ConfigError
from rlrecipes.plan.hosts import FoundHost
from rlrecipes.plan.nodes import HostNode
from rlrecipes.suggest import did_you_mean

_COMMAND = ("sinfo", "--noheader", "--Node", "--format=%N|%c|%m|%G|%T|%P")
_TIMEOUT_S = 30.0
_USABLE = ("idle", "mixed", "allocated", "completing", "planned", "reserved")
_ALIVE = "~#%!@^-+"  # marks behind a state; of those left out, * does not answer, $ is under maintenance
_GRES = re.compile(r"(?:^|,)gpu(?::(?P<name>[^:,()]+))?:(?P<count>\d+)")


@dataclass(frozen=True, slots=True)
class _Line:
    host: FoundHost
    state: str
    partition: str
    is_default: bool


def read_slurm_hosts(partition: str | None) -> list[FoundHost]:
    """Ask SLURM for the nodes of a partition that run jobs or wait for them.

    Args:
        partition: its name; None: the default one.

    Raises:
        ConfigError: there is no SLURM here, it does not answer, or it has no such partition or no such node.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SINFO_")}
    try:
        done = subprocess.run(_COMMAND, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True, env=environment)
    except FileNotFoundError as error:
        fix = "run this where SLURM's commands are, or describe the cluster: conf/cluster/h100_8.yaml shows how"
        raise ConfigError("cluster.source", "is slurm; this machine has no sinfo", fix) from error
    except subprocess.TimeoutExpired as error:
        problem = f"is slurm; sinfo gave no answer in {_TIMEOUT_S:g} s"
        raise ConfigError("cluster.source", problem, "see whether slurmctld runs: scontrol ping") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        raise ConfigError("cluster.source", f"is slurm; sinfo says: {said[0]}", "see `scontrol ping`") from error
    return parse_nodes(done.stdout, partition)


def parse_nodes(text: str, partition: str | None) -> list[FoundHost]:
    """The usable nodes of a partition.

    Args:
        text: sinfo's, a line a node and partition: name|cores|MiB|GRES|state|partition.
        partition: its name; None: the one marked as default.

    Raises:
        ConfigError: there is no such partition, or none of its nodes is usable.
    """
    lines = list(_parse(text))
    wanted = [line for line in lines if (line.is_default if partition is None else line.partition == partition)]
    if not wanted:
        problem = "is null, and SLURM has no default one" if partition is None else f"SLURM has no {partition!r}"
        raise ConfigError("cluster.partition", problem, did_you_mean(partition or "", {x.partition for x in lines}))
    found = [line.host for line in wanted if line.state.rstrip(_ALIVE) in _USABLE]
    if not found:
        states = ", ".join(f"{count} {state}" for state, count in Counter(line.state for line in wanted).items())
        problem = f"no node of {wanted[0].partition!r} is usable: {states}"
        raise ConfigError("cluster.partition", problem, "see `sinfo -R`, or choose another partition")
    return found


def _parse(text: str) -> Iterator[_Line]:
    for line in text.splitlines():
        name, cpus, mebibytes, gres, state, partition = line.split("|")
        gpus = [(match["name"], int(match["count"])) for match in _GRES.finditer(gres)]
        node = HostNode(
            name=name,
            num_cpus=int(cpus),
            num_gpus=sum(count for _, count in gpus),
            memory_bytes=int(mebibytes) << 20,
        )
        names = tuple(dict.fromkeys(kind for kind, _ in gpus if kind))
        yield _Line(FoundHost(node, names), state, partition.removesuffix("*"), partition.endswith("*"))
