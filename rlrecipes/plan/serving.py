"""Served models as nodes of the Plan: engines and routers with command, environment and devices."""

from __future__ import annotations

from itertools import count, groupby

from rlrecipes.config.schema import RunConfig, ServedModelConfig, ServerGroupConfig
from rlrecipes.plan.commands import to_engine_command, to_engine_env, to_router_command
from rlrecipes.plan.nodes import DeviceNode, ProcessNode, ServedModelNode, ServerGroupNode, SyncRouteNode
from rlrecipes.plan.placement import Placement

_ROUTER_START_TIMEOUT_S = 60.0


def build_served_models(config: RunConfig, placement: Placement) -> tuple[ServedModelNode, ...]:
    """Every served model of a recipe; none where nothing is asked (SFT that evaluates nothing).

    Args:
        config: the recipe, its rules kept.
        placement: of all its engines.
    """
    indices = count()
    served = []
    for name, model in config.asked_models.items():
        has_encoders = any(group.worker_type == "encoder" for group in model.server_groups.values())
        groups = [
            _group(config, placement, name, group_name, group, indices, has_encoders=has_encoders)
            for group_name, group in model.server_groups.items()
        ]
        served.append(
            ServedModelNode(
                name=name,
                path=model.path or config.model.path or f"{config.run_dir}/initial",
                is_updated=model.is_updated,
                router=_router(name, model, config),
                num_joining_engines=model.num_joining_engines,
                join_timeout_s=model.join_timeout_s,
                server_groups=tuple(groups),
            )
        )
    return tuple(served)


def build_sync_routes(config: RunConfig, served: tuple[ServedModelNode, ...]) -> tuple[SyncRouteNode, ...]:
    """From the trainer to every updated model.

    Args:
        config: the recipe.
        served: from :func:`build_served_models`.
    """
    return tuple(
        SyncRouteNode(
            served_model=model.name,
            transport=config.weight_sync.transport,
            num_receiving_ranks=sum(
                group.gpus_per_engine * len(group.engines)
                for group in model.server_groups
                if group.worker_type != "encoder"  # which holds no weights of the trainer
            ),
        )
        for model in served
        if model.is_updated
    )


def _router(name: str, model: ServedModelConfig, config: RunConfig) -> ProcessNode:
    return ProcessNode(
        name=f"{name}-router",
        command=to_router_command(model, config.rollout.request_timeout_s),
        env={},
        python=None,
        devices=(DeviceNode(node=0, gpu=None),),
        start_timeout_s=_ROUTER_START_TIMEOUT_S,
    )


def _group(
    config: RunConfig,
    placement: Placement,
    model_name: str,
    name: str,
    group: ServerGroupConfig,
    indices: count[int],
    *,
    has_encoders: bool,
) -> ServerGroupNode:
    numbers = range(placement.num_engines[model_name, name] if group.engine != "external" else 0)
    places = [placement.engines[model_name, name, number] for number in numbers]
    is_started = group.engine != "external" and group.worker_type != "placeholder"
    engines = [
        _engine(config, f"{model_name}-{name}-{number}", group, devices, (number, next(indices)), has_encoders)
        for number, devices in enumerate(places if is_started else ())
    ]
    return ServerGroupNode(
        name=name,
        worker_type=group.worker_type,
        engine=group.engine,
        placement=group.placement,
        gpus_per_engine=group.gpus_per_engine,
        pipeline_parallel_size=group.pipeline_parallel_size,
        attention_data_parallel_size=group.attention_data_parallel_size,
        expert_parallel_size=group.expert_parallel_size,
        engines=tuple(engines),
        urls=group.urls if group.engine == "external" else (),
        sglang=group.sglang,
        reserved=() if is_started else tuple(device for devices in places for device in devices),
    )


def _engine(
    config: RunConfig,
    name: str,
    group: ServerGroupConfig,
    devices: tuple[DeviceNode, ...],
    numbers: tuple[int, int],
    has_encoders: bool,
) -> ProcessNode:
    """One process a node; the first one answers for all."""
    nodes = [tuple(part) for _, part in groupby(devices, key=lambda device: device.node)]
    processes = [
        ProcessNode(
            name=name if rank == 0 else f"{name}.{rank}",
            command=to_engine_command(
                group, config, *numbers, has_encoders=has_encoders, node_rank=rank, num_nodes=len(nodes)
            ),
            env=to_engine_env(group, config, [device.gpu for device in part if device.gpu is not None]),
            python=group.python,
            devices=part,
            start_timeout_s=group.start_timeout_s,
        )
        for rank, part in enumerate(nodes)
    ]
    return processes[0].model_copy(update={"followers": tuple(processes[1:])})
