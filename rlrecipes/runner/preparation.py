"""What must be on disk before processes start: task files, and the weights and tokenizer of a model without a path."""

from __future__ import annotations

import shutil
from pathlib import Path

from rlrecipes.data.reasoning_tasks import TaskSpec, run_write_tasks
from rlrecipes.data.rows import RowKeys
from rlrecipes.plan.lock import Lock, compute_fingerprint
from rlrecipes.plan.nodes import Plan


def run_preparation(plan: Plan, *, is_new: bool, lock: Lock | None = None) -> None:
    """Write what the Plan says can be made and is not there.

    Args:
        plan: the Plan.
        is_new: whether no checkpoint depends on an initial model that is there; it is then made anew.
        lock: of the run that goes on: task files that are what it says are left alone, whatever another version of the
            package that made them would make of them.

    Raises:
        RecipeError: something cannot be made.
    """
    if lock is None or not _has_data_of(lock, plan):
        write_tasks(plan)
    if plan.model.is_random:
        _write_random_model(plan, is_new=is_new)


def _has_data_of(lock: Lock, plan: Plan) -> bool:
    paths = [Path(path) for path in (plan.data.train_path, plan.data.eval_path) if path is not None]
    return all(path.is_file() and compute_fingerprint(path) == lock.data.get(str(path)) for path in paths)


def write_tasks(plan: Plan) -> None:
    """Write the task files."""
    tasks = plan.data.tasks
    if tasks is None:
        return
    spec = TaskSpec(
        datasets=tasks.datasets,
        num_train_rows=tasks.num_train_rows,
        num_eval_rows=tasks.num_eval_rows,
        seed=tasks.seed,
        prompt_template=tasks.prompt_template,
        response_template=tasks.response_template,
        keys=to_row_keys(plan),
    )
    run_write_tasks(plan.data.train_path, plan.data.eval_path, spec)


def to_row_keys(plan: Plan) -> RowKeys:
    """Names of a JSONL row's keys."""
    data = plan.data
    return RowKeys(prompt=data.prompt_key, label=data.label_key, metadata=data.metadata_key, response=data.response_key)


def _write_random_model(plan: Plan, *, is_new: bool) -> None:
    path = Path(plan.model.path)
    if not is_new and (path / "config.json").is_file():
        return
    shutil.rmtree(path, ignore_errors=True)
    from rlrecipes.data.tokenizer import build_char_tokenizer
    from rlrecipes.engines.megatron.initial import run_write_random_model

    tokenizer = build_char_tokenizer(alphabet=plan.model.alphabet)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(path)
    run_write_random_model(plan.model, path)
