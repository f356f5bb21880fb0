"""A recipe and the Plan that came of it predict the same."""

from __future__ import annotations

import dataclasses

import pytest
from step_recipes import APART, COLOCATED, CONSTANTS, MAIN, inputs_of

from rlrecipes.config.compose import compose
from rlrecipes.plan.nodes import load_plan
from rlrecipes.plan.step_inputs import read_step_inputs
from rlrecipes.plan.step_time import compute_step_time
from rlrecipes.runner.resolution import resolve_recipe

BIG = (*COLOCATED, "cluster=h100_8x4", f"{MAIN}.gpus_per_engine=16", "weight_sync=disk")
TWIN = (
    *APART,
    "+served_model@topology.served_models.twin=policy",
    "+server_group@topology.served_models.twin.server_groups.main=sglang",
    "topology.served_models.twin.server_groups.main.placement=disaggregated",
    "topology.served_models.twin.server_groups.main.num_engines=2",
    f"{MAIN}.num_engines=4",
)


@pytest.mark.parametrize("overrides", [COLOCATED, APART, (*APART, "topology=pd"), BIG, TWIN, (*COLOCATED, "algo=sft")])
def test_a_plan_gives_the_inputs_of_its_recipe(tmp_path, overrides):
    overrides = (*overrides, "parallel=recompute")  # or it would not fit
    words = [*overrides, f"+{MAIN}.sglang.max_running_requests=64"] if "topology=pd" not in overrides else overrides
    plan = resolve_recipe(compose([*words, "data=spell_backward"]))
    path = tmp_path / "plan.yaml"
    path.write_text(plan.to_yaml())
    read, gathered = read_step_inputs(load_plan(path)), inputs_of(*words, "data=spell_backward")
    assert read.parallel.expert_tensor_parallel_size == gathered.parallel.tensor_model_parallel_size
    assert dataclasses.replace(read, parallel=gathered.parallel) == gathered
    assert compute_step_time(read, CONSTANTS) == compute_step_time(gathered, CONSTANTS) == plan.step_time


def test_every_gpu_that_a_run_keeps_is_counted():
    assert inputs_of(*TWIN).num_gpus == 8 + 4 + 2
    placeholder = "topology.served_models.twin.server_groups.main.worker_type=placeholder"
    assert inputs_of(*TWIN, placeholder).num_gpus == 8 + 4 + 2


def test_a_prediction_is_no_part_of_the_hash(tmp_path):
    plan = resolve_recipe(compose(COLOCATED))
    assert plan.step_time is not None
    path = tmp_path / "own.yaml"
    path.write_text("time: {decode_step_s: {value: 0.5, unit: s, source: y}}\n")
    slow = resolve_recipe(compose([*COLOCATED, f"calibration={path}"]))
    assert slow.step_time.step_s > 2 * plan.step_time.step_s
    assert slow.step_time.calibration == str(path)
    assert slow.hash == plan.hash


def test_a_wrong_calibration_is_a_problem_of_the_recipe():
    with pytest.raises(Exception, match=r"calibration.*nowhere\.yaml cannot be read") as caught:
        resolve_recipe(compose([*COLOCATED, "calibration=nowhere.yaml", "algo.group_size=1"]))
    assert {problem.where for problem in caught.value.problems} >= {"calibration", "algo.group_size"}


def test_there_is_no_prediction_on_a_cpu():
    assert resolve_recipe(compose(["recipe=quickstart_sft"])).step_time is None
