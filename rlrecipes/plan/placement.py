"""Process -> node -> GPU: arithmetic over the described cluster. Deterministic; says why things lie where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rlrecipes.config.schema import ParallelConfig, RunConfig, ServerGroupConfig
from rlrecipes.errors import Problem
from rlrecipes.plan.nodes import DeviceNode, HostNode

type EngineKey = tuple[str, str, int]
"""Served model, server group, number of the engine in it."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Who owns what.

    Attributes:
        trainer: [num_ranks] in rank order.
        engines: the devices of each engine, placeholders among them; in order of its ranks.
        notes: why they lie there, where it is not obvious.
    """

    trainer: tuple[DeviceNode, ...] = ()
    engines: dict[EngineKey, tuple[DeviceNode, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def count_trainer_ranks(parallel: ParallelConfig) -> int:
    """TP x PP x CP x DP.

    Args:
        parallel: the recipe's section.
    """
    return (
        parallel.tensor_model_parallel_size
        * parallel.pipeline_model_parallel_size
        * parallel.context_parallel_size
        * parallel.data_parallel_size
    )


def place(config: RunConfig, hosts: tuple[HostNode, ...], problems: list[Problem]) -> Placement:
    """Lay trainer ranks and engines onto devices.

    Trainer ranks take GPUs in rank order, node by node. Colocated engines share them from the first on, and take the
    next free ones where there are more engines than ranks; disaggregated ones come after both. An engine that fits into
    a node is never spread over two; larger ones take whole nodes. Prefill and decode engines of a model take turns, so
    that those which hand over KV caches are near each other.

    Args:
        config: the recipe.
        hosts: the cluster.
        problems: what does not fit is appended.
    """
    num_ranks = count_trainer_ranks(config.parallel)
    if config.topology.device == "cpu":
        cpu = DeviceNode(node=0, gpu=None)
        engines = {key: (cpu,) * group.gpus_per_engine for key, group in _engines(config)}
        return Placement((cpu,) * num_ranks, engines)
    gpus = [DeviceNode(node=node, gpu=gpu) for node, host in enumerate(hosts) for gpu in range(host.num_gpus)]
    trainer = gpus[:num_ranks]
    shared = _Pool(hosts, [0] * len(hosts))
    places = {key: shared.take(group.gpus_per_engine) for key, group in _engines(config) if _is_colocated(group)}
    taken = [sum(device.node == node for device in trainer) for node in range(len(hosts))]
    own = _Pool(hosts, [max(pair) for pair in zip(taken, shared.taken, strict=True)])
    places |= {key: own.take(group.gpus_per_engine) for key, group in _engines(config) if not _is_colocated(group)}
    if len(trainer) < num_ranks or not all(places.values()):
        problems.append(_too_few(config, len(gpus)))
        return Placement()
    return Placement(tuple(trainer), places, tuple(_notes(config, hosts, places)))


class _Pool:
    """GPUs of the nodes, each node's taken from the first on."""

    def __init__(self, hosts: Sequence[HostNode], taken: list[int]) -> None:
        self._sizes = [host.num_gpus for host in hosts]
        self._first: dict[int, int] = {}  # size -> node before which none has so many left
        self.taken = taken

    def take(self, size: int) -> tuple[DeviceNode, ...]:
        """So many GPUs of the first node that has them, or whole nodes in a row; empty when there are none."""
        largest = max(self._sizes, default=0)
        if largest and size > largest:
            return self._take_nodes(size)
        for node in range(self._first.get(size, 0), len(self._sizes)):
            if self._sizes[node] - self.taken[node] >= size:
                self._first[size] = node
                start = self.taken[node]
                self.taken[node] += size
                return tuple(DeviceNode(node=node, gpu=gpu) for gpu in range(start, start + size))
        self._first[size] = len(self._sizes)
        return ()

    def _take_nodes(self, size: int) -> tuple[DeviceNode, ...]:
        run: list[int] = []
        for node, num_gpus in enumerate(self._sizes):
            run = [*run, node] if self.taken[node] == 0 and num_gpus else []
            if sum(self._sizes[index] for index in run) >= size:
                devices = [DeviceNode(node=index, gpu=gpu) for index in run for gpu in range(self._sizes[index])]
                for index in run:
                    self.taken[index] = self._sizes[index]
                return tuple(devices[:size])
        return ()


def _is_colocated(group: ServerGroupConfig) -> bool:
    return group.placement == "colocated"


def _engines(config: RunConfig) -> Iterator[tuple[EngineKey, ServerGroupConfig]]:
    """Every engine that takes devices, in the order in which they take them."""
    for model_name, model in config.topology.served_models.items():
        keyed = [
            ((number + 0.5) / group.num_engines if group.worker_type in ("prefill", "decode") else 0.0, order, number)
            for order, group in enumerate(model.server_groups.values())
            for number in range(group.num_engines if group.engine != "external" else 0)
        ]
        groups = list(model.server_groups.items())
        for _, order, number in sorted(keyed):
            name, group = groups[order]
            yield (model_name, name, number), group


def _too_few(config: RunConfig, num_gpus: int) -> Problem:
    num_ranks = count_trainer_ranks(config.parallel)
    sums = {"colocated": 0, "disaggregated": 0}
    for _, group in _engines(config):
        sums[group.placement] += group.gpus_per_engine
    needed = max(num_ranks, sums["colocated"]) + sums["disaggregated"]
    parts = (
        f"{num_ranks} trainer ranks, {sums['colocated']} engine GPUs colocated and {sums['disaggregated']} of their own"
    )
    if needed > num_gpus:
        problem = f"needs {needed} GPUs ({parts}); the cluster has {num_gpus}"
        return Problem("topology", problem, "lower parallel sizes or engines, or use a larger cluster")
    problem = f"needs {needed} GPUs ({parts}) of {num_gpus}, but not every engine finds room inside a node"
    return Problem("topology", problem, "use engine sizes that divide the GPUs of a node, or one node more")


def _notes(
    config: RunConfig, hosts: Sequence[HostNode], places: dict[EngineKey, tuple[DeviceNode, ...]]
) -> Iterator[str]:
    per_node = min((host.num_gpus for host in hosts if host.num_gpus), default=0)
    inner = config.parallel.tensor_model_parallel_size * config.parallel.context_parallel_size
    if per_node and inner > 1 and (inner > per_node or per_node % inner):
        yield f"TP x CP = {inner} does not divide the {per_node} GPUs of a node: some of these groups cross nodes"
    for (model, group, number), devices in places.items():
        nodes = sorted({device.node for device in devices})
        if len(nodes) > 1:
            yield f"engine {model}-{group}-{number} is larger than a node and spans {len(nodes)} of them"
