"""Which layouts there are to choose from: of the trainer, of the engines, and how many GPUs each gets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rlrecipes.config.schema import ModelShapes, ParallelConfig, RunConfig, ServerGroupConfig, TopologyConfig
from rlrecipes.plan.nodes import POLICY
from rlrecipes.plan.packing import compute_micro_batch_multiple
from rlrecipes.plan.rules.lengths import compute_longest_sample

_MAX_CONTEXT_PARALLEL = 8
_MAX_PIPELINE_PARALLEL = 16
_MICRO_BATCH_FACTORS = (1, 2, 4)
_NUM_SPLITS = 8
_PREFILL_SHARES = (0.125, 0.25, 0.5)
_MAX_ENGINE_GPUS = 32
_UNEVEN_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def _powers_of_two(limit: int) -> list[int]:
    return [1 << exponent for exponent in range(max(limit, 1).bit_length()) if 1 << exponent <= limit]


def list_trainer_sizes(num_gpus: int, gpus_per_node: int, *, is_colocated: bool) -> list[int]:
    """How many GPUs the trainer may get: all where engines share them, else up to all but one part in eight.

    Args:
        num_gpus: of the cluster.
        gpus_per_node: of one machine; on several, whole machines are given.
        is_colocated: whether engines share the trainer's GPUs.
    """
    if is_colocated:
        return [num_gpus]
    unit = gpus_per_node if num_gpus > gpus_per_node else 1
    step = max(1, num_gpus // unit // _NUM_SPLITS) * unit
    return list(range(step, num_gpus, step))


def iter_parallel(
    config: RunConfig, shapes: ModelShapes, num_ranks: int, gpus_per_node: int
) -> Iterator[ParallelConfig]:
    """Every way to split the trainer that the model's shapes allow; TP inside a node.

    Args:
        config: the recipe; what is not enumerated stays as it says.
        shapes: of the model.
        num_ranks: trainer ranks.
        gpus_per_node: of one machine.
    """
    longest = compute_longest_sample(config)
    divided = math.gcd(shapes.num_attention_heads, shapes.num_query_groups, shapes.ffn_hidden_size, shapes.hidden_size)
    stages = _list_stages(config.parallel, shapes)
    for tp in (size for size in _powers_of_two(min(gpus_per_node, num_ranks)) if divided % size == 0):
        for pp in stages:
            for cp in _powers_of_two(_MAX_CONTEXT_PARALLEL):
                if num_ranks % (tp * pp * cp):
                    continue
                dp = num_ranks // (tp * pp * cp)
                base = config.parallel.model_copy(
                    update={
                        "tensor_model_parallel_size": tp,
                        "pipeline_model_parallel_size": pp,
                        "context_parallel_size": cp,
                        "data_parallel_size": dp,
                        "sequence_parallel": tp > 1,
                    }
                )
                yield from _iter_inner(base, shapes, longest)


def _list_stages(parallel: ParallelConfig, shapes: ModelShapes) -> list[int]:
    """PP that divides the layers; the recipe's own where it says how uneven stages are."""
    if any(name in parallel.megatron for name in _UNEVEN_STAGES):
        return [parallel.pipeline_model_parallel_size]
    return [size for size in range(1, _MAX_PIPELINE_PARALLEL + 1) if shapes.num_layers % size == 0]


def _iter_inner(base: ParallelConfig, shapes: ModelShapes, longest: int) -> Iterator[ParallelConfig]:
    """Expert parallelism, model chunks and micro-batch sizes of one split."""
    tp, cp = base.tensor_model_parallel_size, base.context_parallel_size
    pp, dp = base.pipeline_model_parallel_size, base.data_parallel_size
    experts = [1]
    if shapes.num_moe_experts is not None:
        experts = [n for n in _powers_of_two(tp * cp * dp) if shapes.num_moe_experts % n == 0 and cp * dp * tp % n == 0]
    chunks: list[int | None] = [None]
    if pp > 1 and shapes.num_layers // pp % 2 == 0:
        chunks.append(2)
    multiple = compute_micro_batch_multiple(tp, cp, base.sequence_parallel)
    needed = math.ceil(longest / multiple) * multiple // cp
    sizes = {needed * factor for factor in _MICRO_BATCH_FACTORS}
    for ep in experts:
        for vpp in chunks:
            for tokens in sorted(sizes):
                yield base.model_copy(
                    update={
                        "expert_model_parallel_size": ep,
                        "virtual_pipeline_model_parallel_size": vpp,
                        "max_tokens_per_micro_batch": tokens,
                    }
                )


def iter_memory_options(parallel: ParallelConfig) -> Iterator[ParallelConfig]:
    """A layout with nothing or whole layers recomputed, and with the optimizer on the GPU or on the host.

    Args:
        parallel: a layout.
    """
    nothing = {
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
        "recompute_modules": (),
    }
    full = nothing | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    for is_offloaded in (False, True):
        for options in (nothing, full):
            yield parallel.model_copy(update={**options, "optimizer_cpu_offload": is_offloaded})


def iter_topologies(topology: TopologyConfig, shapes: ModelShapes, num_gpus: int) -> Iterator[TopologyConfig]:
    """Every way to lay so many GPUs out as the policy's engines, all of one size.

    Args:
        topology: of the recipe, with one group of regular engines or one each for prefill and decode.
        shapes: of the model.
        num_gpus: for the engines.
    """
    groups = topology.served_models[POLICY].server_groups
    for size in _powers_of_two(min(num_gpus, _MAX_ENGINE_GPUS)):
        if shapes.num_attention_heads % size or num_gpus % size:
            continue
        sized = {name: _resize(group, size) for name, group in groups.items()}
        roles = {group.worker_type: name for name, group in groups.items()}
        if "prefill" not in roles:
            yield _with_groups(topology, sized)
            continue
        for num_prefill in _list_prefill_engines(num_gpus // size):
            counts = {roles["prefill"]: num_prefill, roles["decode"]: num_gpus // size - num_prefill}
            counted: dict[str, ServerGroupConfig] = {
                name: group.model_copy(update={"num_engines": counts[name]}) for name, group in sized.items()
            }
            yield _with_groups(topology, counted)


def _resize(group: ServerGroupConfig, size: int) -> ServerGroupConfig:
    """Engines of another size: what splits them goes along as far as it divides them."""
    splits = ("pipeline_parallel_size", "attention_data_parallel_size", "expert_parallel_size")
    kept = {name: math.gcd(getattr(group, name), size) for name in splits}
    return group.model_copy(update={"gpus_per_engine": size, **kept})


def _list_prefill_engines(num_engines: int) -> Sequence[int]:
    found = {max(1, round(num_engines * share)) for share in _PREFILL_SHARES}
    return sorted(number for number in found if number < num_engines)


def _with_groups(topology: TopologyConfig, groups: dict[str, ServerGroupConfig]) -> TopologyConfig:
    policy = topology.served_models[POLICY].model_copy(update={"server_groups": groups})
    return topology.model_copy(update={"served_models": {**topology.served_models, POLICY: policy}})
