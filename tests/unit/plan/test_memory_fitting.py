"""Constants of the memory model: found again in memory that the model made, and kept where nothing tells of them."""

from __future__ import annotations

import dataclasses

import pytest
from step_recipes import APART, COLOCATED, MAIN, inputs_of

from rlrecipes.plan.memory import compute_memory, load_memory_constants
from rlrecipes.plan.memory_fitting import MemoryMeasurement, MemoryObservation, fit_memory, predict_memory

CONSTANTS = load_memory_constants(None)
TRUE = dataclasses.replace(
    CONSTANTS,
    cuda_context_bytes=4.4e8,
    activation_overhead_fraction=0.03,
    trainer_workspace_bytes=1.2e9,
    engine_graph_request_bytes=3e6,
    engine_workspace_bytes=2.6e9,
)
TINY = ("model=qwen3_0_6b", "parallel.max_tokens_per_micro_batch=9216")
FEWER_GRAPHS = (*TINY, f"+{MAIN}.sglang.cuda_graph_max_bs_decode=64")
RUNS = {"large": COLOCATED, "small": (*COLOCATED, *FEWER_GRAPHS), "apart": (*APART, *TINY)}
SEEN = (
    ("context", "trainer"),
    ("train", "trainer"),
    ("update", "trainer"),
    ("logprobs", "trainer"),
    ("init", "trainer"),
    ("rollout", "engine"),
    ("train", "engine"),
    ("rollout", "trainer"),
)


def measure(name, constants=TRUE, factor=1.0):
    inputs = inputs_of(*RUNS[name])
    asked = [MemoryObservation(phase, owner, 1.0) for phase, owner in SEEN]
    found = predict_memory(inputs, constants, asked)
    observed = tuple(
        dataclasses.replace(one, num_bytes=value * factor) for one, value in zip(asked, found, strict=True)
    )
    return MemoryMeasurement(name, inputs, observed)


def test_known_constants_are_found_again_and_hold_for_a_run_that_was_left_out():
    found = fit_memory([measure("large"), measure("small")], CONSTANTS)
    assert {"trainer_workspace_bytes", "engine_workspace_bytes", "activation_overhead_fraction"} <= {*found.fitted}
    assert "headroom_fraction" not in found.fitted
    assert "logprob_chunk_bytes" not in found.fitted  # nothing is cut here
    assert found.constants.cuda_context_bytes == pytest.approx(4.4e8, rel=0.02)
    assert found.constants.trainer_workspace_bytes == pytest.approx(1.2e9, rel=0.02)
    assert found.constants.engine_workspace_bytes == pytest.approx(2.6e9, rel=0.02)
    other = measure("apart")
    predicted = predict_memory(other.inputs, found.constants, other.observed)
    for one, value in zip(other.observed, predicted, strict=True):
        assert value == pytest.approx(one.num_bytes, rel=0.05), one
    assert max(abs(one.after / one.measured - 1) for one in found.residuals) < 0.02
    assert max(abs(one.before / one.measured - 1) for one in found.residuals) > 0.5


def test_what_the_model_cannot_say_is_left_in_the_residuals():
    found = fit_memory([measure("large"), measure("small", factor=1.5)], CONSTANTS)
    assert max(abs(one.after / one.measured - 1) for one in found.residuals) > 0.1


def test_both_are_the_sum_and_what_is_not_there_is_refused():
    inputs = inputs_of(*COLOCATED)
    asked = [MemoryObservation("train", owner, 1.0) for owner in ("trainer", "engine", "both")]
    trainer, engine, both = predict_memory(inputs, CONSTANTS, asked)
    assert trainer + engine == both
    graphs = compute_memory(inputs, CONSTANTS).roles[0].parts["rollout"]["engine.cuda_graphs"]
    assert engine == CONSTANTS.cuda_context_bytes + CONSTANTS.engine_workspace_bytes + graphs
    with pytest.raises(ValueError, match="no GPU of the run holds both"):
        predict_memory(inputs_of(*APART), CONSTANTS, asked[2:])


def test_nothing_measured_fits_nothing():
    found = fit_memory([], CONSTANTS)
    assert (found.constants, found.fitted, found.residuals) == (CONSTANTS, (), ())
