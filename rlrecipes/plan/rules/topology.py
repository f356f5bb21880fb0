"""Served models, what stands behind their routers, and what each engine is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlrecipes.config.schema import RunConfig
from rlrecipes.plan.nodes import POLICY
from rlrecipes.plan.rules.rule import GROUP, MODEL, Found, list_groups, list_models, rule

_OF_STARTED: Mapping[str, Any] = {
    **dict.fromkeys(("gpus_per_engine", "pipeline_parallel_size"), 1),
    **dict.fromkeys(("attention_data_parallel_size", "expert_parallel_size"), 1),
    "python": None,
    "env": {},
}
"""What only an engine that the run starts is given -> what says nothing. Not ``sglang``: a group that is made external
on the command line keeps what it had of it, since no word there empties a section."""


@rule("topology.served_models", fix=f"name the model being trained {POLICY}")
def policy_is_served(config: RunConfig) -> Iterator[Found]:
    """Rollouts are asked of the served model of that name."""
    if POLICY not in config.topology.served_models:
        names = ", ".join(sorted(config.topology.served_models)) or "nothing"
        yield Found("topology.served_models", f"holds {names}")


@rule(f"{MODEL}.is_updated", fix="set it true")
def policy_is_updated(config: RunConfig) -> Iterator[Found]:
    """Without weight syncs rollouts would stay those of the first weights."""
    for where, name, model in list_models(config):
        if name == POLICY and not model.is_updated:
            yield Found(f"{where}.is_updated", "is false for the model being trained")


@rule(f"{MODEL}.path", fix="set it null, or is_updated=false")
def updated_model_is_the_trained_one(config: RunConfig) -> Iterator[Found]:
    """A weight sync sends the trained model's tensors, whatever the engine started from."""
    for where, _, model in list_models(config):
        if model.is_updated and model.path is not None:
            problem = "is given, but weight syncs would replace its weights by the trained model's"
            yield Found(f"{where}.path", problem)


@rule(f"{MODEL}.server_groups", fix="give a group of engines, or num_joining_engines that others register")
def served_model_has_engines(config: RunConfig) -> Iterator[Found]:
    """A router without workers answers nothing."""
    for where, _, model in list_models(config):
        if not model.server_groups and not model.num_joining_engines:
            yield Found(f"{where}.server_groups", "is empty")


@rule(f"{MODEL}.server_groups", fix="add a group of the missing worker_type")
def prefill_and_decode_come_together(config: RunConfig) -> Iterator[Found]:
    """Each does one half of a request."""
    for where, _, model in list_models(config):
        kinds = {group.worker_type for group in model.server_groups.values()}
        if ("prefill" in kinds) != ("decode" in kinds):
            present, missing = ("prefill", "decode") if "prefill" in kinds else ("decode", "prefill")
            problem = f"has {present} engines and no {missing} engines: no request could be answered"
            yield Found(f"{where}.server_groups", problem, f"add a group of worker_type {missing}")


@rule(f"{MODEL}.server_groups", fix="use either kind")
def one_router_has_one_kind_of_worker(config: RunConfig) -> Iterator[Found]:
    """A router either splits requests over prefill and decode engines or sends them whole."""
    for where, _, model in list_models(config):
        kinds = {group.worker_type for group in model.server_groups.values()}
        if "regular" in kinds and kinds & {"prefill", "decode"}:
            problem = "mixes regular with prefill and decode engines, which one router cannot serve"
            yield Found(f"{where}.server_groups", problem)


def hands_over_by_nixl(native: Mapping[str, Any]) -> bool:
    """Whether prefill and decode engines hand KV caches over through NIXL.

    Args:
        native: the group's options of SGLang.
    """
    return native.get("disaggregation_transfer_backend") == "nixl"


