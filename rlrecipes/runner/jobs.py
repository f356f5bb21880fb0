"""Jobs of the SLURM launcher, as their run directories and SLURM tell of them. Owns no state of its own."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlrecipes.engines.sglang.process import read_log_tail
from rlrecipes.errors import InputError, RunError
from rlrecipes.suggest import did_you_mean
from rlrecipes.tracking.mlflow_sink import METRICS_FILE

JOB_FILE, JOB_LOG = "job.json", "job.log"
"""In RUN_DIR/slurm."""
UNKNOWN = "unknown"
_LOGGER = logging.getLogger(__name__)
_TIMEOUT_S = 60.0
_METRICS_TAIL_BYTES = 1 << 16
_OVER = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "OUT_OF_MEMORY",
    "NODE_FAIL",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
)


@dataclass(frozen=True, slots=True)
class Job:
    """One job.

    Attributes:
        id: SLURM's number of it, ``NUMBER_INDEX`` in an array.
        name: of the run.
        run_dir: of the run.
        state: SLURM's word; ``unknown`` where it has forgotten the job, or is not here.
        reason: SLURM's, for a job that waits or has failed; else empty.
        step: the last one logged; None before the first.
        num_steps: of the run.
        reward: mean of the last step; None before the first, and for SFT.
        num_restarts: how often it was queued again.
        log_tail: the end of its log.
    """

    id: str
    name: str
    run_dir: str
    state: str
    reason: str
    step: int | None
    num_steps: int
    reward: float | None
    num_restarts: int
    log_tail: str


def read_jobs(runs_dir: Path) -> list[Job]:
    """The last job of every run, the youngest last; one whose record cannot be read costs a warning.

    Args:
        runs_dir: where run directories lie, or directories of them.
    """
    files = [*runs_dir.glob(f"*/slurm/{JOB_FILE}"), *runs_dir.glob(f"*/*/slurm/{JOB_FILE}")]
    found = [(_read_record(file), file.parent) for file in files]
    records = [(record, directory) for record, directory in found if record is not None]
    records.sort(key=lambda pair: (pair[0]["submitted"], pair[0]["id"]))
    states = _read_states([record["id"] for record, _ in records])
    jobs = []
    for record, directory in records:
        state, reason = states.get(record["id"], (UNKNOWN, ""))
        step, reward = _read_progress(directory.parent / METRICS_FILE)
        jobs.append(
            Job(
                id=record["id"],
                name=record["name"],
                run_dir=str(directory.parent),
                state=state,
                reason=reason,
                step=step,
                num_steps=record["num_steps"],
                reward=reward,
                num_restarts=_count_restarts(directory / "starts.jsonl", record["id"]),
                log_tail=read_log_tail(directory / JOB_LOG),
            )
        )
    return jobs


def find_active(run_dirs: Sequence[Path]) -> dict[Path, str]:
    """Runs whose last job waits or runs still, with its number and state; an unreadable record costs a warning.

    Args:
        run_dirs: where it is looked for.
    """
    files = {run_dir: run_dir / "slurm" / JOB_FILE for run_dir in run_dirs}
    records = {run_dir: _read_record(file) for run_dir, file in files.items() if file.is_file()}
    numbers = {run_dir: str(record["id"]) for run_dir, record in records.items() if record is not None}
    states = _read_states(list(numbers.values())) if numbers else {}
    known = {run_dir: (number, states.get(number, (UNKNOWN, ""))[0]) for run_dir, number in numbers.items()}
    return {run_dir: f"{number} ({state.lower()})" for run_dir, (number, state) in known.items() if _is_active(state)}


def _read_record(file: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        types = {"id": str, "name": str, "submitted": float, "num_steps": int}
        return {name: to_type(record[name]) for name, to_type in types.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        _LOGGER.warning("%s is no record of a job (%s): find the job with squeue, then remove the file", file, problem)
        return None


def find_jobs(jobs: Sequence[Job], names: Sequence[str]) -> list[Job]:
    """Jobs by number, by name of the run, or all of an array by the number that they share.

    Args:
        jobs: where they are looked for.
        names: what was asked for; none: all.

    Raises:
        InputError: there is no such job.
    """
    found = []
    for name in names:
        same = [job for job in jobs if name in (job.id, job.id.partition("_")[0], job.name)]
        if not same:
            known = {word for job in jobs for word in (job.id, job.name)}
            raise InputError("rlrecipes jobs", f"{name!r} is no job of these runs", did_you_mean(name, known))
        found += same
    return found if names else list(jobs)


def cancel(jobs: Sequence[Job]) -> None:
    """Have SLURM end jobs; each saves a checkpoint first, if SLURM's KillWait is long enough.

    Args:
        jobs: which; those that are over are left out.

    Raises:
        RunError: SLURM refuses.
    """
    numbers = [job.id for job in jobs if _is_active(job.state)]
    if not numbers:
        return
    done = _run("scancel", *numbers)
    if done is None or done.returncode != 0:
        says = done.stderr.strip() if done is not None else "there is no scancel here, or it gives no answer"
        raise RunError("scancel", says, "run this where SLURM's commands are; see `scontrol ping`")


def _is_active(state: str) -> bool:
    return state not in (*_OVER, UNKNOWN)


def _read_states(numbers: Sequence[str]) -> dict[str, tuple[str, str]]:
    """From squeue, which knows ended ones for some minutes too; older ones from sacct, where it has accounts."""
    states = dict(_parse(_run("squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r")))
    for number in numbers:  # of an array's tasks that were cancelled before they began it keeps the array alone
        states.setdefault(number, states.get(number.partition("_")[0], (UNKNOWN, "")))
    forgotten = [number for number in numbers if states[number][0] == UNKNOWN]
    if forgotten:
        asked = f"--jobs={','.join(forgotten)}"
        done = _run("sacct", "--noheader", "--allocations", "--parsable2", "--format=JobID,State,Reason", asked)
        states |= dict(_parse(done))
    return states


def _parse(done: subprocess.CompletedProcess[str] | None) -> Iterator[tuple[str, tuple[str, str]]]:
    for line in done.stdout.splitlines() if done is not None and done.returncode == 0 else ():
        number, state, reason = line.split("|", 2)
        number = number.removesuffix("+0")  # the first part of a hetjob
        yield number, (state.split()[0], "" if reason in ("None", "") else reason)  # "CANCELLED by 0"


def _run(*words: str) -> subprocess.CompletedProcess[str] | None:
    drop = ("SQUEUE_", "SACCT_", "SCANCEL_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _read_progress(metrics: Path) -> tuple[int | None, float | None]:
    """Last step, and the last reward; from the end of a file that may be long, and be written to just now."""
    try:
        with metrics.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _METRICS_TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None, None
    step = reward = None
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # cut off
        step = record["step"]
        value = record["metrics"].get("reward/mean")
        reward = reward if value is None else float(value)
    return step, reward


def _count_restarts(starts: Path, number: str) -> int:
    """A line that a full disk or a kill cut off is left out."""
    try:
        lines = starts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    counts = [0]
    for line in lines:
        try:
            record = json.loads(line)
            counts += [record["restart_count"]] if record["job"] == number else []
        except (ValueError, KeyError, TypeError):
            continue
    return max(counts)
