"""What the time of a step depends on, gathered from a recipe or from a Plan. Owns no arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlrecipes.config.schema import (
    GpuConfig,
    ModelShapes,
    ParallelConfig,
    PlacementKind,
    RlConfig,
    RunConfig,
    ScheduleConfig,
    ServerGroupConfig,
    SftConfig,
    TopologyConfig,
    WeightSyncConfig,
    WorkerType,
)
from rlrecipes.plan.inventory import read_figures
from rlrecipes.plan.nodes import POLICY, ClusterNode, DeviceNode, HostNode, Plan, ServerGroupNode
from rlrecipes.plan.placement import Placement
from rlrecipes.plan.rules.lengths import compute_longest


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Engines of the policy, all alike.

    Attributes:
        worker_type: what they do.
        placement: beside the trainer or apart.
        tensor_parallel_size: TP of one.
        pipeline_parallel_size: PP of one.
        attention_data_parallel_size: replicas of attention in one.
        native: SGLang's own options.
        devices: [num_engines][TP x PP].
    """

    worker_type: WorkerType
    placement: PlacementKind
    tensor_parallel_size: int
    pipeline_parallel_size: int
    attention_data_parallel_size: int
    native: Mapping[str, Any]
    devices: tuple[tuple[DeviceNode, ...], ...]

    @property
    def num_engines(self) -> int:
        """How many."""
        return len(self.devices)

    @property
    def num_gpus(self) -> int:
        """Of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_gpus_of_node(self) -> int:
        """Of the first engine, on its first node."""
        return sum(device.node == self.devices[0][0].node for device in self.devices[0])

    @property
    def is_spread(self) -> bool:
        """Whether an engine's ranks lie on several nodes."""
        return any(len({device.node for device in devices}) > 1 for devices in self.devices)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the time of a step depends on.

    Attributes:
        gpu: what every device is.
        nic_bytes_per_s: of one GPU, to other nodes.
        host_memory_bytes: of each machine.
        shapes: of the model.
        dtype_bytes: of one weight.
        algo: the algorithm.
        schedule: steps and train steps.
        max_prompt_tokens: longest prompt.
        max_new_tokens: longest answer; of several turns, all of them and what is shown between them.
        max_rollout_tokens: prompt and answer of the longest rollout, of training or evaluation.
        is_distribution_cut: whether sampling keeps only some tokens.
        max_concurrent_requests: over all engines.
        parallel: the trainer's layout.
        trainer_devices: in rank order.
        should_offload_trainer: while colocated engines work.
        should_offload_engines: while the trainer works.
        engine_groups: of the policy, those that the run starts and that answer.
        shares_gpus: whether any served model, the policy or another, has a group on the trainer's GPUs.
        has_sharded_receivers: whether weight syncs reach engines of several ranks.
        weight_sync: how weights travel.
        seed: of the run.
        num_gpus: that the run keeps, each once: of the trainer, of every served model, of placeholders.
    """

    gpu: GpuConfig
    nic_bytes_per_s: float
    host_memory_bytes: tuple[int, ...]
    shapes: ModelShapes
    dtype_bytes: int
    algo: RlConfig | SftConfig
    schedule: ScheduleConfig
    max_prompt_tokens: int
    max_new_tokens: int
    max_rollout_tokens: int
    is_distribution_cut: bool
    max_concurrent_requests: int
    parallel: ParallelConfig
    trainer_devices: tuple[DeviceNode, ...]
    should_offload_trainer: bool
    should_offload_engines: bool
    engine_groups: tuple[EngineGroup, ...]
    shares_gpus: bool
    has_sharded_receivers: bool
    weight_sync: WeightSyncConfig
    seed: int
    num_gpus: int

    @property
    def group_size(self) -> int:
        """Rollouts of a prompt; 1 for demonstrations."""
        return self.algo.group_size if isinstance(self.algo, RlConfig) else 1

    @property
    def has_rollouts(self) -> bool:
        """Whether the engines are part of a step, and not of evaluations alone."""
        return isinstance(self.algo, RlConfig)

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained beside the policy."""
        return isinstance(self.algo, RlConfig) and self.algo.critic is not None

    @property
    def num_samples(self) -> int:
        """Of a step."""
        return self.schedule.prompts_per_step * self.group_size


def to_step_inputs(
    config: RunConfig, shapes: ModelShapes, cluster: ClusterNode, hosts: Sequence[HostNode], placement: Placement
) -> StepInputs | None:
    """Gather them from a recipe.

    Args:
        config: the recipe.
        shapes: of its model.
        cluster: settled.
        hosts: its machines.
        placement: of its processes.

    Returns:
        None where nothing can be said: no GPU is described, or the policy's engines are not the run's own.
    """
    if config.topology.device == "cpu":
        return None
    models = config.asked_models.values()
    layout = _Layout(
        shapes=shapes,
        hosts=hosts,
        parallel=config.parallel,
        trainer_devices=placement.trainer,
        offloading=config.topology,
        engine_groups=_engine_groups(config, placement),
        shares_gpus=any(group.placement == "colocated" for model in models for group in model.server_groups.values()),
        has_sharded_receivers=reaches_shards(config),
        num_gpus=len({device for devices in (placement.trainer, *placement.engines.values()) for device in devices}),
    )
    return _gather(config, cluster, layout)


