"""How engines are split: by their GPUs, and by the shapes of the model they serve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rlrecipes.config.schema import ModelShapes, RunConfig, ServerGroupConfig
from rlrecipes.plan.placement import count_trainer_ranks
from rlrecipes.plan.rules.rule import (
    GROUP,
    Facts,
    Found,
    fact_rule,
    list_divisors_near,
    list_groups,
    list_models,
    rule,
    shape_rule,
)


def compute_tp(group: ServerGroupConfig) -> int:
    """TP of one engine.

    Args:
        group: its group.
    """
    return max(1, group.gpus_per_engine // group.pipeline_parallel_size)


def compute_moe_tp(group: ServerGroupConfig) -> int:
    """Ranks of one engine that share an expert.

    Args:
        group: its group.
    """
    return max(1, compute_tp(group) // group.expert_parallel_size)


def list_trained(config: RunConfig) -> Iterator[tuple[str, ServerGroupConfig]]:
    """Path and section of the groups that the run starts with the trained model in them.

    Args:
        config: the recipe.
    """
    for where, model, group in list_groups(config):
        if model.path is None and group.engine == "sglang" and group.worker_type not in ("placeholder", "encoder"):
            yield where, group


@rule(f"{GROUP}.pipeline_parallel_size", fix="use a divisor")
def engine_pp_divides_gpus(config: RunConfig) -> Iterator[Found]:
    """An engine's GPUs are TP x PP; none is left over."""
    for where, _, group in list_groups(config):
        pp, gpus = group.pipeline_parallel_size, group.gpus_per_engine
        if gpus % pp:
            yield Found(f"{where}.pipeline_parallel_size", f"is {pp}, which does not divide gpus_per_engine={gpus}")


@rule(f"{GROUP}.attention_data_parallel_size", f"{GROUP}.expert_parallel_size", fix="use a divisor")
def engine_tp_is_split_evenly(config: RunConfig) -> Iterator[Found]:
    """Replicas of attention and parts of the experts share the engine's TP ranks evenly."""
    for where, _, group in list_groups(config):
        tp = compute_tp(group)
        for name in ("attention_data_parallel_size", "expert_parallel_size"):
            if tp % getattr(group, name):
                problem = f"is {getattr(group, name)}, which does not divide the engine's TP of {tp}"
                yield Found(f"{where}.{name}", problem, f"use {list_divisors_near(getattr(group, name), tp)}")


@fact_rule(f"{GROUP}.num_engines", fix="give num_engines to leave GPUs idle, or a gpus_per_engine that divides them")
def open_groups_fill_their_gpus(facts: Facts) -> Iterator[Found]:
    """Groups that take all there is leave nothing over: a remainder would idle through the whole run."""
    config, counts = facts.config, facts.placement.num_engines
    if config.topology.device == "cpu" or not counts:
        return
    sums = {"colocated": 0, "disaggregated": 0}
    open_groups: dict[str, list[tuple[str, int]]] = {"colocated": [], "disaggregated": []}
    for where, name, model in list_models(config):
        for key, group in model.server_groups.items():
            count = counts[name, key] if group.engine != "external" else 0
            sums[group.placement] += count * group.gpus_per_engine
            if count and group.num_engines is None:
                open_groups[group.placement].append((f"{where}.server_groups.{key}", count))
    ranks = count_trainer_ranks(config.parallel)
    apart = sum(host.num_gpus for host in facts.hosts) - max(ranks, sums["colocated"])
    for placement, num_gpus in (("colocated", ranks), ("disaggregated", apart)):
        idle = num_gpus - sums[placement]
        for where, count in open_groups[placement] if idle > 0 else ():
            problem = f"is null, which makes {count}: {idle} of the {num_gpus} GPUs for {placement} engines have none"
            yield Found(f"{where}.num_engines", problem, f"use {count} to leave them idle, or another gpus_per_engine")


