"""Constants come back from what a model with known ones would measure; what runs do not tell is kept."""

from __future__ import annotations

import dataclasses

import pytest
from step_recipes import APART, COLOCATED, CONSTANTS, MAIN, inputs_of, with_constants

from rlrecipes.plan.fitting import METRICS, Lengths, Measurement, fit, fit_lengths
from rlrecipes.plan.lengths import LengthDistribution, draw_lengths
from rlrecipes.plan.rollout_time import compute_distribution
from rlrecipes.plan.step_time import compute_step_time

TRUE = with_constants(
    response_median_fraction=0.3,
    response_sigma=0.6,
    prompt_fraction=0.4,
    decode_bandwidth_fraction=0.62,
    decode_step_s=2.6e-3,
    decode_request_s=1.5e-5,
    train_flops_fraction=0.4,
    layer_launch_s=3.5e-3,
    checksum_bytes_per_s=7e8,
    sync_bucket_s=0.05,
    disk_bytes_per_s=6e8,
)
RUNS = {
    "wide": (*COLOCATED, "algo.kl.placement=loss", "algo.kl.coef=0.1"),
    "narrow": (*APART, "schedule.prompts_per_step=32", "parallel.max_tokens_per_micro_batch=9216"),
    "split": (*COLOCATED, f"{MAIN}.gpus_per_engine=4", "weight_sync.bucket_bytes=50000000", "model=qwen3_0_6b"),
    "large": (*COLOCATED, "model=qwen3_32b", f"{MAIN}.gpus_per_engine=4", "weight_sync.verify_interval=4"),
}


def measure(name, overrides, constants=TRUE):
    inputs = inputs_of(*overrides)
    step = compute_step_time(inputs, constants).model_dump()
    distribution = compute_distribution(inputs, constants)
    lengths = draw_lengths(distribution, inputs.num_samples, inputs.seed)
    cut = sum(tokens == inputs.max_new_tokens for tokens in lengths) / len(lengths)
    found = Lengths(distribution.prompt_tokens, sum(lengths) / len(lengths), max(lengths), cut, len(lengths))
    observed = {name: step[name] for name in METRICS if step[name] > 0}
    return Measurement(name, inputs, observed, found, inputs.max_new_tokens, inputs.max_prompt_tokens)


def test_known_constants_come_back():
    found = fit([measure(name, overrides) for name, overrides in RUNS.items()], CONSTANTS)
    assert {"decode_bandwidth_fraction", "decode_step_s", "train_flops_fraction", "layer_launch_s"} <= set(found.fitted)
    assert {"checksum_bytes_per_s", "sync_bucket_s", "disk_bytes_per_s"} <= set(found.fitted)
    for name in found.fitted:
        assert getattr(found.constants, name) == pytest.approx(getattr(TRUE, name), rel=0.05), name
    for residual in found.residuals:
        assert residual.after == pytest.approx(residual.measured, rel=0.02)
    assert any(abs(residual.before / residual.measured - 1) > 0.2 for residual in found.residuals)


def test_one_run_tells_of_fewer_constants_and_the_others_are_kept():
    found = fit([measure("wide", RUNS["wide"])], CONSTANTS)
    assert "sync_bucket_s" in found.kept
    assert found.constants.sync_bucket_s == CONSTANTS.sync_bucket_s
    assert set(found.fitted).isdisjoint(found.kept)
    for residual in found.residuals:
        assert residual.after == pytest.approx(residual.measured, rel=0.02)


def test_noise_is_averaged_over_runs():
    measurements = []
    for position, (name, overrides) in enumerate(RUNS.items()):
        exact = measure(name, overrides)
        noisy = {key: value * (1.02 if (position + len(key)) % 2 else 0.98) for key, value in exact.observed.items()}
        measurements.append(dataclasses.replace(exact, observed=noisy))
    found = fit(measurements, CONSTANTS)
    assert found.constants.train_flops_fraction == pytest.approx(TRUE.train_flops_fraction, rel=0.1)
    assert all(residual.after == pytest.approx(residual.measured, rel=0.05) for residual in found.residuals)


def test_a_run_without_gpus_tells_of_lengths_alone():
    run = dataclasses.replace(measure("wide", RUNS["wide"]), inputs=None)
    found = fit([run], CONSTANTS)
    assert set(found.fitted) == {"response_median_fraction", "response_sigma", "prompt_fraction"}
    assert found.constants.response_sigma == pytest.approx(TRUE.response_sigma, rel=0.05)
    assert found.residuals == ()
    assert "no run measured" in found.kept["train_flops_fraction"]


def test_a_run_without_anything_tells_of_nothing():
    run = dataclasses.replace(measure("wide", RUNS["wide"]), inputs=None, lengths=None)
    assert fit([run], CONSTANTS).fitted == ()


@pytest.mark.parametrize("median", [300, 1500, 3500])
@pytest.mark.parametrize("sigma", [0.2, 0.6, 1.0])
def test_lengths_come_back_from_mean_and_cut_or_longest_answers(median, sigma):
    true = LengthDistribution(median, sigma, 4096, 100)
    lengths = draw_lengths(true, 512, 0)
    cut = sum(tokens == 4096 for tokens in lengths) / 512
    found = fit_lengths(Lengths(100, sum(lengths) / 512, max(lengths), cut, 512), 4096)
    assert found.median_tokens == pytest.approx(median, rel=0.05)
    assert found.sigma == pytest.approx(sigma, rel=0.05)
    assert found.prompt_tokens == 100


def test_fractions_end_at_one():
    fast = measure("wide", RUNS["wide"], with_constants(train_flops_fraction=1.0, attention_flops_fraction=1.0))
    faster = dataclasses.replace(fast, observed={"train_s": fast.observed["train_s"] / 4})
    assert fit([faster], CONSTANTS).constants.train_flops_fraction == 1.0
