"""The cluster a Plan is made for: described, or read from this machine, SLURM or Ray; one road for all of them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from rlrecipes.config.schema import ClusterConfig, GpuConfig
from rlrecipes.errors import ConfigError, Problem
from rlrecipes.plan.hosts import FoundHost, read_free_disk, read_local_host
from rlrecipes.plan.nodes import ClusterNode, HostNode, Plan
from rlrecipes.plan.slurm import read_slurm_hosts

_GPU_DIR = Path(__file__).parent.parent / "conf" / "gpu"
_READ_FIELDS = {"gpus_per_node": "num_gpus", "cpus_per_node": "num_cpus", "memory_bytes_per_node": "memory_bytes"}
RAY_ADDRESS = "RAY_ADDRESS"
"""Ray's own environment variable: the cluster that a process belongs to. Set in a job of the SLURM launcher."""
_CHOOSE_GPU = "choose it with gpu@cluster.gpu=NAME"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster, settled.

    Attributes:
        hosts: its machines, those with most GPUs first; none where a problem was found.
        node: what the Plan says of it beside its machines.
        notes: what could not be settled.
    """

    hosts: tuple[HostNode, ...]
    node: ClusterNode
    notes: tuple[str, ...] = ()


def read_cluster(
    cluster: ClusterConfig,
    runs_dir: str,
    problems: list[Problem],
    read_ray_hosts: Callable[[str], Sequence[FoundHost]],
) -> Cluster:
    """Settle a cluster: its machines and what their GPUs are.

    Args:
        cluster: the recipe's section.
        runs_dir: where free disk is looked for, of this machine.
        problems: what is missing, cannot be read, or differs from what is read is appended.
        read_ray_hosts: asks the Ray cluster at an address; called only where Ray is the source.
    """
    own = list(_find_missing(cluster))
    found: Sequence[FoundHost] = ()
    if not own:
        try:
            found = _read(cluster, read_ray_hosts)
        except ConfigError as error:
            own += error.problems
    found = sorted(found, key=lambda host: -host.node.num_gpus)
    if cluster.num_nodes is not None and found:
        if cluster.num_nodes > len(found):
            problem = f"is {cluster.num_nodes}; {len(found)} were found"
            own.append(Problem("cluster.num_nodes", problem, "lower it; null uses all"))
        found = found[: cluster.num_nodes]
    own += [*_find_misplaced(cluster), *_compare(cluster, found)]
    gpu, notes = _settle_gpu(cluster, found, own)
    problems += own
    disk_bytes = cluster.disk_bytes
    if disk_bytes is None and cluster.source == "host":
        disk_bytes = read_free_disk(Path(runs_dir))
    node = to_cluster_node(cluster).model_copy(update={"gpu": gpu, "disk_bytes": disk_bytes})
    return Cluster(() if own else tuple(host.node for host in found), node, notes)


def to_cluster_node(cluster: ClusterConfig) -> ClusterNode:
    """What a recipe's section says beside the machines, as it stands there.

    Args:
        cluster: the recipe's section.
    """
    return ClusterNode(
        name=cluster.name,
        source=cluster.source,
        gpu=cluster.gpu,
        nic_bytes_per_s=cluster.nic_bytes_per_s,
        disk_bytes=cluster.disk_bytes,
        address=cluster.address,
        gpu_hour_price=cluster.gpu_hour_price,
    )


def is_on_ray(plan: Plan) -> bool:
    """Whether a run joins a Ray cluster; elsewhere it starts a Ray of its own on one machine.

    Args:
        plan: the Plan.
    """
    return len(plan.hosts) > 1 or plan.cluster.source == "ray"


def find_gpus(name: str) -> tuple[GpuConfig, ...]:
    """The entries of conf/gpu that a device's name may mean; an H100 may be a card or on a board.

    Args:
        name: as its driver, Ray or SLURM has it.
    """
    files = [json.dumps(yaml.safe_load(file.read_text(encoding="utf-8"))) for file in sorted(_GPU_DIR.glob("*.yaml"))]
    gpus = [GpuConfig.model_validate_json(text) for text in files]
    return tuple(gpu for gpu in gpus if _may_be(gpu, name))


def check_is_here(plan: Plan) -> None:
    """Refuse to start a Plan on a machine that is not what it was made for.

    Args:
        plan: the Plan.

    Raises:
        ConfigError: it needs more machines than this one and no Ray is there to reach them, more GPUs than there are
            here, or others.
    """
    if is_on_ray(plan):
        if plan.cluster.source != "ray" and not os.environ.get(RAY_ADDRESS):
            problem = f"{plan.cluster.name} has {len(plan.hosts)} machines; a run starts on this one alone"
            fix = "submit it with hydra/launcher=slurm, start it in a Ray cluster with cluster=ray, or use one machine"
            raise ConfigError("cluster", problem, fix)
        return
    here = read_local_host()
    source, there = plan.cluster.source, plan.hosts[0]
    num_needed = there.num_gpus if source == "described" else plan.num_used_gpus.get(0, 0)
    fix = "start it on such a machine, or resolve it for this one with cluster=host"
    if num_needed > here.node.num_gpus:
        says = f"{plan.cluster.name} says {num_needed} GPUs" if source == "described" else f"needs {num_needed} GPUs"
        raise ConfigError("cluster", f"{says}; here are {here.node.num_gpus or 'none'}", fix)
    gpu = plan.cluster.gpu
    for name in here.gpu_names if gpu is not None and num_needed else ():
        if gpu is not None and find_gpus(name) and not _may_be(gpu, name):
            raise ConfigError("cluster.gpu", f"is {gpu.name}; here is {name}", fix)


def _find_misplaced(cluster: ClusterConfig) -> Iterator[Problem]:
    for name, source in (("address", "ray"), ("partition", "slurm")):
        value = getattr(cluster, name)
        if value is not None and cluster.source != source:
            yield Problem(f"cluster.{name}", f"is {value!r}; cluster.source is {cluster.source}", "set it to null")


def _find_missing(cluster: ClusterConfig) -> Iterator[Problem]:
    if cluster.source == "ray" and cluster.address is None:
        yield Problem("cluster.address", "is null; cluster.source is ray", "give host:port, or auto")
    if cluster.source == "described":
        for name in ("num_nodes", *_READ_FIELDS):
            if getattr(cluster, name) is None:
                yield Problem(f"cluster.{name}", "is null; a described cluster says it", f"give cluster.{name}=...")


def _read(cluster: ClusterConfig, read_ray_hosts: Callable[[str], Sequence[FoundHost]]) -> Sequence[FoundHost]:
    if cluster.source == "host":
        return [read_local_host()]
    if cluster.source == "slurm":
        return read_slurm_hosts(cluster.partition)
    if cluster.source == "ray":
        return read_ray_hosts(cluster.address or "auto")
    sizes = {field: getattr(cluster, name) for name, field in _READ_FIELDS.items()}
    return [FoundHost(HostNode(name=f"{cluster.name}-{n}", **sizes)) for n in range(cluster.num_nodes or 0)]


def _compare(cluster: ClusterConfig, found: Sequence[FoundHost]) -> Iterator[Problem]:
    for name, field in _READ_FIELDS.items():
        given = getattr(cluster, name)
        other = next((host.node for host in found if given not in (None, getattr(host.node, field))), None)
        if other is not None:
            problem = f"is {given}; {other.name} has {getattr(other, field)}"
            yield Problem(f"cluster.{name}", problem, "set it to null, it is read; or set cluster.source=described")


def _settle_gpu(
    cluster: ClusterConfig, found: Sequence[FoundHost], problems: list[Problem]
) -> tuple[GpuConfig | None, tuple[str, ...]]:
    given = cluster.gpu
    if not any(host.node.num_gpus for host in found):
        if given is not None and found:
            problem = f"is {given.name}; the cluster has no GPU"
            problems.append(Problem("cluster.gpu", problem, "set cluster.gpu=null, or give cluster.gpus_per_node"))
        return None, ()
    names = sorted({name for host in found for name in host.gpu_names})
    kinds = [find_gpus(name) for name in names]
    same = [gpu for gpu in kinds[0] if all(gpu in others for others in kinds)] if kinds else []
    if len(names) > 1 and not same:
        problem = f"has GPUs of several kinds: {', '.join(names)}"
        problems.append(Problem("cluster", problem, "use machines that are alike: another partition or fewer nodes"))
        return None, ()
    if given is not None:
        if same and not all(_may_be(given, name) for name in names):
            problem = f"is {given.name}; {' and '.join(names)} was found"
            problems.append(Problem("cluster.gpu", problem, "set cluster.gpu=null: it is read"))
        return given, ()
    if len(same) == 1:
        return same[0], ()
    if same:
        why = f"{names[0]} may be {' or '.join(gpu.name for gpu in same)}"
    else:
        why = f"{names[0]} is no GPU of conf/gpu" if names else f"{cluster.name} does not say what its GPUs are"
    return None, (f"{why}: nothing is said of memory and time; {_CHOOSE_GPU}",)


def _may_be(gpu: GpuConfig, name: str) -> bool:
    return _to_key(name) in map(_to_key, (gpu.name, *gpu.device_names))


def _to_key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia")
