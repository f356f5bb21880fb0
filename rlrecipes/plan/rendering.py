"""A Plan for people: tables on a terminal. Owns no facts."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from rlrecipes.config.origins import origin_of
from rlrecipes.config.schema import RlConfig
from rlrecipes.plan.nodes import DeviceNode, Plan, ProcessNode


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print what would run, where, and what follows from the choices.

    Args:
        plan: the Plan.
        console: where; standard output by default.
    """
    console = console or Console()
    console.print(f"[bold]{plan.name}[/bold]  plan {plan.hash}  run directory {plan.run_dir}", highlight=False)
    console.print(_facts("what", _what(plan)))
    console.print(_facts("batch", _batch(plan)))
    console.print(_processes(plan))
    if plan.changes:
        console.print(_changes(plan))
    for note in plan.notes:
        console.print(f"note: {note}", highlight=False)


def _facts(title: str, rows: Mapping[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _what(plan: Plan) -> dict[str, str]:
    model, algo = plan.model, plan.algo
    source = "random weights" if model.is_random else model.path
    rows = {
        "model": f"{model.name} ({model.family}, {model.num_parameters:,} parameters, {model.dtype}, {source})",
        "algorithm": algo.name + (f", KL in {algo.kl.placement}" if isinstance(algo, RlConfig) else ""),
        "data": f"{plan.data.name}: {plan.data.train_path}, held out {plan.data.eval_path or 'nothing'}",
        "reward": plan.reward.name,
        "steps": f"{plan.schedule.num_steps}, checkpoint every {plan.schedule.save_interval}",
        "learning rate": f"{plan.trainer.optim.lr:g}, {plan.trainer.optim.lr_decay_style}",
        "seed": f"{plan.seed}{', deterministic' if plan.is_deterministic else ''}",
    }
    for route in plan.sync_routes:
        rows["weight sync"] = (
            f"to {route.served_model} by {route.transport}, {route.num_receiving_ranks} receiving ranks"
        )
    return rows


def _batch(plan: Plan) -> dict[str, str]:
    batch = plan.batch
    return {
        "a step": f"{batch.prompts_per_step} prompts x {batch.group_size} = {batch.rollouts_per_step} rollouts",
        "a train step": f"{batch.rollouts_per_train_step} rollouts, {batch.num_train_steps} a step",
        "longest sample": f"{batch.max_sample_tokens} tokens",
        "micro-batch": f"at most {plan.trainer.max_tokens_per_micro_batch} tokens",
    }


def _processes(plan: Plan) -> Table:
    table = Table(title="processes", title_justify="left")
    for column in ("process", "where", "what"):
        table.add_column(column, overflow="fold")
    trainer = plan.trainer
    layout = (
        f"TP {trainer.tensor_model_parallel_size}, PP {trainer.pipeline_model_parallel_size}, "
        f"DP {trainer.data_parallel_size}"
    )
    for rank, device in enumerate(trainer.devices):
        table.add_row(f"trainer rank {rank}", _place(plan, (device,)), f"megatron, {layout}")
    for model in plan.served_models:
        for process in (*model.engines, model.router):
            table.add_row(process.name, _place(plan, process.devices), _command(process))
    return table


def _command(process: ProcessNode) -> str:
    return " ".join(process.command)


def _place(plan: Plan, devices: tuple[DeviceNode, ...]) -> str:
    return ", ".join(
        plan.hosts[device.node].name + ("" if device.gpu is None else f":{device.gpu}") for device in devices
    )


def _changes(plan: Plan) -> Table:
    table = Table(title="set against the defaults", title_justify="left", show_header=False, box=None, padding=(0, 2))
    for path, value in plan.changes.items():
        table.add_row(path, json.dumps(value), origin_of(plan.provenance, path))
    return table
