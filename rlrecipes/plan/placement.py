"""Process -> node -> GPU: arithmetic over the described cluster. Deterministic; says why things lie where they lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rlrecipes.config.schema import ParallelConfig, PlacementKind, RunConfig, ServerGroupConfig
from rlrecipes.errors import Problem
from rlrecipes.plan.nodes import DeviceNode, HostNode

MAX_CPU_PROCESSES_PER_HOST = 4096
"""Trainer ranks and engine ranks; above it a size is a mistake, told before they are listed one by one."""

type GroupKey = tuple[str, str]
"""Served model, server group."""

type EngineKey = tuple[str, str, int]
"""Served model, server group, number of the engine in it."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Who owns what.

    Attributes:
        trainer: [num_ranks] in rank order.
        num_engines: of each group, what the recipe leaves open filled in.
        engines: the devices of each engine, placeholders among them; in order of its ranks.
        notes: why they lie there, where it is not obvious.
    """

    trainer: tuple[DeviceNode, ...] = ()
    num_engines: dict[GroupKey, int] = field(default_factory=dict)
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
    counts = count_engines(config, hosts)
    if config.topology.device == "cpu":
        num_processes = num_ranks + sum(_count_engine_devices(config, counts).values())
        limit = MAX_CPU_PROCESSES_PER_HOST * len(hosts)
        if num_processes > limit:
            problem = f"needs {num_processes} processes on CPUs; {limit} is the most on {len(hosts)} machines"
            problems.append(Problem("topology", problem, "lower parallel sizes or engines"))
            return Placement()
        return _place_on_cpus(config, counts, num_ranks, len(hosts))
    num_gpus = sum(host.num_gpus for host in hosts)
    if _count_needed(config, counts) > num_gpus:
        problems.append(_too_few(config, counts, num_gpus))
        return Placement()
    gpus = [DeviceNode(node=node, gpu=gpu) for node, host in enumerate(hosts) for gpu in range(host.num_gpus)]
    trainer = gpus[:num_ranks]
    shared = _Pool(hosts, [0] * len(hosts))
    engines = list(_engines(config, counts))
    places = {key: shared.take(group.gpus_per_engine) for key, group in engines if _is_colocated(group)}
    ranks = Counter(device.node for device in trainer)
    taken = [ranks[node] for node in range(len(hosts))]
    own = _Pool(hosts, [max(pair) for pair in zip(taken, shared.taken, strict=True)])
    places |= {key: own.take(group.gpus_per_engine) for key, group in engines if not _is_colocated(group)}
    if len(trainer) < num_ranks or not all(places.values()):
        problems.append(_too_few(config, counts, num_gpus))
        return Placement()
    return Placement(tuple(trainer), counts, places, tuple(_notes(config, hosts, places)))


def _place_on_cpus(config: RunConfig, counts: dict[GroupKey, int], num_ranks: int, num_hosts: int) -> Placement:
    """Ranks in equal parts; engines in turn, first where fewest ranks are."""
    trainer = tuple(DeviceNode(node=rank * num_hosts // num_ranks, gpu=None) for rank in range(num_ranks))
    ranks = Counter(device.node for device in trainer)
    order = sorted(range(num_hosts), key=lambda node: ranks[node])
    places = {
        key: (DeviceNode(node=order[index % num_hosts], gpu=None),) * group.gpus_per_engine
        for index, (key, group) in enumerate(_engines(config, counts))
    }
    return Placement(trainer, counts, places)


def count_engines(config: RunConfig, hosts: Sequence[HostNode]) -> dict[GroupKey, int]:
    """Engines of every group; where a recipe leaves them open, at least one.

    Args:
        config: the recipe.
        hosts: the cluster.
    """
    models = config.asked_models.items()
    groups = {(name, key): group for name, model in models for key, group in model.server_groups.items()}
    started = {key: group for key, group in groups.items() if group.engine != "external"}
    counts = {key: len(group.urls) if key not in started else group.num_engines or 0 for key, group in groups.items()}
    if config.topology.device == "cpu":
        return counts | {key: counts[key] or 1 for key in started}
    num_ranks = count_trainer_ranks(config.parallel)
    colocated = {key: group for key, group in started.items() if _is_colocated(group)}
    _fill_up(counts, colocated, num_ranks)
    taken = max(num_ranks, sum(counts[key] * group.gpus_per_engine for key, group in colocated.items()))
    apart = {key: group for key, group in started.items() if not _is_colocated(group)}
    _fill_up(counts, apart, sum(host.num_gpus for host in hosts) - taken)
    return counts


def _fill_up(counts: dict[GroupKey, int], groups: Mapping[GroupKey, ServerGroupConfig], num_gpus: int) -> None:
    """Share what fixed groups leave of so many GPUs among the open ones."""
    free = num_gpus - sum(counts[key] * group.gpus_per_engine for key, group in groups.items())
    open_keys = [key for key in groups if counts[key] == 0]
    for position, key in enumerate(open_keys):
        size = groups[key].gpus_per_engine
        counts[key] = max(1, free // (len(open_keys) - position) // size)
        free -= counts[key] * size


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


def _engines(config: RunConfig, counts: Mapping[GroupKey, int]) -> Iterator[tuple[EngineKey, ServerGroupConfig]]:
    """Every engine that takes devices, in the order in which they take them."""
    for model_name, model in config.asked_models.items():
        keyed = []
        for order, (name, group) in enumerate(model.server_groups.items()):
            count = counts[model_name, name] if group.engine != "external" else 0
            takes_turns = group.worker_type in ("prefill", "decode")
            keyed += [((number + 0.5) / count if takes_turns else 0.0, order, number) for number in range(count)]
        groups = list(model.server_groups.items())
        for _, order, number in sorted(keyed):
            name, group = groups[order]
            yield (model_name, name, number), group


def _count_engine_devices(config: RunConfig, counts: Mapping[GroupKey, int]) -> dict[PlacementKind, int]:
    """Devices of all engines by their groups' placement, without listing any."""
    sums: dict[PlacementKind, int] = {"colocated": 0, "disaggregated": 0}
    for model_name, model in config.asked_models.items():
        for name, group in model.server_groups.items():
            if group.engine != "external":
                sums[group.placement] += counts[model_name, name] * group.gpus_per_engine
    return sums


def _count_needed(config: RunConfig, counts: Mapping[GroupKey, int]) -> int:
    """GPUs of trainer and engines, however well they are packed."""
    sums = _count_engine_devices(config, counts)
    return max(count_trainer_ranks(config.parallel), sums["colocated"]) + sums["disaggregated"]


def _too_few(config: RunConfig, counts: Mapping[GroupKey, int], num_gpus: int) -> Problem:
    num_ranks, needed = count_trainer_ranks(config.parallel), _count_needed(config, counts)
    sums = _count_engine_devices(config, counts)
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
