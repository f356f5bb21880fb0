"""The starts of a run and how each ended. Owns attempts.jsonl; a run that was resumed has several."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from rlrecipes.tracking.upload_state import LOGGER

ATTEMPTS_FILE = "attempts.jsonl"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a run.

    Attributes:
        started: seconds since 1970.
        first_step: completed before it.
        ended: seconds since 1970; None while it runs, or when it was killed.
        status: MLflow's word; RUNNING until it ends.
        reason: why it failed; empty otherwise.
    """

    started: float
    first_step: int
    ended: float | None = None
    status: str = "RUNNING"
    reason: str = ""


def log_start(run_dir: Path, first_step: int) -> None:
    """Note that a run starts.

    Args:
        run_dir: the run's directory.
        first_step: completed before it.
    """
    _append(run_dir, {"started": time.time(), "first_step": first_step})


def log_end(run_dir: Path, status: str, reason: str) -> None:
    """Note how the start noted last has ended.

    Args:
        run_dir: the run's directory.
        status: MLflow's word.
        reason: why it failed; empty otherwise.
    """
    _append(run_dir, {"ended": time.time(), "status": status, "reason": reason})


def _append(run_dir: Path, fields: dict[str, object]) -> None:
    try:
        with (run_dir / ATTEMPTS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")
    except OSError as error:
        LOGGER.warning("%s cannot be written: %s", run_dir / ATTEMPTS_FILE, error.strerror)


def read_attempts(run_dir: Path) -> list[Attempt]:
    """The starts of a run, oldest first; lines that are torn are left out.

    Args:
        run_dir: the run's directory.
    """
    try:
        lines = (run_dir / ATTEMPTS_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found: list[Attempt] = []
    for line in lines:
        try:
            fields = json.loads(line)
            if "started" in fields:
                found.append(Attempt(**fields))
            elif found and found[-1].ended is None:
                found[-1] = Attempt(found[-1].started, found[-1].first_step, **fields)
        except (ValueError, TypeError):
            continue
    return found
