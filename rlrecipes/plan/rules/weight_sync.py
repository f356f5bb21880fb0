"""How weights reach the engines, and whether they can."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlrecipes.config.schema import RunConfig
from rlrecipes.plan.rules.engines import list_trained
from rlrecipes.plan.rules.rule import GROUP, Facts, Found, fact_rule, list_groups, list_models, rule

_LOOPBACK = re.compile(r"https?://(localhost|127\.[\d.]+):")


@rule("weight_sync.transport", fix="use weight_sync=tensor, or placement=disaggregated")
def nccl_joins_gpus_that_nobody_shares(config: RunConfig) -> Iterator[Found]:
    """NCCL cannot join two processes of one GPU."""
    if config.topology.device != "cuda" or config.weight_sync.transport != "distributed":
        return
    for where, _, model in list_models(config):
        shared = [key for key, group in model.server_groups.items() if group.placement == "colocated"]
        if model.is_updated and shared:
            fix = f"use weight_sync=tensor, or placement=disaggregated in {where}.server_groups"
            yield Found("weight_sync.transport", "NCCL cannot join two processes that share a GPU", fix)


@rule("weight_sync.transport", fix="use weight_sync=disk, with run_dir on a disk that both hosts see")
def engines_of_others_are_reached(config: RunConfig) -> Iterator[Found]:
    """Shared memory ends at the host, and a process group meets at an address of the trainer's host alone."""
    if config.weight_sync.transport == "disk":
        return
    for where, model, group in list_groups(config):
        far = [url for url in group.urls if not _LOOPBACK.match(url)]
        if model.is_updated and far:
            problem = f"is {config.weight_sync.transport}, which does not leave this host; {far[0]} of {where} may"
            yield Found("weight_sync.transport", problem)


@rule("weight_sync.transport", fix="use weight_sync=disk, or distributed for engines on the trainer's host")
def handles_are_of_gpus_that_are_known(config: RunConfig) -> Iterator[Found]:
    """On GPUs transport tensor hands over handles of memory, and nobody knows on which GPU an engine of others lies."""
    if config.topology.device != "cuda" or config.weight_sync.transport != "tensor":
        return
    for where, _, model in list_models(config):
        is_others = model.num_joining_engines > 0 or any(group.urls for group in model.server_groups.values())
        if model.is_updated and is_others:
            problem = f"is tensor; {where} has engines of others, and nobody knows their GPUs"
            yield Found("weight_sync.transport", problem)


@fact_rule("weight_sync.transport", fix="use weight_sync=distributed or disk, or place them on the trainer's GPUs")
def shared_memory_reaches_every_engine(facts: Facts) -> Iterator[Found]:
    """Transport tensor hands over memory of a GPU, or of a host: an engine takes it only where a trainer rank is."""
    if facts.config.weight_sync.transport != "tensor":
        return
    models = facts.config.topology.served_models
    trainer = {(device.node, device.gpu) for device in facts.placement.trainer}
    for (model, group, number), devices in facts.placement.engines.items():
        away = sorted((device for device in devices if (device.node, device.gpu) not in trainer), key=lambda d: d.node)
        is_engine = models[model].server_groups[group].worker_type != "placeholder"
        if models[model].is_updated and is_engine and away:
            gpu = "" if away[0].gpu is None else f":{away[0].gpu}"
            host = facts.hosts[away[0].node].name
            problem = f"is tensor; engine {number} of {model}.{group} lies on {host}{gpu}, where no trainer rank is"
            yield Found("weight_sync.transport", problem)
            return


@rule(f"{GROUP}.sglang.tokenizer_worker_num", fix="leave it at 1, and give the model more engines")
def an_engine_tells_one_weight_version(config: RunConfig) -> Iterator[Found]:
    """Of an engine's tokenizer processes a sync tells one the weight version; the others stamp answers with the old."""
    for where, group in list_trained(config):
        number = group.sglang.get("tokenizer_worker_num")
        if number not in (None, 1):
            problem = f"is {number}; only one of them would know the new weight version"
            yield Found(f"{where}.sglang.tokenizer_worker_num", problem)


RULES = (
    nccl_joins_gpus_that_nobody_shares,
    engines_of_others_are_reached,
    handles_are_of_gpus_that_are_known,
    shared_memory_reaches_every_engine,
    an_engine_tells_one_weight_version,
)
