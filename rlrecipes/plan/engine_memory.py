"""What an engine holds on one of its GPUs, phase by phase, and how many tokens its KV cache has room for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlrecipes.config.schema import ModelShapes
from rlrecipes.plan.activations import compute_widest_layer
from rlrecipes.plan.engine_costs import compute_engine_kv_bytes, compute_engine_weight_bytes
from rlrecipes.plan.memory_constants import MemoryConstants
from rlrecipes.plan.memory_nodes import EngineRoomNode, Phase
from rlrecipes.plan.model_costs import compute_state_bytes
from rlrecipes.plan.step_inputs import EngineGroup, StepInputs
from rlrecipes.plan.trainer_memory import Parts, compute_bucket_bytes

_MIB = 1 << 20
_DECODE_TOKENS = 2048
"""That SGLang reserves activations for at least; an engine that only decodes has no longer chunks."""
_SIZES = ((20, 2048, 8, 8), (35, 2048, 24, 80), (60, 4096, 32, 160), (160, 8192, 256, 512))
"""Below so many GiB of a GPU: tokens of a prefill chunk, requests of the largest decode graph with TP below 4 and from
4 on; SGLang 0.5.17's own table."""
_LARGEST_SIZES = (16384, 512, 512)
_NO_GRAPHS = ("disable_cuda_graph", "disable_decode_cuda_graph")


@dataclass(frozen=True, slots=True)
class ServedEngines:
    """A group of engines, and the model that it serves.

    Attributes:
        name: <served model>/<group>.
        shapes: of the model.
        dtype_bytes: of one weight.
        is_updated: whether weight syncs reach it.
        group: the engines.
    """

    name: str
    shapes: ModelShapes
    dtype_bytes: int
    is_updated: bool
    group: EngineGroup


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """A GPU of an engine.

    Attributes:
        parts: phase -> part -> bytes.
        room: of the engine's KV cache.
        host_bytes: of the weights that it puts back itself.
    """

    parts: Mapping[Phase, Parts]
    room: EngineRoomNode
    host_bytes: float


def compute_engine_memory(inputs: StepInputs, served: ServedEngines, constants: MemoryConstants) -> EngineMemory:
    """What a GPU of a group's engine holds.

    SGLang takes its memory once: ``mem_fraction_static`` of the GPU for weights and KV cache, or a cache of
    ``max_total_tokens``; graphs and activations come on top. Engines that give their memory back take their KV cache
    again only after the weights have come.

    Args:
        inputs: of the step.
        served: whose engines.
        constants: of the model.
    """
    group = served.group
    own = replace(inputs, shapes=served.shapes, dtype_bytes=served.dtype_bytes)
    weights = compute_engine_weight_bytes(own, group)
    room, cache = _compute_room(own, served, weights, constants)
    base: Parts = {
        "context": constants.cuda_context_bytes,
        "workspace": constants.engine_workspace_bytes,
        "nccl": constants.nccl_group_bytes * (group.num_gpus > 1),
        "cuda_graphs": _count_graph_requests(inputs.gpu.memory_bytes, group) * constants.engine_graph_request_bytes,
    }
    working = base | {"weights": weights, "activations": _compute_activation_bytes(own, group, constants)}
    full = working | {"kv_cache": cache}
    is_released = group.placement == "colocated" and inputs.should_offload_engines
    away = base if is_released else full
    bucket: Parts = {}
    if served.is_updated and inputs.weight_sync.transport != "tensor":  # handles are read where they lie
        # A broadcast is received flat, beside the tensors that SGLang has laid out to know their places.
        num_copies = 2 if inputs.weight_sync.transport == "distributed" else 1
        bucket = {"weight_sync": num_copies * compute_bucket_bytes(inputs)}
    returning = base | {"weights": weights} if is_released and served.is_updated else away
    parts: dict[Phase, Parts] = {
        "init": away | {"workspace": constants.engine_start_bytes},
        "rollout": full,
        "logprobs": away,
        "train": away,
        "update": away,
        "weight_sync": returning | bucket,
    }
    return EngineMemory(parts, room, weights if is_released and not served.is_updated else 0.0)


