"""`rlrecipes jobs [JOB ...]`: jobs of the SLURM launcher: state, step, reward, why they wait, the end of their logs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rlrecipes.cli.flags import Parser
from rlrecipes.runner.jobs import Job, cancel, find_jobs, read_jobs

_SLURMS = ("srun: ", "slurmstepd")
"""How lines begin that SLURM writes into a job's log."""


def _build_parser() -> Parser:
    parser = Parser(prog="rlrecipes jobs", description=__doc__)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="numbers or run names: with their logs; default: all")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where runs lie (default: runs)")
    parser.add_argument("--cancel", nargs="+", metavar="JOB", help="end these, after a checkpoint")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    return parser


def run(arguments: list[str]) -> None:
    """Show jobs, or end some.

    Args:
        arguments: see ``--help``.

    Raises:
        InputError: there is no such job.
        RunError: SLURM refuses.
    """
    asked = _build_parser().parse_args(arguments)
    jobs = read_jobs(asked.runs_dir)
    if asked.cancel:
        chosen = find_jobs(jobs, asked.cancel)
        cancel(chosen)
        print(f"told to end: {', '.join(job.id for job in chosen)}")
        return
    chosen = find_jobs(jobs, asked.jobs)
    if asked.format == "json":
        print(json.dumps([dataclasses.asdict(job) for job in chosen], indent=2))
    elif not chosen:
        print(f"no jobs under {asked.runs_dir}")
    else:
        _show(chosen, should_show_logs=bool(asked.jobs))


def _find_last_words(job: Job) -> str:
    """Why it waits; else what the run itself said last, an error before all."""
    if job.state == "PENDING":
        return job.reason
    own = [line for line in job.log_tail.splitlines() if not line.startswith(_SLURMS)]
    errors = [line for line in own if line.startswith("rlrecipes: ")]
    return [job.reason, *own, *errors][-1]


def _show(jobs: Sequence[Job], *, should_show_logs: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(box=None, pad_edge=False)
    for title in ("job", "run", "state", "step", "reward", "says"):
        table.add_column(title, no_wrap=title != "says")
    for job in jobs:
        reward = "" if job.reward is None else f"{job.reward:.3f}"
        state = job.state.lower() + (f", restarted {job.num_restarts}x" if job.num_restarts else "")
        says = _find_last_words(job)
        table.add_row(job.id, job.name, state, f"{job.step or 0}/{job.num_steps}", reward, Text(says))
    console.print(table)
    for job in jobs if should_show_logs else ():
        console.print(f"\n{job.name}, {job.run_dir}/slurm/job.log:", highlight=False)
        console.print(Text(job.log_tail))
