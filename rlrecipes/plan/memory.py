"""Memory of every GPU in every phase: what it holds, what is left, what more would fit, what to change if it does not.

Pure arithmetic over the counts of parameters.py, activations.py and the engines' formulas; constants come from
calibration.yaml.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rlrecipes.config.schema import ModelShapes, RunConfig, ServedModelConfig
from rlrecipes.errors import Problem
from rlrecipes.plan.calibration import load_calibration
from rlrecipes.plan.engine_memory import EngineMemory, ServedEngines, compute_engine_memory
from rlrecipes.plan.families import FAMILIES, UnreadableConfigError, read_text_config, to_shapes
from rlrecipes.plan.memory_constants import MemoryConstants
from rlrecipes.plan.memory_nodes import PHASES, GpuRoleNode, MemoryNode, Phase
from rlrecipes.plan.nodes import POLICY
from rlrecipes.plan.placement import Placement
from rlrecipes.plan.rules.topology import hands_over_by_nixl
from rlrecipes.plan.step_inputs import StepInputs, build_engine_group
from rlrecipes.plan.trainer_memory import StageMemory, compute_stage_memory

type Parts = dict[str, dict[str, int]]
"""Phase -> part -> bytes."""

_GIB = 1 << 30
_POOL = ("engine.weights", "engine.kv_cache")
_TOKENS = "parallel.max_tokens_per_micro_batch"
_FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "recompute_modules": (),
}


def load_memory_constants(path: str | None) -> MemoryConstants:
    """The constants of this model.

    Args:
        path: a file of one's own; None: the shipped ones.

    Raises:
        ConfigError: the file is not one.
    """
    return MemoryConstants(**load_calibration(path).values("memory"))


def find_served_engines(config: RunConfig, shapes: ModelShapes, placement: Placement) -> tuple[ServedEngines, ...]:
    """Every group of engines that the run starts on GPUs, with the shapes of its model.

    A model of another directory whose config.json cannot be understood is passed over.

    Args:
        config: the recipe.
        shapes: of the trained model.
        placement: of its processes.
    """
    dtype_bytes = 2 if config.model.dtype == "bfloat16" else 4
    found = []
    for name, model in config.topology.served_models.items():
        served_shapes = shapes if model.path is None else _read_served_shapes(model)
        for group_name, group in model.server_groups.items():
            number = placement.num_engines.get((name, group_name), 0)
            if served_shapes is None or group.engine != "sglang" or group.worker_type == "placeholder" or not number:
                continue
            devices = tuple(placement.engines[name, group_name, index] for index in range(number))
            built = build_engine_group(group, devices)
            found.append(ServedEngines(f"{name}/{group_name}", served_shapes, dtype_bytes, model.is_updated, built))
    return tuple(found)


def _read_served_shapes(model: ServedModelConfig) -> ModelShapes | None:
    try:
        family, text = read_text_config(json.loads((Path(model.path or "") / "config.json").read_text("utf-8")))
        return to_shapes(text, family) if family in FAMILIES else None
    except (OSError, ValueError, UnreadableConfigError, AttributeError):
        return None


def compute_memory(
    inputs: StepInputs, constants: MemoryConstants, served: Sequence[ServedEngines] | None = None
) -> MemoryNode:
    """Memory of every kind of GPU.

    Args:
        inputs: of the step; its engine groups are the policy's.
        constants: of the model.
        served: all groups of engines (:func:`find_served_engines`); None: the policy's alone.
    """
    if served is None:
        served = tuple(
            ServedEngines(f"{POLICY}/{number}", inputs.shapes, inputs.dtype_bytes, True, group)
            for number, group in enumerate(inputs.engine_groups)
        )
    stages = compute_stage_memory(inputs, constants)
    engines = [(one, compute_engine_memory(inputs, one, constants)) for one in served]
    usable = int(inputs.gpu.memory_bytes * (1 - constants.headroom_fraction))
    roles = tuple(_iter_roles(inputs, stages, engines))
    rooms = tuple(memory.room for _, memory in engines)
    beside = [memory for one, memory in engines if one.group.placement == "colocated"]
    largest = _compute_largest_micro_batch(stages, beside, usable)
    held = [room.capacity_tokens for (one, _), room in zip(engines, rooms, strict=True) if one.is_updated]
    return MemoryNode.model_construct(
        gpu_bytes=inputs.gpu.memory_bytes,
        usable_bytes=usable,
        roles=roles,
        engines=rooms,
        max_tokens_per_micro_batch=largest,
        max_sample_tokens=min([largest * inputs.parallel.context_parallel_size, *held]),
    )


def _iter_roles(
    inputs: StepInputs, stages: Sequence[StageMemory], engines: Sequence[tuple[ServedEngines, EngineMemory]]
) -> Iterator[GpuRoleNode]:
    num_trainers = len(inputs.trainer_devices)
    shared = 0
    for one, memory in engines:
        num_gpus = one.group.num_gpus * one.group.num_engines
        if one.group.placement == "colocated" and shared < num_trainers:
            shared += num_gpus
            yield _build_role(f"trainer+{one.name}", num_gpus, inputs, stages, memory)
        else:
            parts: Parts = {phase: _prefix("engine", memory.parts[phase]) for phase in PHASES}
            yield GpuRoleNode.model_construct(
                name=one.name, num_gpus=num_gpus, stage=None, parts=parts, host_bytes=round(memory.host_bytes)
            )
    if shared < num_trainers:
        yield _build_role("trainer", num_trainers - shared, inputs, stages, None)


def _build_role(
    name: str, num_gpus: int, inputs: StepInputs, stages: Sequence[StageMemory], engine: EngineMemory | None
) -> GpuRoleNode:
    tokens = inputs.parallel.max_tokens_per_micro_batch

    def peak(stage: StageMemory) -> float:
        return max(sum(stage.compute_parts(phase, tokens).values()) for phase in PHASES)

    fullest = max(stages, key=peak)
    parts: Parts = {
        phase: _prefix("trainer", fullest.compute_parts(phase, tokens))
        | (_prefix("engine", engine.parts[phase]) if engine else {})
        for phase in PHASES
    }
    host_bytes = fullest.host_bytes + (engine.host_bytes if engine else 0.0)
    return GpuRoleNode.model_construct(
        name=name, num_gpus=num_gpus, stage=fullest.stage, parts=parts, host_bytes=round(host_bytes)
    )


def _prefix(owner: str, parts: dict[str, float]) -> dict[str, int]:
    return {f"{owner}.{name}": round(value) for name, value in parts.items() if value}


def _compute_largest_micro_batch(stages: Sequence[StageMemory], beside: Sequence[EngineMemory], usable: int) -> int:
    """Tokens of a micro-batch on one rank that every stage has room for, beside any engine on its GPU."""
    largest = float("inf")
    phases: tuple[Phase, ...] = ("logprobs", "train")
    for phase in phases:
        engine = max((sum(memory.parts[phase].values()) for memory in beside), default=0.0)
        for stage in stages:
            room = usable - engine - sum(stage.fixed[phase].values())
            one = sum(stage.per_token[phase].values())
            largest = min(largest, room / one if one else largest if room >= 0 else 0)  # a stage may hold no layer
    return max(0, int(largest))


def find_memory_problems(
    inputs: StepInputs, constants: MemoryConstants, memory: MemoryNode, served: Sequence[ServedEngines] | None = None
) -> list[Problem]:
    """Why a recipe does not fit its GPUs, and what to change: tried, not guessed.

    Args:
        inputs: of the step.
        constants: of the model.
        memory: from :func:`compute_memory` of the same.
        served: as there.
    """
    if memory.is_fitting:
        return []
    problems = []
    for role in memory.roles:
        phase = role.fullest_phase
        lacking = role.peak_bytes - memory.usable_bytes
        if lacking <= 0:
            continue
        large = sorted(role.parts[phase].items(), key=lambda part: -part[1])[:3]
        told = ", ".join(f"{name} {value / _GIB:.1f}" for name, value in large)
        problem = (
            f"{role.name} needs {role.peak_bytes / _GIB:.1f} GiB of {memory.usable_bytes / _GIB:.1f} in phase {phase} "
            f"({told})"
        )
        where, fix = _find_fix(inputs, constants, role, served)
        problems.append(Problem(where, problem, fix))
    for room in memory.engines:
        if room.max_longest_rollouts < 1:
            holds = f"an engine of {room.name} holds {room.capacity_tokens} tokens"
            problem = f"{holds}; one longest rollout has {inputs.max_rollout_tokens}"
            fix = (
                "raise gpus_per_engine, use sglang.kv_cache_dtype=fp8_e4m3, or lower max_new_tokens of rollout.sampling"
                " or of rollout.evaluation.sampling, whichever is longer"
            )
            problems.append(Problem(f"{_group_path(room.name)}.gpus_per_engine", problem, fix))
    return problems


def _find_fix(
    inputs: StepInputs, constants: MemoryConstants, role: GpuRoleNode, served: Sequence[ServedEngines] | None
) -> tuple[str, str]:
    """Where to change what; of the changes that were found to be enough the one that costs least time."""
    engines = role.name.split("+")[-1]
    if role.stage is None or role.fullest_phase == "rollout":
        others = sum(value for name, value in role.parts[role.fullest_phase].items() if name not in _POOL)
        room = inputs.gpu.memory_bytes * (1 - constants.headroom_fraction) - others
        fraction = int(1000 * room / inputs.gpu.memory_bytes) / 1000
        if fraction > role.parts[role.fullest_phase].get("engine.weights", 0) / inputs.gpu.memory_bytes:
            where = f"{_group_path(engines)}.sglang.mem_fraction_static"
            return where, f"set it to {fraction} or less"
        if role.stage is None:
            return f"{_group_path(engines)}.gpus_per_engine", "raise it: its weights alone leave no room"
    least = -(-(inputs.max_prompt_tokens + inputs.max_new_tokens) // inputs.parallel.context_parallel_size)
    now = inputs.parallel.max_tokens_per_micro_batch
    options = [
        (name, changes, compute_memory(tried, constants, served)) for name, changes, tried in _iter_changes(inputs)
    ]
    for enough in (now, max(least, now // 2), least):
        for name, changes, memory in options:
            if memory.max_tokens_per_micro_batch >= enough and _has_room_beside(memory, role):
                tokens = {} if enough == now else {_TOKENS: memory.max_tokens_per_micro_batch}
                return name or _TOKENS, "set " + " ".join(f"{key}={value}" for key, value in (changes | tokens).items())
    fix = "raise TP, PP or EP, use more nodes, or a GPU with more memory: recomputation and offloading are not enough"
    return "parallel", fix


def _has_room_beside(memory: MemoryNode, role: GpuRoleNode) -> bool:
    """Whether the phases that no micro-batch lengthens fit."""
    phases = [phase for phase in PHASES if phase not in ("logprobs", "train")]
    changed = next(one for one in memory.roles if one.name == role.name)
    return all(changed.sum_phase(phase) <= memory.usable_bytes for phase in phases)


def _iter_changes(inputs: StepInputs) -> Iterator[tuple[str, dict[str, str], StepInputs]]:
    """Changes from the cheapest in time to the dearest: where, what, and the inputs each leads to; none at first."""
    parallel, changes = inputs.parallel, dict[str, str]()
    yield "", changes, inputs
    is_shared = any(group.placement == "colocated" for group in inputs.engine_groups)
    should_engines = not any(hands_over_by_nixl(group.native) for group in inputs.engine_groups)
    if is_shared and not (inputs.should_offload_trainer and inputs.should_offload_engines >= should_engines):
        inputs = replace(inputs, should_offload_engines=should_engines, should_offload_trainer=True)
        names = ("should_offload_engines", "should_offload_trainer")
        changes = {f"topology.{name}": "true" for name in names if getattr(inputs, name)}
        yield next(iter(changes)), changes, inputs
    full = {f"parallel.{key}": json.dumps(value) for key, value in _FULL_RECOMPUTE.items() if value != ()}
    host = {"parallel.optimizer_cpu_offload": "true"}
    recomputed = parallel.model_copy(update=_FULL_RECOMPUTE)
    hosted = {"optimizer_cpu_offload": True}
    yield "parallel.recompute_granularity", changes | full, replace(inputs, parallel=recomputed)
    where = "parallel.optimizer_cpu_offload"
    yield where, changes | host, replace(inputs, parallel=parallel.model_copy(update=hosted))
    yield where, changes | full | host, replace(inputs, parallel=recomputed.model_copy(update=hosted))


def _group_path(name: str) -> str:
    model, _, group = name.partition("/")
    return f"topology.served_models.{model}.server_groups.{group}"
