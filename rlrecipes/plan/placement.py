"""Process -> host -> GPU. Pure arithmetic over the described cluster; deterministic."""

from __future__ import annotations

from dataclasses import dataclass

from rlrecipes.config.schema import RunConfig
from rlrecipes.errors import Problem
from rlrecipes.plan.nodes import DeviceNode, HostNode


@dataclass(frozen=True, slots=True)
class Placement:
    """Who owns what.

    Attributes:
        trainer: [num_ranks] in rank order.
        engines: one tuple of devices an engine, in the topology's order.
    """

    trainer: tuple[DeviceNode, ...]
    engines: tuple[tuple[DeviceNode, ...], ...]


def place(config: RunConfig, hosts: tuple[HostNode, ...], problems: list[Problem]) -> Placement:
    """Lay trainer ranks and engines onto devices.

    Colocated engines share the trainer's GPUs from the first; disaggregated ones come after them.

    Args:
        config: the recipe.
        hosts: the cluster.
        problems: what does not fit is appended.
    """
    parallel = config.parallel
    num_ranks = (
        parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.data_parallel_size
    )
    groups = [g for model in config.topology.served_models.values() for g in model.server_groups.values()]
    sizes = [group.gpus_per_engine for group in groups for _ in range(group.num_engines)]
    if config.topology.device == "cpu":
        cpu = DeviceNode(node=0, gpu=None)
        return Placement((cpu,) * num_ranks, tuple((cpu,) * size for size in sizes))
    gpus = [DeviceNode(node=n, gpu=g) for n, host in enumerate(hosts) for g in range(host.num_gpus)]
    is_colocated = config.topology.placement == "colocated"
    needed = max(num_ranks, sum(sizes)) if is_colocated else num_ranks + sum(sizes)
    if needed > len(gpus):
        parts = f"{num_ranks} trainer ranks and {sum(sizes)} engine GPUs, {config.topology.placement}"
        fix = "lower parallel sizes or engines, or use a larger cluster"
        problems.append(Problem("topology", f"needs {needed} GPUs ({parts}); the cluster has {len(gpus)}", fix))
        return Placement((), ())
    start = 0 if is_colocated else num_ranks
    engines = []
    for size in sizes:
        engines.append(tuple(gpus[start : start + size]))
        start += size
    return Placement(tuple(gpus[:num_ranks]), tuple(engines))
