import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrecipes.algos.agreement import (
    NUM_BINS,
    check_logprob_agreement,
    compute_effective_sample_fraction,
    compute_log_ratio_counts,
    compute_off_policy_summary,
    compute_ratio_quantiles,
)
from rlrecipes.errors import ContractError, TrainerError

LOG_RATIO = st.one_of(st.floats(-20, 20), st.floats(-1e-3, 1e-3), st.sampled_from([0.0, 20.0, -20.0]))
ALL = (1e-9, 0.01, 0.25, 0.5, 0.75, 0.99, 1.0)


def count(values, mask=None):
    log_ratios = torch.tensor(values, dtype=torch.float64)
    mask = torch.ones(len(values), dtype=torch.bool) if mask is None else torch.tensor(mask)
    return compute_log_ratio_counts(log_ratios=log_ratios, loss_mask=mask)


@settings(max_examples=100, deadline=None)
@given(values=st.lists(LOG_RATIO, min_size=1, max_size=40))
def test_quantiles_are_those_of_the_sorted_values(values):
    found = compute_ratio_quantiles(counts=count(values), levels=ALL)
    ordered = sorted(values)
    for level, quantile in zip(ALL, found, strict=True):
        expected = ordered[max(math.ceil(level * len(values)) - 1, 0)]
        assert math.log(quantile) == pytest.approx(expected, rel=0.03, abs=5e-6)


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.tuples(LOG_RATIO, st.booleans()), min_size=2, max_size=20), data=st.data())
def test_counts_of_any_split_add_up_exactly_and_hold_no_masked_token(values, data):
    numbers, mask = (list(column) for column in zip(*values, strict=True))
    cut = data.draw(st.integers(1, len(values) - 1))
    poisoned = [number if is_trained else math.nan for number, is_trained in values]
    parts = count(poisoned[:cut], mask[:cut]) + count(poisoned[cut:], mask[cut:])
    assert torch.equal(parts, count(numbers, mask))
    assert parts.sum() == sum(mask) and len(parts) == NUM_BINS == 512


def test_levels_of_many_tokens_are_not_rounded():
    counts = torch.zeros(NUM_BINS, dtype=torch.float64)
    counts[NUM_BINS // 2] = counts[-1] = 2**24 + 3  # of which float32 makes 2**24 + 4
    (median,) = compute_ratio_quantiles(counts=counts, levels=[0.5])
    assert median == pytest.approx(1.0, abs=1e-5)


def test_nothing_counted_is_a_ratio_of_one():
    assert compute_ratio_quantiles(counts=torch.zeros(NUM_BINS), levels=(0.5, 0.9)) == [1.0, 1.0]


def test_counts_refuse_a_mask_of_another_length():
    with pytest.raises(ContractError, match="shapes differ"):
        compute_log_ratio_counts(log_ratios=torch.zeros(2), loss_mask=torch.ones(1, dtype=torch.bool))


@pytest.mark.parametrize(
    ("weights", "expected"), [([1, 1, 1], 1.0), ([2, 2], 1.0), ([1, 0, 0, 0], 0.25), ([0, 0], 0.0), ([3, 1], 16 / 20)]
)
def test_effective_fraction(weights, expected):
    moments = [sum(weight**power for weight in weights) / len(weights) for power in (1, 2)]
    got = compute_effective_sample_fraction(weight_mean=moments[0], weight_square_mean=moments[1])
    assert got == pytest.approx(expected)


def test_summary_names_what_it_read():
    counts = count([math.log(0.5)] * 5 + [0.0] * 90 + [math.log(2.0)] * 5)
    found = compute_off_policy_summary(counts=counts, weight_mean=2.0, weight_square_mean=8.0)
    assert found == pytest.approx(
        {
            "off_policy_ratio_p01": 0.5,
            "off_policy_ratio_p50": 1.0,
            "off_policy_ratio_p99": 2.0,
            "off_policy_effective_fraction": 0.5,
        },
        rel=0.03,
    )


def gate(mean, largest):
    check_logprob_agreement(
        {"rollout_logprob_abs_diff_mean": mean, "rollout_logprob_abs_diff_max": largest},
        logprob_diff_mean_limit=0.01,
        logprob_diff_max_limit=1.0,
    )


def test_the_gate_lets_agreement_pass():
    gate(0.01, 1.0)


@pytest.mark.parametrize(
    ("mean", "largest", "message"),
    [
        (0.02, 0.5, "mean 0.02 nats, limit 0.01"),
        (0.001, 1.5, "max 1.5 nats, limit 1"),
        (0.5, 9.0, "mean 0.5 nats, limit 0.01, max 9 nats, limit 1"),
        (math.nan, 0.5, "mean nan nats, limit 0.01"),
        (math.nan, math.nan, "mean nan nats, limit 0.01, max nan nats, limit 1"),
    ],
)
def test_the_gate_stops_disagreement_and_what_is_no_number(mean, largest, message):
    with pytest.raises(TrainerError) as caught:
        gate(mean, largest)
    (problem,) = caught.value.problems
    assert problem.where == "train.rollout_logprob_abs_diff"
    opening = "trainer and engine disagree about the log probability of trained tokens: "
    assert problem.problem == opening + message
    assert problem.fix == (
        "compare weights (weight_sync/is_verified), precision and sampling fields (temperature, top_p, top_k) of "
        "trainer and engine; raise the limits only if the difference is their precision"
    )
