"""Checkpoints of a whole run: the trainer's directory and one file for everything else. Owns their life on disk.

    <run_dir>/checkpoints/step_00000010/   weights, optimizer and their RNG (Megatron's torch_dist)
                                state.json  step, cursor, buffer, weight version, MLflow run, and the Plan

A checkpoint is written under another name and renamed when complete, so one that has its name is whole.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from rlrecipes.errors import CheckpointError, ConfigError, Problem, RecipeError
from rlrecipes.plan.difference import changes_learning, compute_difference, to_portable
from rlrecipes.plan.nodes import Plan
from rlrecipes.tracking.log import write_atomically

_STATE_FILE = "state.json"


class RunState(BaseModel):
    """Everything a run needs to go on, beside the trainer's own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    """Steps completed."""
    is_evaluation_due: bool
    """Whether the step was to be evaluated and has not been."""
    weight_version: int
    """Of the last sync."""
    mlflow_run_id: str | None
    plan_hash: str
    plan: dict[str, Any]
    collector: dict[str, Any]
    """Cursor, open prompts and buffer; for SFT the cursor alone."""


class CheckpointStore:
    """The checkpoints of one run directory.

    Args:
        run_dir: the run's directory.
        num_kept: older ones are removed.
    """

    def __init__(self, run_dir: Path, num_kept: int) -> None:
        self._root = run_dir / "checkpoints"
        self._num_kept = num_kept

    def find_latest(self) -> Path | None:
        """The newest whole checkpoint."""
        found = self.find_all()
        return found[-1] if found else None

    def find_all(self) -> list[Path]:
        """The whole checkpoints, oldest first."""
        return sorted(path for path in self._root.glob("step_*") if (path / _STATE_FILE).is_file())

    def read_state(self, path: Path) -> RunState:
        """Read the state beside the trainer's files.

        Raises:
            CheckpointError: it is damaged.
        """
        file = path / _STATE_FILE
        try:
            return RunState.model_validate_json(file.read_text(encoding="utf-8"))
        except (OSError, ValidationError) as error:
            fix = f"remove {path} to resume from an earlier checkpoint"
            raise CheckpointError(str(file), f"cannot be read: {error}", fix) from error

    async def save(self, state: RunState, save_trainer: Callable[[Path], Awaitable[Any]]) -> Path:
        """Write a checkpoint and drop the ones no longer kept.

        Args:
            state: everything but the trainer's.
            save_trainer: writes the trainer's part into an empty directory.

        Returns:
            The checkpoint.

        Raises:
            CheckpointError: it cannot be written; earlier checkpoints are untouched.
        """
        final = self._root / f"step_{state.step:08d}"
        draft = self._root / f".draft_step_{state.step:08d}"
        try:
            self._remove_drafts()
            draft.mkdir(parents=True)
            await save_trainer(draft)
            _write_durably(draft / _STATE_FILE, state.model_dump_json())
            if final.exists():
                self._set_aside(final)
            draft.rename(final)
        except (OSError, RecipeError) as error:
            self._remove_drafts()
            raise self._explain(final, error) from error
        for old in self.find_all()[: -self._num_kept]:
            self._set_aside(old)
        self._remove_drafts()
        return final

    def confirm_evaluated(self, step: int) -> None:
        """Note in a checkpoint that its step has been evaluated since; the trainer's part stays as it is.

        Args:
            step: of the checkpoint.

        Raises:
            CheckpointError: its state is damaged, or the disk refuses; the checkpoint is as before.
        """
        path = self._root / f"step_{step:08d}"
        state = self.read_state(path).model_copy(update={"is_evaluation_due": False})
        try:
            write_atomically(path / _STATE_FILE, state.model_dump_json().encode())
        except OSError as error:
            raise self._explain(path, error) from error

    def _set_aside(self, checkpoint: Path) -> None:
        """Give it another name before it is removed: half of one must not be taken for a whole one."""
        checkpoint.rename(self._root / f".draft_{checkpoint.name}_removed")

    def _remove_drafts(self) -> None:
        for draft in self._root.glob(".draft_*"):
            shutil.rmtree(draft, ignore_errors=True)

    def _explain(self, path: Path, error: Exception) -> CheckpointError:
        latest = self.find_latest()
        kept = f"the last good one is {latest}" if latest else "there is no earlier one"
        free = shutil.disk_usage(self._root.parent).free >> 20
        fix = f"rerun the same command to resume, with more space if that is why ({free} MiB are left); {kept}"
        return CheckpointError(str(path), f"could not be written: {_find_cause(error)}", fix)


def _find_cause(error: Exception) -> str:
    """The last named error of a message that may hold tracebacks of other processes."""
    text = error.problems[0].problem if isinstance(error, RecipeError) else str(error)
    named = re.findall(r"^\s*(\w[\w.]*(?:Error|Exception): .+)$", text, re.MULTILINE)
    return str(named[-1]) if named else text.splitlines()[0] if text else type(error).__name__


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def check_same_recipe(saved: Mapping[str, Any], plan: Plan, checkpoint: Path) -> None:
    """Refuse to resume a run as another one.

    Args:
        saved: the Plan in the checkpoint, as plain data.
        plan: what is asked for now.
        checkpoint: for the message.

    Raises:
        ConfigError: every difference that changes what is learned.
    """
    if plan.resume == "accept_changes" and saved["algo"]["kind"] == plan.algo.kind:
        return
    problems = []
    for path, (old, new) in compute_difference(to_portable(saved), to_portable(plan.to_execution())).items():
        if changes_learning(path):
            fix = f"restore it, choose another run_dir, or set resume=accept_changes to go on from {checkpoint} anyway"
            problems.append(Problem(path, f"is {new!r}; the checkpoint was made with {old!r}", fix))
    if problems:
        raise ConfigError.from_problems(problems)
