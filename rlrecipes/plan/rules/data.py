"""Prompts: what must be there before a run asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlrecipes.config.schema import RunConfig
from rlrecipes.plan.rules.rule import Found, rule


@rule("data.train_path", "data.eval_path", fix="name an existing JSONL file, or set data.tasks")
def prompt_files_exist(config: RunConfig) -> Iterator[Found]:
    """Files that no task writes must be there."""
    for name in ("train_path", "eval_path"):
        path = getattr(config.data, name)
        if path is not None and config.data.tasks is None and not Path(path).is_file():
            yield Found(f"data.{name}", f"{path} does not exist")


@rule("schedule.eval_interval", fix="set schedule.eval_interval=0, or give data.eval_path")
def evaluation_has_prompts(config: RunConfig) -> Iterator[Found]:
    """An evaluation that was asked for must not be left out because nothing is held out."""
    if config.data.eval_path is None and config.schedule.eval_interval > 0:
        yield Found("schedule.eval_interval", f"is {config.schedule.eval_interval} but nothing is held out")


@rule("data.tasks.datasets", fix="name at least one reasoning-gym dataset")
def tasks_have_a_dataset(config: RunConfig) -> Iterator[Found]:
    """Of no dataset no file can be written."""
    if config.data.tasks is not None and not config.data.tasks.datasets:
        yield Found("data.tasks.datasets", "is empty")


@rule("rollout.evaluation.num_prompts", fix="use at most data.tasks.num_eval_rows")
def held_out_rows_suffice(config: RunConfig) -> Iterator[Found]:
    """An evaluation measures as many prompts as it says."""
    tasks = config.data.tasks
    if tasks is not None and config.rollout.evaluation.num_prompts > tasks.num_eval_rows:
        fix = f"use at most {tasks.num_eval_rows}"
        yield Found("rollout.evaluation.num_prompts", "is more than data.tasks.num_eval_rows", fix)


RULES = (prompt_files_exist, evaluation_has_prompts, tasks_have_a_dataset, held_out_rows_suffice)
