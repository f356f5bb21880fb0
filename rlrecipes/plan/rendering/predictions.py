"""What is expected of a run, drawn: bars of memory by phase, and the time line of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rlrecipes.plan.memory_nodes import MemoryNode
from rlrecipes.plan.nodes import Plan
from rlrecipes.plan.predictions import StepTimeNode

_GIB = 1 << 30
_BAR_CHARACTERS = 30
_LINE_CHARACTERS = 44
_LEAST_FRACTION = 0.01
_KINDS = {
    "weights": "green",
    "gradients": "yellow",
    "optimizer": "magenta",
    "activations": "cyan",
    "logits": "bright_cyan",
    "kv_cache": "blue",
}
_REST = ("everything else", "white")
_PHASES = {
    "rollout": "blue",
    "logprobs": "bright_cyan",
    "train": "magenta",
    "weight_sync": "yellow",
    "offload": "white",
}


def build_predictions(plan: Plan) -> Iterator[RenderableType]:
    """Bars of memory and the time line of a step; nothing where nothing is known of the GPUs.

    Args:
        plan: the Plan.
    """
    if plan.memory is not None:
        yield _memory_table(plan.memory)
        yield Text.assemble(
            "  ", *(part for name, colour in [*_KINDS.items(), _REST] for part in ((f"{name}  ", colour),))
        )
        yield from _memory_lines(plan.memory)
    if plan.step_time is not None:
        yield _time_line(plan.step_time)
        yield from _time_lines(plan.step_time)


def _memory_table(memory: MemoryNode) -> Table:
    title = f"memory of a GPU, GiB of {memory.usable_bytes / _GIB:.1f} usable"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
    for column in ("GPUs", "phase", "GiB", ""):
        table.add_column(column, justify="right" if column == "GiB" else "left")
    for role in memory.roles:
        for number, (phase, parts) in enumerate(role.parts.items()):
            name = f"{role.name}, {role.num_gpus}" if number == 0 else ""
            table.add_row(name, phase, f"{sum(parts.values()) / _GIB:.1f}", _draw_bar(parts, memory.usable_bytes))
    for host in sorted(memory.hosts, key=lambda host: host.needed_bytes - host.memory_bytes)[-1:]:
        name = f"host memory of {host.memory_bytes / _GIB:.1f}, the fullest of {len(memory.hosts)}"
        table.add_row(name, "all", f"{host.needed_bytes / _GIB:.1f}", _draw_bar(host.parts, host.memory_bytes))
    return table


def _draw_bar(parts: Mapping[str, int], usable_bytes: int) -> Text:
    bar = Text()
    drawn = 0
    kinds = [*_KINDS, _REST[0]]
    sums = {kind: sum(value for name, value in parts.items() if _kind(name) == kind) for kind in kinds}
    total = 0
    for kind, value in sums.items():
        total += value
        end = min(round(total / usable_bytes * _BAR_CHARACTERS), _BAR_CHARACTERS)
        bar.append("█" * (end - drawn), style=_KINDS.get(kind, _REST[1]))
        drawn = max(drawn, end)
    bar.append("░" * (_BAR_CHARACTERS - drawn), style="dim")
    if total > usable_bytes:
        bar.append(" too much", style="red")
    return bar


def _kind(name: str) -> str:
    kind = name.rpartition(".")[2]
    return kind if kind in _KINDS else _REST[0]


def _memory_lines(memory: MemoryNode) -> Iterator[Text]:
    for engine in memory.engines:
        room = (
            f"{engine.capacity_tokens:,} tokens of KV cache an engine, {engine.max_longest_rollouts} longest rollouts"
        )
        yield Text(f"  {engine.name}: {room} at once")
    yield Text(
        f"  room for micro-batches of {memory.max_tokens_per_micro_batch:,} tokens, samples of "
        f"{memory.max_sample_tokens:,}; {memory.headroom_bytes / _GIB:.1f} GiB left at the fullest"
    )


def _time_line(time: StepTimeNode) -> Table:
    table = Table(title=f"a step, {_tell_s(time.step_s)} expected", title_justify="left", box=None, padding=(0, 2))
    for column in ("phase", "time", ""):
        table.add_column(column, justify="right" if column == "time" else "left")
    before = 0.0
    for phase, colour in _PHASES.items():
        duration_s: float = getattr(time, f"{phase}_s")
        start, end = (round(moment / time.step_s * _LINE_CHARACTERS) for moment in (before, before + duration_s))
        before += duration_s
        line = Text(" " * start + "█" * (end - start) or "", style=colour)
        if duration_s > _LEAST_FRACTION * time.step_s:
            table.add_row(phase, _tell_s(duration_s), line)
    return table


def _time_lines(time: StepTimeNode) -> Iterator[Text]:
    idle = ", ".join(f"{role.role} {role.idle_fraction:.0%}" for role in time.roles)
    rates = f"{time.samples_per_s:.2f} samples/s, {time.tokens_per_s_per_gpu:,.0f} tokens/s a GPU"
    yield Text(f"  {rates}, {time.gpu_s / 3600:.2f} GPU-hours a step; idle: {idle}")
    yield Text(f"  {time.bottleneck}")
    yield Text(f"  a checkpoint takes {_tell_s(time.checkpoint_s)}; constants: {time.calibration or 'as shipped'}")


def _tell_s(duration_s: float) -> str:
    return (
        f"{duration_s:.2f} s"
        if duration_s < 10
        else f"{duration_s:.0f} s"
        if duration_s < 600
        else f"{duration_s / 60:.0f} min"
    )
