"""The batch script of a Plan, or of several that need machines alike. Owns the script's text; submits nothing.

sbatch script   #SBATCH lines, set-up lines, one srun with a task a node, the requeue
each task       rlrecipes.runner.slurm_node: Ray on its node; the first one the driver too
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlrecipes.config.schema import NativeOptions, PositiveFloat, PositiveInt, Section
from rlrecipes.errors import Problem
from rlrecipes.plan.nodes import Plan
from rlrecipes.suggest import did_you_mean

REQUEUE_CODE = 75
"""Exit code of a run that has saved and wants to go on (EX_TEMPFAIL)."""
_WHERE = "hydra.launcher"
_OWNED = {
    "array": "a sweep makes the array; cap it with hydra.launcher.max_parallel",
    "chdir": "a job runs where it is submitted",
    "error": "the job's log is RUN_DIR/slurm/job.log",
    "output": "the job's log is RUN_DIR/slurm/job.log",
    "nodes": "the Plan says how many: cluster.num_nodes",
    "ntasks": "there is one task a node",
    "ntasks-per-node": "there is one task a node",
    "signal": "set hydra.launcher.stop_before_limit_s",
    "open-mode": "a requeued job goes on in the same log",
    "parsable": "the launcher reads the answer",
    "test-only": "set hydra.launcher.preview=true",
    "wrap": "the launcher writes the script",
}
"""What the launcher says itself, and what to set instead."""
_SBATCH_WORDS = (
    "account acctg-freq batch bb bbf begin cluster-constraint clusters comment constraint container container-id"
    " contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency"
    " distribution exclude exclusive export export-file extra extra-node-info get-user-env gid gpu-bind gpu-freq gpus"
    " gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint hold ignore-pbs input job-name"
    " kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network"
    " nice no-kill no-requeue nodefile nodelist ntasks-per-core ntasks-per-gpu ntasks-per-socket overcommit"
    " oversubscribe partition power prefer priority profile propagate qos quiet reboot requeue reservation resv-ports"
    " segment sockets-per-node spread-job stepmgr switches thread-spec threads-per-core time time-min tmp tres-bind"
    " tres-per-task uid use-min-nodes wait-all-nodes wckey"
)
"""Long options of sbatch, 20.11 to 25.05, beside those above."""
_SBATCH_OPTIONS = frozenset(_SBATCH_WORDS.split())
_CPU_PROCESS_MIB = 2048
"""Of a process that computes without a GPU, Python and torch themselves."""
_GPU_OPTIONS = ("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")
_CPU_OPTIONS = ("exclusive", "cpus-per-task", "cpus-per-gpu")
_MEMORY_OPTIONS = ("exclusive", "mem", "mem-per-cpu", "mem-per-gpu")


class SlurmConfig(Section):
    """conf/hydra/launcher/slurm.yaml, which says what each is for."""

    preview: bool
    max_parallel: PositiveInt | None
    sbatch: NativeOptions
    engine_nodes: NativeOptions | None
    setup: tuple[str, ...]
    srun: NativeOptions
    container: tuple[str, ...]
    python: str | None
    node_wait_s: PositiveFloat
    stop_before_limit_s: PositiveInt


@dataclass(frozen=True, slots=True)
class NodeNeeds:
    """What a job asks of SLURM.

    Attributes:
        num_nodes: machines; of a hetjob's first part those with trainer ranks.
        num_engine_nodes: machines of its second part; 0: one plain job.
        num_gpus: of each machine.
        num_cpus: of each machine; None: all of it is taken.
        memory_mib: of each machine; None: all of it.
    """

    num_nodes: int
    num_engine_nodes: int
    num_gpus: int
    num_cpus: int | None
    memory_mib: int | None


def to_needs(plan: Plan, *, is_het: bool) -> NodeNeeds:
    """The machines of a Plan as SLURM counts them. Part of a machine is asked for only where the Plan has one.

    Args:
        plan: the Plan.
        is_het: whether machines without trainer ranks are asked for apart.
    """
    num_gpus = max(plan.num_used_gpus.values(), default=0)
    host = plan.hosts[0]
    trainers = {device.node for device in plan.trainer.devices}
    apart = sum(node not in trainers for node in range(len(plan.hosts))) if is_het else 0
    num_cpus = memory = None
    if plan.trainer.device == "cpu":
        num_cpus = min(host.num_cpus, _count_cpu_processes(plan))
        share = (host.memory_bytes >> 20) * num_cpus // host.num_cpus
        memory = min(host.memory_bytes >> 20, max(share, _CPU_PROCESS_MIB * num_cpus))
    elif num_gpus < host.num_gpus:
        num_cpus = max(1, host.num_cpus * num_gpus // host.num_gpus)
        memory = (host.memory_bytes >> 20) * num_gpus // host.num_gpus
    return NodeNeeds(len(plan.hosts) - apart, apart, num_gpus, num_cpus, memory)


def _count_cpu_processes(plan: Plan) -> int:
    """Threads of the busiest machine's ranks, its engines, and the driver."""
    threads = Counter({device.node: 0 for device in plan.trainer.devices})
    for device in plan.trainer.devices:
        threads[device.node] += plan.trainer.num_threads
    for engine in (engine for model in plan.served_models for engine in model.engines):
        threads[engine.devices[0].node] += 1
    return max(threads.values()) + 1


