"""Batch scripts of Plans: what SLURM is asked for, what users may add, what is refused."""

from __future__ import annotations

import subprocess

import pytest

from rlrecipes.config.compose import compose
from rlrecipes.plan.sbatch import SlurmConfig, find_option_problems, render_script, to_needs
from rlrecipes.runner.resolution import resolve_recipe

CUDA = ["topology=disaggregated", "cluster=h100_8x2", "parallel.data_parallel_size=8", "model=qwen3_4b"]


def config(**changes):
    base = {
        "preview": True,
        "max_parallel": None,
        "sbatch": {},
        "engine_nodes": None,
        "setup": (),
        "srun": {},
        "container": (),
        "python": None,
        "node_wait_s": 300.0,
        "stop_before_limit_s": 180,
    }
    return SlurmConfig(**base | changes)


def plan_of(*words):
    return resolve_recipe(compose([*words]))


def lines_of(plans, own, **changes):
    needs = to_needs(plans[0], is_het=own.engine_nodes is not None)
    script = render_script(plans, needs, own, **{"partition": "gpu", "python": "python3", "log_path": "log"} | changes)
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False).stderr == ""
    return script.splitlines()


def test_whole_machines_are_taken_whole():
    lines = lines_of([plan_of(*CUDA)], config())
    for line in ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--exclusive", "--mem=0", "--requeue"):
        assert f"#SBATCH {line}" in lines
    assert "#SBATCH --partition=gpu" in lines and "#SBATCH --signal=B:USR1@180" in lines


def test_of_a_part_of_a_machine_its_share_is_asked_for():
    words = ["topology=colocated", "cluster=h200_8", "model=qwen3_4b", "parallel.data_parallel_size=2"]
    lines = lines_of([plan_of(*words)], config())
    assert "#SBATCH --gpus-per-node=2" in lines
    assert "#SBATCH --cpus-per-task=56" in lines and "#SBATCH --mem=524288M" in lines  # 2 of 8 GPUs, a quarter
    assert "#SBATCH --exclusive" not in lines


def test_machines_of_engines_alone_are_the_second_part_of_a_hetjob():
    own = config(engine_nodes={"partition": "inference"}, sbatch={"account": "rl"})
    lines = lines_of([plan_of(*CUDA)], own)
    first, second = lines[: lines.index("#SBATCH hetjob")], lines[lines.index("#SBATCH hetjob") :]
    assert "#SBATCH --nodes=1" in first and "#SBATCH --partition=gpu" in first
    assert "#SBATCH --nodes=1" in second and "#SBATCH --partition=inference" in second
    assert "#SBATCH --account=rl" in first and "#SBATCH --account=rl" in second
    assert any("srun --het-group=0,1" in line for line in lines)


def test_what_users_say_of_gpus_cores_and_memory_wins():
    own = config(
        sbatch={"gres": "gpu:h100:8", "cpus_per_task": 12, "mem-per-cpu": "4G", "no_requeue": True, "qos": "x"}
    )
    lines = lines_of([plan_of(*CUDA)], own)
    said = [line for line in lines if line.startswith("#SBATCH")]
    for line in ("--gres=gpu:h100:8", "--cpus-per-task=12", "--mem-per-cpu=4G", "--no-requeue", "--qos=x"):
        assert f"#SBATCH {line}" in said
    assert not [line for line in said if "gpus-per-node" in line or "exclusive" in line or "--mem=" in line]
    assert "#SBATCH --requeue" not in said


def test_set_up_lines_container_and_srun_options_stand_around_the_command():
    own = config(setup=("module load cuda",), container=("apptainer", "exec", "my image.sif"), srun={"mpi": "none"})
    lines = lines_of([plan_of(*CUDA)], own)
    assert "module load cuda" in lines
    (command,) = [line for line in lines if "slurm_node" in line]
    words = "srun --kill-on-bad-exit=0 --cpu-bind=none --mpi=none apptainer exec 'my image.sif' python3 -m"
    assert words in command


def test_a_sweep_is_an_array_with_a_cap():
    plans = [plan_of(*CUDA, f"name=a{number}") for number in range(3)]
    lines = lines_of(plans, config(max_parallel=2))
    assert "#SBATCH --array=0-2%2" in lines and "runs=(runs/a0 runs/a1 runs/a2)" in lines


@pytest.mark.parametrize(
    ("options", "where", "says"),
    [
        ({"acount": "rl"}, "hydra.launcher.sbatch.acount", "did you mean 'account'?"),
        ({"cpus_per_tsk": 1}, "hydra.launcher.sbatch.cpus_per_tsk", "did you mean 'cpus-per-task'?"),
        ({"nodes": 3}, "hydra.launcher.sbatch.nodes", "cluster.num_nodes"),
        ({"output": "x"}, "hydra.launcher.sbatch.output", "RUN_DIR/slurm/job.log"),
        ({"comment": ["a"]}, "hydra.launcher.sbatch.comment", "one value"),
        ({"time": 28800}, "hydra.launcher.sbatch.time", 'time: "8:00:00"'),  # as YAML reads it
    ],
)
def test_options_that_are_none_or_the_launchers_are_told(options, where, says):
    (problem,) = find_option_problems(config(sbatch=options))
    assert problem.where == where and says in problem.fix


def test_options_of_either_part_are_judged():
    found = find_option_problems(config(sbatch={"time": 30}, engine_nodes={"partitoin": "x"}))
    assert [problem.where for problem in found] == ["hydra.launcher.engine_nodes.partitoin"]