@rule(
    "topology.should_offload_engines",
    fix="set it false, with sglang.mem_fraction_static low enough for the trainer beside them",
)
def caches_known_to_nixl_stay(config: RunConfig) -> Iterator[Found]:
    """SGLang (0.5.17) never takes a KV cache back from NIXL: given away, its peers would go on writing where it was."""
    if config.topology.device != "cuda" or not config.topology.should_offload_engines:
        return
    for where, _, group in list_groups(config):
        is_half = group.worker_type in ("prefill", "decode")
        if is_half and group.placement == "colocated" and hands_over_by_nixl(group.sglang):
            problem = f"is true, but NIXL knows the KV caches of {where}, which have to stay where they are"
            yield Found("topology.should_offload_engines", problem)
            return


@rule(
    f"{GROUP}.engine",
    f"{GROUP}.gpus_per_engine",
    f"{GROUP}.worker_type",
    fix="use engine=sglang, or topology.device=cpu, gpus_per_engine=1 and worker_type=regular",
)
def embedded_engine_is_one_cpu_process(config: RunConfig) -> Iterator[Found]:
    """The embedded engine is one process that does all of a request, on CPU."""
    for where, _, group in list_groups(config):
        if group.engine != "embedded":
            continue
        if config.topology.device != "cpu":
            yield Found(f"{where}.engine", "the embedded engine runs on CPU only", "use engine=sglang")
        if group.gpus_per_engine > 1:
            yield Found(f"{where}.gpus_per_engine", "the embedded engine is one process", "use 1")
        if group.worker_type not in ("regular", "placeholder"):
            fix = "use regular, or engine=sglang"
            yield Found(f"{where}.worker_type", "the embedded engine does all of it", fix)


@rule(f"{GROUP}.urls", fix="give urls to engine=external, and to no other")
def external_engines_have_urls(config: RunConfig) -> Iterator[Found]:
    """Engines that others run are found by their urls; those that the run starts have none yet."""
    for where, _, group in list_groups(config):
        if (group.engine == "external") != bool(group.urls):
            is_external = group.engine == "external"
            problem = "is empty: nobody is there" if is_external else f"is given to engine={group.engine}"
            yield Found(f"{where}.urls", problem)


@rule(
    f"{GROUP}.num_engines",
    *(f"{GROUP}.{name}" for name in _OF_STARTED),
    fix="leave it as server_group=external has it",
)
def external_engines_are_as_others_made_them(config: RunConfig) -> Iterator[Found]:
    """Engines that others run are asked what they are; what only a start can give them would do nothing."""
    for where, _, group in list_groups(config):
        if group.engine != "external":
            continue
        if group.num_engines not in (None, len(group.urls)):
            yield Found(f"{where}.num_engines", f"is {group.num_engines}; urls has {len(group.urls)}", "use null")
        for name, idle in _OF_STARTED.items():
            if getattr(group, name) != idle:
                yield Found(f"{where}.{name}", "is of engines that the run starts", f"use {json.dumps(idle)}")


@rule(f"{GROUP}.urls", fix="write http://host:port, each once")
def urls_are_addresses(config: RunConfig) -> Iterator[Found]:
    """A router adds the path of each request; an engine named twice would be asked and updated twice."""
    told: set[str] = set()
    for where, _, group in list_groups(config):
        for url in group.urls:
            if not re.fullmatch(r"https?://[^/\s:]+:\d+", url):
                yield Found(f"{where}.urls", f"holds {url!r}")
            elif url in told:
                yield Found(f"{where}.urls", f"holds {url} twice, or another group does")
            told.add(url)


@rule(f"{GROUP}.python", fix="name an interpreter; `make sglang` makes .venv-sglang/bin/python")
def interpreter_exists(config: RunConfig) -> Iterator[Found]:
    """An engine's environment is the one of its interpreter."""
    for where, _, group in list_groups(config):
        if group.python is not None and not Path(group.python).is_file():
            yield Found(f"{where}.python", f"{group.python} does not exist")


RULES = (
    policy_is_served,
    policy_is_updated,
    updated_model_is_the_trained_one,
    served_model_has_engines,
    prefill_and_decode_come_together,
    one_router_has_one_kind_of_worker,
    caches_known_to_nixl_stay,
    embedded_engine_is_one_cpu_process,
    external_engines_have_urls,
    external_engines_are_as_others_made_them,
    urls_are_addresses,
    interpreter_exists,
)
