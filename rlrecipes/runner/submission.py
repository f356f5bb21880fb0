"""Hands Plans to SLURM: everything is resolved and judged first, then submitted. Owns what lies in RUN_DIR/slurm.

RUN_DIR/slurm/plan.yaml     what the job runs
              job.sh        the batch script; of an array it lies in the sweep's directory
              job.json      the job's number, and when it was submitted
              job.log       what the job prints, all its starts
              starts.jsonl  a line each time it started: where, and how often it was queued again
              node-N.log    of Ray on each machine
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlrecipes.config.compose import ComposedRecipe
from rlrecipes.config.validation import read_options
from rlrecipes.errors import ConfigError, Problem, RunError
from rlrecipes.plan.nodes import Plan
from rlrecipes.plan.sbatch import NodeNeeds, SlurmConfig, find_option_problems, render_script, to_needs
from rlrecipes.plan.slurm import read_slurm_hosts
from rlrecipes.runner.jobs import JOB_FILE, JOB_LOG, find_active
from rlrecipes.runner.resolution import resolve_recipe
from rlrecipes.tracking.log import write_atomically

_WHERE = "hydra.launcher"
_TIMEOUT_S = 60.0


def submit(recipes: Sequence[ComposedRecipe], options: Any, sweep_dir: Path, *, should_submit: bool = True) -> None:
    """Submit every recipe as a job, those of a sweep as arrays; or print the scripts.

    Args:
        recipes: composed.
        options: of the launcher, plain data.
        sweep_dir: takes the scripts of arrays.
        should_submit: False only judges.

    Raises:
        ConfigError: every problem of every recipe, of the options and the partition; nothing was submitted.
        RunError: SLURM took some jobs and refused others; says which.
    """
    config = read_options(SlurmConfig, options, _WHERE)
    problems = dict.fromkeys(find_option_problems(config))
    if not config.preview and shutil.which("sbatch") is None:
        fix = "run this where SLURM's commands are, or set hydra.launcher.preview=true"
        problems[Problem("hydra/launcher", "is slurm; this machine has no sbatch", fix)] = None
    plans: list[Plan] = []
    partitions: dict[str, str | None] = {}
    for recipe in recipes:
        try:
            plan = resolve_recipe(recipe)
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
            continue
        plans.append(plan)
        partitions[plan.run_dir] = recipe.config.cluster.partition
        problems |= dict.fromkeys(_find_cluster_problems(plan, recipe, config))
    problems |= dict.fromkeys(_find_used_directories(plans))
    if problems:
        raise ConfigError.from_problems(list(problems))
    if not should_submit:
        return
    jobs = list(_to_jobs(plans, config, partitions, sweep_dir))
    if config.preview:
        for job in jobs:
            print(f"# {job.path}\n{job.script}")
        return
    for job in jobs:
        _write(job.path, job.script)
        for plan in job.plans:
            _write(Path(plan.run_dir) / "slurm" / "plan.yaml", plan.to_yaml())
    _ask_slurm(jobs)
    _submit(jobs, config.max_parallel)


def _find_cluster_problems(plan: Plan, recipe: ComposedRecipe, config: SlurmConfig) -> Iterator[Problem]:
    cluster = recipe.config.cluster
    if cluster.source in ("host", "ray"):
        fix = "set cluster=slurm, or describe the nodes: conf/cluster/h100_8.yaml shows how"
        yield Problem("cluster.source", f"is {cluster.source}; a job runs on other machines than this", fix)
        return
    if len(plan.num_used_gpus) < len(plan.hosts):
        idle = [host.name for number, host in enumerate(plan.hosts) if number not in plan.num_used_gpus]
        fix = f"set cluster.num_nodes={len(plan.hosts) - len(idle)}"
        yield Problem("cluster.num_nodes", f"asks for {len(plan.hosts)} nodes; {len(idle)} would be idle", fix)
        return
    named = config.sbatch.get("partition")
    if named is not None and cluster.source == "slurm":
        fix = f"set cluster.partition={named} instead: the Plan is made for its nodes"
        yield Problem(f"{_WHERE}.sbatch.partition", f"is {named}; cluster.partition is {cluster.partition}", fix)
    elif shutil.which("sinfo") is not None and cluster.source != "slurm":
        found = list(_find_partition_problems(plan, named))
        if not (config.preview and any(problem.where == "cluster.source" for problem in found)):  # SLURM is not there
            yield from found
    if config.engine_nodes is not None and not to_needs(plan, is_het=True).num_engine_nodes:
        problem = "asks for machines that hold engines alone; the Plan has none"
        yield Problem(f"{_WHERE}.engine_nodes", problem, "use topology=disaggregated on more nodes, or set it to null")


def _find_partition_problems(plan: Plan, partition: str | None) -> Iterator[Problem]:
    """Of a described cluster; one that is read from SLURM agrees with itself."""
    try:
        hosts = read_slurm_hosts(partition)
    except ConfigError as error:
        yield from error.problems
        return
    num_gpus = max(plan.num_used_gpus.values(), default=0)
    fitting = [host for host in hosts if host.node.num_gpus >= num_gpus]
    if len(fitting) < len(plan.hosts):
        largest = max(host.node.num_gpus for host in hosts)
        problem = (
            f"needs {len(plan.hosts)} nodes of {num_gpus} GPUs; partition {partition or '(default)'} has {len(fitting)}"
            f" of {len(hosts)} usable nodes with so many (the largest has {largest})"
        )
        yield Problem("cluster", problem, "use fewer or smaller nodes, or another partition: cluster=slurm reads it")


def _find_used_directories(plans: Sequence[Plan]) -> Iterator[Problem]:
    seen: set[str] = set()
    for plan in plans:
        if plan.run_dir in seen:
            yield Problem("run_dir", f"{plan.run_dir} is the directory of several jobs", "leave run_dir and name alone")
        seen.add(plan.run_dir)
    for run_dir, job in find_active([Path(name) for name in seen]).items():
        fix = "wait for it, end it with `rlrecipes jobs --cancel`, or choose another name"
        yield Problem("run_dir", f"{run_dir} is in use by job {job}", fix)


@dataclass(frozen=True, slots=True)
class _Job:
    """One submission: a run, or an array of runs whose machines are alike."""

    plans: Sequence[Plan]
    script: str
    path: Path


def _to_jobs(
    plans: Sequence[Plan], config: SlurmConfig, partitions: Mapping[str, str | None], sweep_dir: Path
) -> Iterator[_Job]:
    """Runs whose machines are alike become an array; SLURM makes no arrays of hetjobs, so these stay single."""
    alike: dict[tuple[NodeNeeds, str | None], list[Plan]] = {}
    for plan in plans:
        needs = to_needs(plan, is_het=config.engine_nodes is not None)
        alike.setdefault((needs, partitions[plan.run_dir]), []).append(plan)
    for number, ((needs, partition), group) in enumerate(alike.items()):
        for members in [[plan] for plan in group] if needs.num_engine_nodes else [group]:
            if len(members) == 1:
                directory = Path(members[0].run_dir) / "slurm"
                path, log = directory / "job.sh", directory / JOB_LOG
            else:
                path, log = sweep_dir / f"job_{number}.sh", sweep_dir / "%A_%a.log"
            python = config.python or sys.executable
            script = render_script(members, needs, config, partition=partition, python=python, log_path=str(log))
            yield _Job(members, script, path)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode())


def _ask_slurm(jobs: Sequence[_Job]) -> None:
    """Have SLURM judge every script before it gets the first: accounts, limits, features are its own affair."""
    problems = dict[Problem, None]()
    for job in jobs:
        done = _run_sbatch("--test-only", str(job.path))
        if done.returncode != 0:
            says = done.stderr.replace("sbatch: error: ", "").replace("allocation failure: ", "").strip()
            fix = f"correct hydra.launcher.sbatch or cluster.partition; the script is {job.path}"
            problems[Problem(_WHERE, f"sbatch refuses it: {'; '.join(says.splitlines())}", fix)] = None
    if problems:
        raise ConfigError.from_problems(list(problems))


def _submit(jobs: Sequence[_Job], max_parallel: int | None) -> None:
    numbers: list[str] = []
    for job in jobs:
        is_single = len(job.plans) == 1 and len(jobs) > 1
        waits = numbers[-max_parallel] if is_single and max_parallel and len(numbers) >= max_parallel else None
        after = [f"--dependency=afterany:{waits}"] if waits else []
        done = _run_sbatch("--parsable", *after, str(job.path))
        if done.returncode != 0:
            before = f"; already submitted: {', '.join(numbers)} (scancel takes them back)" if numbers else ""
            raise RunError(f"sbatch {job.path}", done.stderr.strip() + before, "see `scontrol ping` and `sinfo`")
        number = done.stdout.strip().partition(";")[0]
        numbers.append(number)
        names = [number if len(job.plans) == 1 else f"{number}_{index}" for index in range(len(job.plans))]
        for name, plan in zip(names, job.plans, strict=True):  # told first: a full disk must not hide what SLURM took
            print(f"{plan.name}: job {name}, run directory {plan.run_dir}", flush=True)
        for name, plan in zip(names, job.plans, strict=True):
            record = {"id": name, "submitted": time.time(), "plan_hash": plan.hash, "script": str(job.path)}
            record |= {"name": plan.name, "num_steps": plan.schedule.num_steps}
            _write(Path(plan.run_dir) / "slurm" / JOB_FILE, json.dumps(record) + "\n")
    print("see them with `rlrecipes jobs`")


def _run_sbatch(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["sbatch", *words], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        fix = "see whether slurmctld runs: scontrol ping"
        raise RunError("sbatch", f"gave no answer in {_TIMEOUT_S:g} s", fix) from error
