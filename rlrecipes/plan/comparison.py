"""Two Plans held against each other, by meaning: processes as counts and options, not as lists of words and devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlrecipes.config.origins import origin_of
from rlrecipes.plan.difference import MISSING, RECORD, changes_learning, compute_difference, to_portable
from rlrecipes.plan.nodes import DeviceNode, Plan, ProcessNode, ServedModelNode

type Kind = Literal["choice", "learning", "execution", "prediction"]
KINDS: tuple[Kind, ...] = ("choice", "learning", "execution", "prediction")
_PREDICTIONS = ("memory", "step_time")
_NAMES = ("name", "run_dir", "runs_dir", "resume", "version")
_RECIPE_PATHS = {
    "trainer.optim": "optim",
    "trainer.critic.optim": "algo.critic.optim",
    "trainer.device": "topology.device",
    "trainer": "parallel",
    "batch.group_size": "algo.group_size",
    "batch.num_train_steps": "schedule.num_train_steps",
    "batch.prompts_per_step": "schedule.prompts_per_step",
    "served_models": "topology.served_models",
    "is_deterministic": "deterministic",
}
"""Part of a Plan -> part of the recipe that it comes from, where they are called differently."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that two Plans say differently.

    Attributes:
        path: in the Plan.
        kind: choice is an option of a group; learning decides what is learned, execution how it is run, prediction what
            is expected of it.
        left: value of the first; ``(absent)`` where it has none.
        right: value of the second.
        left_origin: where the first was set: file:line or override; empty for what follows from other values.
        right_origin: the same of the second.
    """

    path: str
    kind: Kind
    left: Any
    right: Any
    left_origin: str
    right_origin: str


def compare_plans(left: Plan, right: Plan) -> list[Difference]:
    """Everything that two Plans say differently, but their names.

    Args:
        left: the first.
        right: the second.

    Returns:
        Choices first, then what is learned, how it is run, and predictions; by path. A part that one Plan lacks
        altogether is one difference.
    """
    chosen = compute_difference(left.choices, right.choices)
    differences = [Difference(path, "choice", *pair, "", "") for path, pair in chosen.items()]
    for path, pair in _fold(compute_difference(to_meaning(left), to_meaning(right))).items():
        differences.append(Difference(path, _kind(path), *pair, _origin(left, path), _origin(right, path)))
    return sorted(differences, key=lambda difference: (KINDS.index(difference.kind), difference.path))


def _fold(pairs: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """Sections that one side lacks, or has null, told once: ``algo.critic`` instead of each of its keys."""
    folded: dict[str, tuple[Any, Any]] = {}
    for path in pairs:
        steps = path.split(".")
        sections = [".".join(steps[:length]) for length in range(2, len(steps))]
        lacking = next((section for section in sections if _find_lacking_side(section, pairs) is not None), path)
        inside = {p[len(lacking) + 1 :]: both for p, both in pairs.items() if p.startswith(lacking + ".")}
        side = _find_lacking_side(lacking, pairs)
        if side is None:
            folded[path] = pairs[path]
            continue
        whole = {name: both[1 - side] for name, both in inside.items()}
        absent = pairs[lacking][side] if lacking in pairs else MISSING
        folded[lacking] = (absent, whole) if side == 0 else (whole, absent)
    return folded


def _find_lacking_side(section: str, pairs: Mapping[str, tuple[Any, Any]]) -> int | None:
    """The side that has none of a section's keys; None where both have some, or it is no section."""
    inside = [both for path, both in pairs.items() if path.startswith(section + ".")]
    return next((side for side in (0, 1) if inside and all(both[side] == MISSING for both in inside)), None)


def to_meaning(plan: Plan) -> dict[str, Any]:
    """Plain data of a Plan in which every list of processes and devices is told by what it holds.

    Args:
        plan: the Plan.
    """
    portable = to_portable(plan.to_data())
    data = {name: value for name, value in portable.items() if name not in (*RECORD, *_NAMES) or name in _PREDICTIONS}
    for name in ("disk_bytes", "gpu_hour_price"):
        data["cluster"].pop(name)
    data["hosts"] = ", ".join(f"{n} x {gpus} GPUs" for gpus, n in Counter(host.num_gpus for host in plan.hosts).items())
    data["trainer"]["devices"] = _tell_devices(plan, plan.trainer.devices)
    data["served_models"] = {model.name: _tell_model(plan, model) for model in plan.served_models}
    data["sync_routes"] = {route["served_model"]: route for route in data["sync_routes"]}
    return data


def _tell_model(plan: Plan, model: ServedModelNode) -> dict[str, Any]:
    groups = {}
    for group in model.server_groups:
        told = group.model_dump(exclude={"engines", "reserved", "name"})
        told["num_engines"] = len(group.engines) + len(group.urls)
        told["devices"] = _tell_devices(plan, [device for engine in group.engines for device in engine.devices])
        if group.engines:
            told |= {
                "sglang": _options(group.engines[0]),
                "env": group.engines[0].env,
                "python": group.engines[0].python,
            }
            told["env"].pop("CUDA_VISIBLE_DEVICES", None)
        groups[group.name] = told
    plain = model.model_dump(exclude={"engines", "router", "server_groups", "name"})
    plain["path"] = plain["path"].replace(plan.run_dir + "/", "{}/").replace(plan.runs_dir + "/", "{}/")
    return plain | {"router": _options(model.router), "server_groups": groups}


def _options(process: ProcessNode) -> dict[str, str]:
    """Flags of a command with their values."""
    options: dict[str, list[str]] = {}
    for word in process.command:
        if word.startswith("--"):
            options[word.removeprefix("--").replace("-", "_")] = []
        elif options:
            options[next(reversed(options))].append(word)
    return {name: " ".join(values) or "true" for name, values in options.items() if name != "random_seed"}


def _tell_devices(plan: Plan, devices: Sequence[DeviceNode]) -> str:
    if not devices:
        return "none"
    if devices[0].gpu is None:
        return f"{len(devices)} CPU processes"
    nodes = sorted({device.node for device in devices})
    return f"{len(set(_keys(devices)))} GPUs on {plan.hosts[nodes[0]].name}" + (
        f" to {plan.hosts[nodes[-1]].name}" if len(nodes) > 1 else ""
    )


def _keys(devices: Iterable[DeviceNode]) -> list[tuple[int, int | None]]:
    return [(device.node, device.gpu) for device in devices]


def _kind(path: str) -> Kind:
    if path.partition(".")[0] in _PREDICTIONS:
        return "prediction"
    return "learning" if changes_learning(path) else "execution"


def _origin(plan: Plan, path: str) -> str:
    """Where a value was set; empty for what the Plan derived."""
    recipe_path = to_recipe_path(path)
    known: Mapping[str, str] = plan.provenance
    is_set = any(name == recipe_path or recipe_path.startswith(name + ".") for name in known)
    return origin_of(dict(known), recipe_path) if is_set else ""


def to_recipe_path(path: str) -> str:
    """The recipe's name of a part of the Plan.

    Args:
        path: dotted, in the Plan.
    """
    for ours in sorted(_RECIPE_PATHS, key=len, reverse=True):
        if path == ours or path.startswith(ours + "."):
            return _RECIPE_PATHS[ours] + path.removeprefix(ours)
    return path
