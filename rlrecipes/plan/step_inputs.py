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
    WeightSyncConfig,
    WorkerType,
)
from rlrecipes.plan.inventory import read_figures
from rlrecipes.plan.nodes import POLICY, ClusterNode, DeviceNode, Plan, ProcessNode, ServerGroupNode
from rlrecipes.plan.placement import Placement


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
    gpu = cluster.gpu
    groups = _engine_groups(config, placement)
    if gpu is None or config.topology.device == "cpu" or (isinstance(config.algo, RlConfig) and not groups):
        return None
    sampling = config.rollout.sampling
    return StepInputs(
        gpu=gpu,
        nic_bytes_per_s=cluster.nic_bytes_per_s,
        shapes=shapes,
        dtype_bytes=2 if config.model.dtype == "bfloat16" else 4,
        algo=config.algo,
        schedule=config.schedule,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_new_tokens=config.rollout.generate.compute_response_tokens(sampling.max_new_tokens),
        is_distribution_cut=sampling.top_p < 1 or sampling.top_k != -1,
        max_concurrent_requests=config.rollout.max_concurrent_requests,
        parallel=config.parallel,
        trainer_devices=placement.trainer,
        should_offload_trainer=config.topology.should_offload_trainer,
        should_offload_engines=config.topology.should_offload_engines,
        engine_groups=groups if isinstance(config.algo, RlConfig) or config.data.eval_path is not None else (),
        weight_sync=config.weight_sync,
        seed=config.seed,
    )


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


def build_engine_group(group: ServerGroupConfig, devices: tuple[tuple[DeviceNode, ...], ...]) -> EngineGroup:
    """A group of the recipe with its devices.

    Args:
        group: the recipe's.
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
    gpu, policy, trainer = plan.cluster.gpu, plan.policy, plan.trainer
    groups: tuple[EngineGroup, ...] = ()
    if policy is not None and not policy.num_joining_engines:
        answering = [group for group in policy.server_groups if group.worker_type in _ANSWERING]
        is_own = not any(group.engine == "external" for group in answering)
        groups = tuple(_read_engine_group(group) for group in answering if is_own)
    if gpu is None or trainer.device == "cpu" or (isinstance(plan.algo, RlConfig) and not groups):
        return None
    sampling = plan.rollout.sampling
    return StepInputs(
        gpu=gpu,
        nic_bytes_per_s=plan.cluster.nic_bytes_per_s,
        shapes=plan.model.shapes,
        dtype_bytes=2 if plan.model.dtype == "bfloat16" else 4,
        algo=plan.algo,
        schedule=plan.schedule,
        max_prompt_tokens=plan.data.max_prompt_tokens,
        max_new_tokens=plan.rollout.generate.compute_response_tokens(sampling.max_new_tokens),
        is_distribution_cut=sampling.top_p < 1 or sampling.top_k != -1,
        max_concurrent_requests=plan.rollout.max_concurrent_requests,
        parallel=ParallelConfig(**{name: getattr(trainer, name) for name in ParallelConfig.model_fields}),
        trainer_devices=trainer.devices,
        should_offload_trainer=plan.should_offload_trainer,
        should_offload_engines=plan.should_offload_engines,
        engine_groups=groups,
        weight_sync=plan.weight_sync,
        seed=plan.seed,
    )


def _read_engine_group(group: ServerGroupNode) -> EngineGroup:
    return EngineGroup(
        worker_type=group.worker_type,
        placement=group.placement,
        tensor_parallel_size=group.gpus_per_engine // group.pipeline_parallel_size,
        pipeline_parallel_size=group.pipeline_parallel_size,
        attention_data_parallel_size=group.attention_data_parallel_size,
        native=read_figures(group.sglang),
        devices=tuple(_read_devices(engine) for engine in group.engines),
    )


def _read_devices(engine: ProcessNode) -> tuple[DeviceNode, ...]:
    return engine.devices + tuple(device for follower in engine.followers for device in follower.devices)