def _compute_room(
    inputs: StepInputs, served: ServedEngines, weights: float, constants: MemoryConstants
) -> tuple[EngineRoomNode, float]:
    """What the KV cache has room for, and its bytes; the states of gated delta nets lie in it too."""
    group, native = served.group, served.group.native
    per_token = max(1.0, compute_engine_kv_bytes(inputs, group) / group.pipeline_parallel_size)  # 0 of delta nets alone
    split = group.tensor_parallel_size // group.attention_data_parallel_size * group.pipeline_parallel_size
    state = compute_state_bytes(inputs.shapes) / split
    fraction = native.get("mem_fraction_static") or compute_memory_fraction(inputs.gpu.memory_bytes, group)
    # SGLang takes its fraction of what is free once its context is there.
    pool = max(0.0, fraction * (inputs.gpu.memory_bytes - constants.cuda_context_bytes) - weights)
    limit = native.get("max_total_tokens")
    if limit is not None:
        pool = min(pool, limit * per_token + state)
    replicas = group.attention_data_parallel_size
    node = EngineRoomNode.model_construct(
        name=served.name,
        kv_bytes_per_token=round(per_token),
        capacity_tokens=int(pool / per_token) * replicas,
        max_longest_rollouts=int(pool / (inputs.max_rollout_tokens * per_token + state)) * replicas,
    )
    return node, pool


def compute_memory_fraction(gpu_bytes: int, group: EngineGroup) -> float:
    """What SGLang takes of a GPU for weights and KV cache where a recipe does not say ``mem_fraction_static``.

    Args:
        gpu_bytes: of the GPU.
        group: whose engine.

    Source:
        ``ServerArgs._handle_gpu_memory_settings`` of SGLang 0.5.17; without its rules for DP attention, draft models
        and graphs of prefill.
    """
    reserved = 512 + 1.5 * _count_chunk_tokens(gpu_bytes, group) + group.num_gpus * 128
    reserved += 2 * _count_graph_requests(gpu_bytes, group)
    if gpu_bytes > 60 * 1024 * _MIB:
        reserved = max(reserved, 10 * 1024)
    return round(1 - reserved * _MIB / gpu_bytes, 3)


def _find_sizes(gpu_bytes: int, group: EngineGroup) -> tuple[int, int]:
    """Tokens of a prefill chunk and requests of the largest graph, SGLang's choice."""
    row = next((row[1:] for row in _SIZES if gpu_bytes < row[0] * 1024 * _MIB), _LARGEST_SIZES)
    return row[0], row[1 if group.tensor_parallel_size < 4 else 2]


def _count_graph_requests(gpu_bytes: int, group: EngineGroup) -> int:
    native = group.native
    is_off = native.get("cuda_graph_backend_decode") == "disabled" or any(native.get(name) for name in _NO_GRAPHS)
    if is_off or group.worker_type == "prefill":
        return 0
    sizes = native.get("cuda_graph_bs_decode") or native.get("cuda_graph_bs")
    if sizes:
        return max(map(int, sizes))
    asked = native.get("cuda_graph_max_bs_decode") or native.get("cuda_graph_max_bs")
    return int(asked or _find_sizes(gpu_bytes, group)[1])


def _count_chunk_tokens(gpu_bytes: int, group: EngineGroup) -> int:
    if group.worker_type == "decode":
        return _DECODE_TOKENS
    chunk = group.native.get("chunked_prefill_size") or _find_sizes(gpu_bytes, group)[0]
    return max(int(chunk), _DECODE_TOKENS)


def _compute_activation_bytes(inputs: StepInputs, group: EngineGroup, constants: MemoryConstants) -> float:
    """A prefill chunk in its widest layer; logits are of the last token of each request alone."""
    tokens = _count_chunk_tokens(inputs.gpu.memory_bytes, group)
    width = compute_widest_layer(inputs.shapes, group.tensor_parallel_size)
    return tokens * width * inputs.dtype_bytes * (1 + constants.activation_overhead_fraction)