def reaches_shards(config: RunConfig) -> bool:
    """Whether weight syncs reach engines of several ranks: they hash their shards, and no checksum is compared.

    Args:
        config: the recipe.
    """
    updated = [model for model in config.asked_models.values() if model.is_updated]
    return any(_holds_shards(group) for model in updated for group in model.server_groups.values())


def _holds_shards(group: ServerGroupConfig | ServerGroupNode) -> bool:
    return group.gpus_per_engine > 1 and group.worker_type in _ANSWERING


def _engine_groups(config: RunConfig, placement: Placement) -> tuple[EngineGroup, ...]:
    model = config.asked_models.get(POLICY)
    if model is None or model.num_joining_engines:
        return ()
    groups = {name: group for name, group in model.server_groups.items() if group.worker_type in _ANSWERING}
    if any(group.engine == "external" for group in groups.values()):
        return ()
    return tuple(
        build_engine_group(
            group,
            tuple(placement.engines[POLICY, name, number] for number in range(placement.num_engines[POLICY, name])),
        )
        for name, group in groups.items()
    )


def build_engine_group(
    group: ServerGroupConfig | ServerGroupNode, devices: tuple[tuple[DeviceNode, ...], ...]
) -> EngineGroup:
    """A group of the recipe or of its Plan, with its devices.

    Args:
        group: the recipe's or the Plan's.
        devices: [num_engines][TP x PP].
    """
    return EngineGroup(
        worker_type=group.worker_type,
        placement=group.placement,
        tensor_parallel_size=group.gpus_per_engine // group.pipeline_parallel_size,
        pipeline_parallel_size=group.pipeline_parallel_size,
        attention_data_parallel_size=group.attention_data_parallel_size,
        native=read_figures(group.sglang),
        devices=devices,
    )


_ANSWERING = ("regular", "prefill", "decode")


def read_step_inputs(plan: Plan) -> StepInputs | None:
    """Gather them from a Plan; the same as from the recipe that it was resolved from.

    Args:
        plan: the Plan.

    Returns:
        None where nothing can be said.
    """
    policy, trainer = plan.policy, plan.trainer
    if trainer.device == "cpu":
        return None
    groups: tuple[EngineGroup, ...] = ()
    if policy is not None and not policy.num_joining_engines:
        answering = [group for group in policy.server_groups if group.worker_type in _ANSWERING]
        is_own = not any(group.engine == "external" for group in answering)
        groups = tuple(build_engine_group(group, _read_devices(group)) for group in answering if is_own)
    parallel = ParallelConfig(**{name: getattr(trainer, name) for name in ParallelConfig.model_fields})
    layout = _Layout(
        shapes=plan.model.shapes,
        hosts=plan.hosts,
        parallel=parallel,
        trainer_devices=trainer.devices,
        offloading=plan,
        engine_groups=groups,
        shares_gpus=plan.shares_gpus,
        has_sharded_receivers=any(
            _holds_shards(group) for model in plan.served_models if model.is_updated for group in model.server_groups
        ),
        num_gpus=len(plan.kept_devices),
    )
    return _gather(plan, plan.cluster, layout)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a recipe and its Plan do not call alike; fields as in StepInputs."""

    shapes: ModelShapes
    hosts: Sequence[HostNode]
    parallel: ParallelConfig
    trainer_devices: tuple[DeviceNode, ...]
    offloading: TopologyConfig | Plan
    engine_groups: tuple[EngineGroup, ...]
    shares_gpus: bool
    has_sharded_receivers: bool
    num_gpus: int


def _gather(source: RunConfig | Plan, cluster: ClusterNode, layout: _Layout) -> StepInputs | None:
    """What they call alike, beside that."""
    if cluster.gpu is None or (isinstance(source.algo, RlConfig) and not layout.engine_groups):
        return None
    sampling = source.rollout.sampling
    return StepInputs(
        gpu=cluster.gpu,
        nic_bytes_per_s=cluster.nic_bytes_per_s,
        host_memory_bytes=tuple(host.memory_bytes for host in layout.hosts),
        shapes=layout.shapes,
        dtype_bytes=2 if source.model.dtype == "bfloat16" else 4,
        algo=source.algo,
        schedule=source.schedule,
        max_prompt_tokens=source.data.max_prompt_tokens,
        max_new_tokens=source.rollout.generate.compute_response_tokens(sampling.max_new_tokens),
        max_rollout_tokens=compute_longest(source),
        is_distribution_cut=sampling.top_p < 1 or sampling.top_k != -1,
        max_concurrent_requests=source.rollout.max_concurrent_requests,
        parallel=layout.parallel,
        trainer_devices=layout.trainer_devices,
        should_offload_trainer=layout.offloading.should_offload_trainer,
        should_offload_engines=layout.offloading.should_offload_engines,
        engine_groups=layout.engine_groups,
        shares_gpus=layout.shares_gpus,
        has_sharded_receivers=layout.has_sharded_receivers,
        weight_sync=source.weight_sync,
        seed=source.seed,
        num_gpus=layout.num_gpus,
    )


def _read_devices(group: ServerGroupNode) -> tuple[tuple[DeviceNode, ...], ...]:
    processes = ((engine, *engine.followers) for engine in group.engines)
    return tuple(tuple(device for part in parts for device in part.devices) for parts in processes)