@fact_rule(f"{GROUP}.gpus_per_engine", f"{GROUP}.pipeline_parallel_size", fix="use whole nodes of one size")
def engine_fills_its_nodes_evenly(facts: Facts) -> Iterator[Found]:
    """SGLang gives each node of an engine as many ranks, and either whole stages or an even part of one."""
    told: set[str] = set()
    for (model, name, _), devices in facts.placement.engines.items():
        where = f"topology.served_models.{model}.server_groups.{name}"
        group = facts.config.topology.served_models[model].server_groups[name]
        sizes = list(Counter(device.node for device in devices).values())
        if len(sizes) == 1 or group.worker_type == "placeholder" or where in told:
            continue
        told.add(where)
        pp, gpus, num_nodes = group.pipeline_parallel_size, group.gpus_per_engine, len(sizes)
        if len(set(sizes)) > 1:
            yield Found(f"{where}.gpus_per_engine", f"is {gpus}, of which its nodes have {', '.join(map(str, sizes))}")
        elif pp % num_nodes and num_nodes % pp:
            problem = f"is {pp}, over {num_nodes} nodes: neither divides the other"
            yield Found(f"{where}.pipeline_parallel_size", problem, "use a multiple of the nodes, or a divisor")


@shape_rule(f"{GROUP}.gpus_per_engine", fix="lower it, or raise attention_data_parallel_size or pipeline_parallel_size")
def engine_tp_divides_heads(config: RunConfig, shapes: ModelShapes) -> Iterator[Found]:
    """SGLang gives every rank the same query heads; key and value heads are split evenly or copied evenly."""
    for where, group in list_trained(config):
        ranks = max(1, compute_tp(group) // group.attention_data_parallel_size)
        split = {"num_attention_heads": shapes.num_attention_heads}
        if shapes.linear_attention_freq is not None:
            split |= {name: getattr(shapes, name) for name in ("linear_num_key_heads", "linear_num_value_heads")}
        uneven = [f"{name}={count}" for name, count in split.items() if count and count % ranks]
        groups = shapes.num_query_groups
        if not shapes.multi_latent_attention and groups % ranks and ranks % groups:
            uneven.append(f"num_query_groups={groups}, nor a multiple of it")
        for what in uneven:
            problem = f"is {group.gpus_per_engine}: the {ranks} ranks that share attention are no divisor of {what}"
            yield Found(f"{where}.gpus_per_engine", problem)


@shape_rule(f"{GROUP}.gpus_per_engine", f"{GROUP}.expert_parallel_size", fix="use a divisor")
def engine_tp_divides_widths(config: RunConfig, shapes: ModelShapes) -> Iterator[Found]:
    """Every rank of an engine has the same columns of each MLP, and whole experts of those that EP spreads."""
    for where, group in list_trained(config):
        tp, moe_tp, ep = compute_tp(group), compute_moe_tp(group), group.expert_parallel_size
        has_dense = shapes.num_moe_experts is None or shapes.first_dense_layers > 0
        if has_dense and shapes.ffn_hidden_size % tp:
            problem = f"is {group.gpus_per_engine}: TP={tp} does not divide ffn_hidden_size={shapes.ffn_hidden_size}"
            yield Found(f"{where}.gpus_per_engine", problem)
        if shapes.moe_ffn_hidden_size and shapes.moe_ffn_hidden_size % moe_tp:
            problem = f"is {ep}: TP / EP = {moe_tp} does not divide moe_ffn_hidden_size={shapes.moe_ffn_hidden_size}"
            yield Found(f"{where}.expert_parallel_size", problem, "raise it, or lower gpus_per_engine")
        if ep > 1 and (shapes.num_moe_experts or 1) % ep:
            problem = f"is {ep}; the model has {shapes.num_moe_experts or 'no'} experts"
            yield Found(f"{where}.expert_parallel_size", problem)


@shape_rule(f"{GROUP}.pipeline_parallel_size", fix="lower it")
def engine_stage_has_a_layer(config: RunConfig, shapes: ModelShapes) -> Iterator[Found]:
    """SGLang spreads layers as evenly as it can, but a stage without one has nothing to do."""
    for where, group in list_trained(config):
        if group.pipeline_parallel_size > shapes.num_layers:
            problem = f"is {group.pipeline_parallel_size}; the model has {shapes.num_layers} layers"
            yield Found(f"{where}.pipeline_parallel_size", problem)


RULES = (
    engine_pp_divides_gpus,
    engine_tp_is_split_evenly,
    open_groups_fill_their_gpus,
    engine_fills_its_nodes_evenly,
    engine_tp_divides_heads,
    engine_tp_divides_widths,
    engine_stage_has_a_layer,
)
