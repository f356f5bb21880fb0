"""The map of a Plan's GPUs: a row a node, a cell a GPU, a colour a role; nodes in a row that look alike are one row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rlrecipes.plan.nodes import DeviceNode, Plan

_COLOURS = (
    "green",
    "magenta",
    "yellow",
    "blue",
    "red",
    "bright_green",
    "bright_magenta",
    "bright_yellow",
    "bright_blue",
)
_TRAINER = "cyan"
_FREE = "."

type _Cell = tuple[int, ...]
"""Indices of the roles on one GPU."""


@dataclass(frozen=True, slots=True)
class Role:
    """What a GPU may be used for.

    Attributes:
        label: a letter in the map.
        name: what it stands for.
        colour: of the letter.
        devices: where it is.
    """

    label: str
    name: str
    colour: str
    devices: tuple[DeviceNode, ...]


def read_roles(plan: Plan) -> list[Role]:
    """Every role on the GPUs of a Plan: the trainer, then each server group; none on a CPU.

    Args:
        plan: the Plan.
    """
    if not plan.trainer.devices or plan.trainer.devices[0].gpu is None:
        return []
    inside = (
        ["trainer"] + ["critic"] * (plan.trainer.critic is not None) + ["teacher"] * bool(plan.trainer.teacher_path)
    )
    roles = [Role("T", f"{' + '.join(inside)}, {plan.trainer.num_ranks} ranks", _TRAINER, plan.trainer.devices)]
    groups = [(model, group) for model in plan.served_models for group in model.server_groups]
    for number, (model, group) in enumerate(groups):
        processes = [process for engine in group.engines for process in (engine, *engine.followers)]
        devices = {(d.node, d.gpu): d for process in processes for d in process.devices}
        held = tuple(devices.values()) or group.reserved
        if held:
            kind = f"{group.worker_type}, {len(group.engines)} engines of {group.gpus_per_engine}"
            what = f"{model.name} {group.name}: {kind if group.engines else group.worker_type}"
            roles.append(Role(chr(ord("A") + number % 19), what, _COLOURS[number % len(_COLOURS)], held))
    return roles


def build_gpu_map(plan: Plan) -> list[RenderableType]:
    """Draw who is where.

    Args:
        plan: the Plan.

    Returns:
        The map and its legend; nothing on a CPU.
    """
    roles = read_roles(plan)
    if not roles:
        return []
    cells: dict[tuple[int, int | None], _Cell] = {}
    for index, role in enumerate(roles):
        for device in role.devices:
            cells[device.node, device.gpu] = (*cells.get((device.node, device.gpu), ()), index)
    rows = [tuple(cells.get((node, gpu), ()) for gpu in range(host.num_gpus)) for node, host in enumerate(plan.hosts)]
    table = Table(title="GPUs", title_justify="left", box=None, padding=(0, 1))
    table.add_column("node")
    for gpu in range(max(len(row) for row in rows)):
        table.add_column(str(gpu), justify="center")
    for nodes, row in _fold(rows):
        name = plan.hosts[nodes[0]].name
        if len(nodes) > 1:
            name += f" to {plan.hosts[nodes[-1]].name} ({len(nodes)} nodes)"
        table.add_row(name, *(_draw(cell, roles) for cell in row))
    legend = (Text(f"  {role.label} = {role.name}, {len(role.devices)} GPUs", style=role.colour) for role in roles)
    return [table, *legend]


def _fold(rows: Sequence[tuple[_Cell, ...]]) -> Iterator[tuple[list[int], tuple[_Cell, ...]]]:
    for row, nodes in groupby(range(len(rows)), key=lambda node: rows[node]):
        yield list(nodes), row


def _draw(cell: _Cell, roles: Sequence[Role]) -> Text:
    text = Text()
    for index in cell:
        text.append(roles[index].label, style=f"bold {roles[index].colour}")
    return text if cell else Text(_FREE, style="dim")
