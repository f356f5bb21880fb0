"""What a run finds on its machines: ports, disk, an earlier checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from rlrecipes.config.schema import ModelShapes, RlConfig, RunConfig
from rlrecipes.plan.hosts import LAST_PORT
from rlrecipes.plan.parameters import compute_num_parameters
from rlrecipes.plan.rules.rule import GROUP, MODEL, Facts, Found, fact_rule, list_models, rule

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_OPTIMIZER_BYTES = 12
"""A parameter's fp32 copy and Adam's two moments."""


def _list_fixed_ports(facts: Facts) -> Iterator[tuple[str, int, int]]:
    """Key, node and port of every process whose port the recipe fixes; an engine's own port counts up in its group."""
    for where, _, model in list_models(facts.config):
        for name, port in model.router.items():
            if name.endswith("port") and type(port) is int:
                yield f"{where}.router.{name}", 0, port
        for group_name, group in model.server_groups.items():
            here = f"{where}.server_groups.{group_name}.sglang"
            fixed = {name: port for name, port in group.sglang.items() if name.endswith("port") and type(port) is int}
            model_name = where.rpartition(".")[2]
            for number in range(facts.placement.num_engines.get((model_name, group_name), 1)):
                devices = facts.placement.engines.get((model_name, group_name, number), ())
                for name, port in fixed.items():
                    yield f"{here}.{name}", devices[0].node if devices else 0, port + number * (name == "port")


@fact_rule(
    f"{MODEL}.router.<name>", f"{GROUP}.sglang.<name>", fix="use a free port below 65536, or none to have one found"
)
def ports_are_in_range(facts: Facts) -> Iterator[Found]:
    """A port has 16 bits; an engine's own port counts up over the engines of its group."""
    told: set[str] = set()
    for where, _, port in _list_fixed_ports(facts):
        if not 0 < port <= LAST_PORT and where not in told:
            told.add(where)
            yield Found(where, f"gives a process the port {port}")


@fact_rule(
    f"{MODEL}.router.<name>",
    f"{GROUP}.sglang.<name>",
    fix="leave ports out to have free ones found, or move them apart",
)
def ports_are_used_once(facts: Facts) -> Iterator[Found]:
    """Two processes of one host cannot listen at one port; an engine's own port counts up over its group."""
    taken: dict[tuple[int, int], str] = {}
    told: set[str] = set()
    for where, node, port in _list_fixed_ports(facts):
        first = taken.get((node, port))
        if first is None:
            taken[node, port] = where
        elif where not in told:
            told.add(where)
            whose = "another engine of the group" if first == where else first
            yield Found(where, f"gives a process port {port}, which {whose} has on the same host")


def _list_checkpoints(config: RunConfig) -> list[Path]:
    return sorted(file.parent for file in Path(config.run_dir).glob("checkpoints/step_*/state.json"))


@rule("resume", fix="name the right run_dir, or set resume=auto")
def resume_is_as_expected(config: RunConfig) -> Iterator[Found]:
    """A mistyped directory must not become a run from the start, nor a used one be gone on with unasked."""
    found = _list_checkpoints(config)
    if config.resume == "required" and not found:
        yield Found("resume", f"is required; {config.run_dir} holds no checkpoint")
    if config.resume == "never" and found:
        fix = "choose another name or run_dir, or set resume=auto"
        yield Found("resume", f"is never; {config.run_dir} already holds {found[-1].name}", fix)


def compute_disk_bytes(config: RunConfig, shapes: ModelShapes) -> int:
    """Most bytes that a run still adds under runs_dir: its checkpoints, exports, and weights for engines.

    Checkpoints are written before older ones are removed, and so are weight versions of transport disk.

    Args:
        config: the recipe.
        shapes: of the model.
    """
    algo, schedule = (config.algo if isinstance(config.algo, RlConfig) else None), config.schedule
    weights = compute_num_parameters(shapes) * _DTYPE_BYTES[config.model.dtype]
    trained = weights + compute_num_parameters(shapes) * _OPTIMIZER_BYTES
    has_reference = algo is not None and algo.kl.placement != "none" and algo.kl.reference_model is None
    checkpoint = trained * (1 + (algo is not None and algo.critic is not None)) + weights * has_reference
    num_saves = math.ceil(schedule.num_steps / schedule.save_interval)
    num_new = max(0, min(num_saves, schedule.num_kept_checkpoints + 1) - len(_list_checkpoints(config)))
    num_copies = schedule.should_export_hf + 2 * (config.weight_sync.transport == "disk" and algo is not None)
    is_random = config.model.path is None and config.model.alphabet is not None
    return checkpoint * num_new + weights * (num_copies + is_random)


@fact_rule("cluster.disk_bytes", fix="free space, name another runs_dir, or lower schedule.num_kept_checkpoints")
def disk_holds_the_run(facts: Facts) -> Iterator[Found]:
    """A run that fills its disk stops at a checkpoint, hours after its start."""
    if facts.shapes is None or facts.cluster.disk_bytes is None:
        return
    needed = compute_disk_bytes(facts.config, facts.shapes)
    if needed > facts.cluster.disk_bytes:
        free = facts.cluster.disk_bytes / 1e9
        problem = (
            f"{free:.1f} GB are free under {facts.config.runs_dir}; checkpoints and exports take {needed / 1e9:.1f} GB"
        )
        yield Found("cluster.disk_bytes", problem)


RULES = (ports_are_in_range, ports_are_used_once, resume_is_as_expected, disk_holds_the_run)
