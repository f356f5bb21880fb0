"""The tables of a Plan."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from rich.console import RenderableType
from rich.table import Table

from rlrecipes.config.origins import origin_of
from rlrecipes.config.schema import RlConfig
from rlrecipes.plan.nodes import DeviceNode, Plan, ProcessNode


def build_tables(plan: Plan) -> list[RenderableType]:
    """What would run and what follows from the choices.

    Args:
        plan: the Plan.
    """
    return [_facts("what", _what(plan)), _facts("batch", _batch(plan)), *_changes(plan)]


def _facts(title: str, rows: Mapping[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _what(plan: Plan) -> dict[str, str]:
    model, algo = plan.model, plan.algo
    source = "random weights" if model.is_random else model.path
    chosen = (f"{group}={option}" for group, option in plan.choices.items() if "@" not in group)
    rows = {
        "recipe": " ".join(chosen),
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


def build_process_table(plan: Plan) -> Table:
    """Every process with its place and command; engines of one group that differ in nothing else are one row.

    Args:
        plan: the Plan.
    """
    table = Table(title="processes", title_justify="left")
    for column in ("process", "where", "what"):
        table.add_column(column, overflow="fold")
    trainer = plan.trainer
    ranks = "trainer rank 0" if trainer.num_ranks == 1 else f"trainer ranks 0 to {trainer.num_ranks - 1}"
    table.add_row(ranks, _place(plan, trainer.devices), f"megatron, {_layout(plan)}")
    for model in plan.served_models:
        for group in model.server_groups:
            if group.engines:
                names = _names([engine.name for engine in group.engines])
                processes = [process for engine in group.engines for process in (engine, *engine.followers)]
                devices = tuple(device for process in processes for device in process.devices)
                table.add_row(names, _place(plan, devices), _command(group.engines[0]))
            for url in group.urls:
                table.add_row(f"{model.name}-{group.name}", url, f"{group.worker_type} engine of somebody else's")
        table.add_row(model.router.name, _place(plan, model.router.devices), _command(model.router))
    return table


def _layout(plan: Plan) -> str:
    trainer = plan.trainer
    sizes = {
        "TP": trainer.tensor_model_parallel_size,
        "PP": trainer.pipeline_model_parallel_size,
        "VPP": trainer.virtual_pipeline_model_parallel_size or 1,
        "CP": trainer.context_parallel_size,
        "DP": trainer.data_parallel_size,
        "EP": trainer.expert_model_parallel_size,
    }
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name in ("TP", "PP", "DP"))


def _names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _command(process: ProcessNode) -> str:
    return " ".join(process.command)


def _place(plan: Plan, devices: tuple[DeviceNode, ...]) -> str:
    """Host by host, GPUs in a row as a range: ``h100-0:0-7``."""
    gpus: dict[int, list[int]] = {}
    for device in devices:
        gpus.setdefault(device.node, []).extend([device.gpu] if device.gpu is not None else [])
    told = [plan.hosts[node].name + (f":{_ranges(sorted(set(held)))}" if held else "") for node, held in gpus.items()]
    return ", ".join(told) if len(told) <= 4 else f"{told[0]} to {told[-1]} ({len(told)} nodes)"


def _ranges(numbers: list[int]) -> str:
    if numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))


def _changes(plan: Plan) -> Iterator[Table]:
    """Values that neither a default nor a chosen option set; what an option says is in its file."""
    rows = {path: value for path, value in plan.changes.items() if not _is_of_an_option(plan, path)}
    if not rows:
        return
    table = Table(title="set beside the choices", title_justify="left", show_header=False, box=None, padding=(0, 2))
    for path, value in rows.items():
        table.add_row(path, json.dumps(value), origin_of(plan.provenance, path))
    yield table


def _is_of_an_option(plan: Plan, path: str) -> bool:
    file = origin_of(plan.provenance, path).rpartition(":")[0]
    options = {f"conf/{group.partition('@')[0]}/{name}.yaml" for group, name in plan.choices.items()}
    group = path.partition(".")[0]
    return file in options and not file.startswith("conf/recipe/") or file.startswith(f"conf/{group}/")
