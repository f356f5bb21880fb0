"""What the time of a step depends on, gathered from a recipe or from a Plan. Owns no arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
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
from rlrecipes.plan.nodes import POLICY, ClusterNode, DeviceNode, Plan, ServerGroupNode
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
        weight_sync: how weights travel.
        seed: of the run.
    """

    gpu: GpuConfig
    nic_bytes_per_s: float
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
    weight_sync: WeightSyncConfig
    seed: int

    @property
    def group_size(self) -> int:
        """Rollouts of a prompt; 1 for demonstrations."""
        return self.algo.group_size if isinstance(self.algo, RlConfig) else 1

    @property
    def has_rollouts(self) -> bool:
        """Whether the engines are part of a step, and not of evaluations alone."""
        return isinstance(self.algo, RlConfig)

    @property
    def num_samples(self) -> int:
        """Of a step."""
        return self.schedule.prompts_per_step * self.group_size

    @property
    def num_gpus(self) -> int:
        """That the step keeps, each once."""
        devices = {(device.node, device.gpu) for device in self.trainer_devices}
        for group in self.engine_groups:
            devices |= {(device.node, device.gpu) for engine in group.devices for device in engine}
        return len(devices)


def to_step_inputs(
    config: RunConfig, shapes: ModelShapes, cluster: ClusterNode, placement: Placement
) -> StepInputs | None:
    """Gather them from a recipe.

    Args:
        config: the recipe.
        shapes: of its model.
        cluster: settled.
        placement: of its processes.

    Returns:
        None where nothing can be said: no GPU is described, or the policy's engines are not the run's own.
    """
    if config.topology.device == "cpu":
        return None
    is_asked = isinstance(config.algo, RlConfig) or config.data.eval_path is not None
    groups = _engine_groups(config, placement) if is_asked else ()
    return _gather(config, cluster, shapes, config.parallel, placement.trainer, config.topology, groups)


def _engine_groups(config: RunConfig, placement: Placement) -> tuple[EngineGroup, ...]:
    model = config.topology.served_models.get(POLICY)
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
    return _gather(plan, plan.cluster, plan.model.shapes, parallel, trainer.devices, plan, groups)


def _gather(
    source: RunConfig | Plan,
    cluster: ClusterNode,
    shapes: ModelShapes,
    parallel: ParallelConfig,
    trainer_devices: tuple[DeviceNode, ...],
    offloading: TopologyConfig | Plan,
    engine_groups: tuple[EngineGroup, ...],
) -> StepInputs | None:
    """What a recipe and its Plan call alike, beside what each was asked for."""
    if cluster.gpu is None or (isinstance(source.algo, RlConfig) and not engine_groups):
        return None
    sampling = source.rollout.sampling
    return StepInputs(
        gpu=cluster.gpu,
        nic_bytes_per_s=cluster.nic_bytes_per_s,
        shapes=shapes,
        dtype_bytes=2 if source.model.dtype == "bfloat16" else 4,
        algo=source.algo,
        schedule=source.schedule,
        max_prompt_tokens=source.data.max_prompt_tokens,
        max_new_tokens=source.rollout.generate.compute_response_tokens(sampling.max_new_tokens),
        max_rollout_tokens=compute_longest(source),
        is_distribution_cut=sampling.top_p < 1 or sampling.top_k != -1,
        max_concurrent_requests=source.rollout.max_concurrent_requests,
        parallel=parallel,
        trainer_devices=trainer_devices,
        should_offload_trainer=offloading.should_offload_trainer,
        should_offload_engines=offloading.should_offload_engines,
        engine_groups=engine_groups,
        weight_sync=source.weight_sync,
        seed=source.seed,
    )


def _read_devices(group: ServerGroupNode) -> tuple[tuple[DeviceNode, ...], ...]:
    processes = ((engine, *engine.followers) for engine in group.engines)
    return tuple(tuple(device for part in parts for device in part.devices) for parts in processes)