def find_option_problems(config: SlurmConfig) -> Iterator[Problem]:
    """Options that sbatch does not have, or that the launcher sets itself.

    Args:
        config: of the launcher.
    """
    sections = {"sbatch": config.sbatch, "engine_nodes": config.engine_nodes or {}}
    for section, options in sections.items():
        for key, value in options.items():
            where, name = f"{_WHERE}.{section}.{key}", key.replace("_", "-")
            if name in _OWNED:
                yield Problem(where, "is set by the launcher", _OWNED[name])
            elif name not in _SBATCH_OPTIONS:
                yield Problem(where, "is no option of sbatch", did_you_mean(name, _SBATCH_OPTIONS))
            elif not isinstance(value, str | int | float | bool | None):
                yield Problem(where, f"is {value!r}", "give one value, as sbatch takes it")
            elif name.startswith("time") and type(value) is int and value > 59:
                problem = f"is {value} minutes; YAML reads 8:00:00 as a number, in base 60"
                if value % 60 == 0 and value >= 3600:
                    yield Problem(where, problem, f'quote it: {key}: "8:00:00"; minutes as {key}: "{value}"')


def render_script(
    plans: Sequence[Plan],
    needs: NodeNeeds,
    config: SlurmConfig,
    *,
    partition: str | None,
    python: str,
    log_path: str,
) -> str:
    """The batch script of one run, or of the runs of an array.

    Args:
        plans: one, or an array's, whose machines are alike.
        needs: of each of them.
        config: of the launcher.
        partition: of the recipe's cluster section.
        python: on the nodes.
        log_path: of the job.
    """
    own: NativeOptions = {"job-name": plans[0].name if len(plans) == 1 else f"{plans[0].name}+{len(plans) - 1}"}
    own |= {"partition": partition} if partition is not None else {}
    own |= {"requeue": True} if "no-requeue" not in _dashed(config.sbatch) else {}
    common: NativeOptions = {
        "output": log_path,
        "open-mode": "append",
        "signal": f"B:USR1@{config.stop_before_limit_s}",
    }
    if len(plans) > 1:
        cap = f"%{config.max_parallel}" if config.max_parallel else ""
        common["array"] = f"0-{len(plans) - 1}{cap}"
    lines = ["#!/bin/bash", f"# {_title(plans)}; written by rlrecipes"]
    lines += _to_lines(own | common | _to_options(needs.num_nodes, needs, config.sbatch))
    if needs.num_engine_nodes:
        options = config.sbatch | (config.engine_nodes or {})
        lines += ["#SBATCH hetjob", *_to_lines(own | _to_options(needs.num_engine_nodes, needs, options))]
    runs = " ".join(shlex.quote(plan.run_dir) for plan in plans)
    groups = ["--het-group=0,1"] if needs.num_engine_nodes else []
    # Without them a step has all of the allocation's cores; --cpus-per-task would take it apart.
    srun = ["srun", *groups, "--kill-on-bad-exit=0", "--cpu-bind=none", *_to_flags(config.srun)]
    task = [*config.container, python, "-m", "rlrecipes.runner.slurm_node"]
    words = " ".join(map(shlex.quote, [*srun, *task, "--wait", f"{config.node_wait_s:g}"]))
    return "\n".join([*lines, "", *config.setup, _BODY.format(runs=runs, command=words, requeue=REQUEUE_CODE)])


_BODY = """
runs=({runs})
run_dir=${{runs[${{SLURM_ARRAY_TASK_ID:-0}}]}}
job=${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}
meeting="$run_dir/slurm/$job.${{SLURM_RESTART_COUNT:-0}}"
rm -rf "$meeting"
mkdir -p "$meeting"
exec >>"$run_dir/slurm/job.log" 2>&1
unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK
export RLRECIPES_JOB=$job

# SLURM tells this shell alone that the time limit is near; the tasks learn it from a file. It tells all of them of a
# preemption or scancel itself.
trap ': >"$meeting/stop"' USR1
trap : TERM
(trap '' TERM; exec {command} "$run_dir" "$meeting") &
step=$!
code=0
while kill -0 $step 2>/dev/null; do
  wait $step
  code=$?
done
rm -rf "$meeting"
if [ $code = {requeue} ]; then
  echo "$job: queued again, to go on from its checkpoint"
  scontrol requeue "$job" && exit 0
fi
exit $code
"""


def _title(plans: Sequence[Plan]) -> str:
    return f"run {plans[0].name}" if len(plans) == 1 else f"{len(plans)} runs: {', '.join(p.name for p in plans)}"


def _to_options(num_nodes: int, needs: NodeNeeds, given: NativeOptions) -> NativeOptions:
    """What a Plan needs of its machines, but for what the user says in other words."""
    user = _dashed(given)
    options: NativeOptions = {"nodes": num_nodes, "ntasks-per-node": 1}
    if needs.num_gpus and not any(name in user for name in _GPU_OPTIONS):
        options["gpus-per-node"] = needs.num_gpus
    if not any(name in user for name in _CPU_OPTIONS):
        options |= {"exclusive": True} if needs.num_cpus is None else {"cpus-per-task": needs.num_cpus}
    if not any(name in user for name in _MEMORY_OPTIONS):
        options["mem"] = "0" if needs.memory_mib is None else f"{needs.memory_mib}M"
    return options | user


def _dashed(options: Mapping[str, object]) -> NativeOptions:
    return {name.replace("_", "-"): value for name, value in options.items()}


def _to_flags(options: Mapping[str, object]) -> Iterator[str]:
    for name, value in _dashed(options).items():
        if value is True:
            yield f"--{name}"
        elif value is not None and value is not False:
            yield f"--{name}={value}"


def _to_lines(options: Mapping[str, object]) -> list[str]:
    return [f"#SBATCH {flag}" for flag in _to_flags(options)]
