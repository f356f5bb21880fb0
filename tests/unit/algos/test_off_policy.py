import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrecipes.algos.off_policy import (
    compute_off_policy_log_ratios,
    compute_off_policy_weights,
    compute_opsm_mask,
    compute_staleness_weights,
)
from rlrecipes.errors import ContractError

CORRECTIONS = [
    "none",
    "token_tis",
    "sequence_tis",
    "token_mis",
    "sequence_mis",
    "geometric_mis",
    "icepop",
    "decoupled",
]
# Steps of 1/64 put no ratio on a bound.
LOGPROB = st.integers(-192, 0).map(lambda steps: steps / 64)
TOKEN = st.tuples(LOGPROB, LOGPROB, st.booleans())
SAMPLES = st.lists(st.lists(TOKEN, min_size=1, max_size=5), min_size=1, max_size=4)
LOW, HIGH = 0.3, 2.2


def to_tensors(samples, poison=0.0):
    rows = [(index, *token) for index, sample in enumerate(samples) for token in sample]
    sample_index, old, rollout, mask = (torch.tensor(column) for column in zip(*rows, strict=True))
    return {
        "old_logprobs": torch.where(mask, old.double(), poison),
        "rollout_logprobs": torch.where(mask, rollout.double(), poison),
        "loss_mask": mask,
        "sample_index": sample_index,
    }


def slow_weights(sample, correction, veto):
    """Weights of one sample's tokens, None where masked."""
    differences = [old - rollout for old, rollout, is_trained in sample if is_trained]
    weights = []
    for old, rollout, is_trained in sample:
        if not is_trained:
            weights.append(None)
            continue
        log_ratio = old - rollout
        if correction.startswith("sequence"):
            log_ratio = math.fsum(differences)
        if correction.startswith("geometric"):
            log_ratio = math.fsum(differences) / len(differences)
        ratio = math.exp(min(max(log_ratio, -20), 20))
        if correction == "none":
            weight = 1.0
        elif correction == "decoupled":
            weight = min(ratio, HIGH)
        elif correction.endswith("tis"):
            weight = min(max(ratio, LOW), HIGH)
        else:
            weight = ratio if LOW <= ratio <= HIGH else 0.0
        is_vetoed = veto is not None and any(math.exp(each) < veto for each in differences)
        weights.append(0.0 if is_vetoed else weight)
    return weights


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("poison", [math.nan, 1e9])
@settings(max_examples=40, deadline=None)
@given(samples=SAMPLES, veto=st.sampled_from([None, 0.21]))
def test_equals_a_loop_over_sequences(correction, poison, samples, veto):
    tensors = to_tensors(samples, poison)
    weights, is_changed, log_ratios = compute_off_policy_weights(
        **tensors, correction=correction, low=LOW, high=HIGH, veto=veto
    )
    expected = [weight for sample in samples for weight in slow_weights(sample, correction, veto)]
    torch.testing.assert_close(
        weights, torch.tensor([1.0 if weight is None else weight for weight in expected], dtype=torch.float64)
    )
    ratios = torch.ones_like(weights) if correction == "none" else log_ratios.exp()
    assert is_changed.tolist() == [
        weight is not None and not math.isclose(weight, ratio, rel_tol=1e-9)
        for weight, ratio in zip(expected, ratios.tolist(), strict=True)
    ]
    assert not log_ratios[~tensors["loss_mask"]].any()


@pytest.mark.parametrize("correction", CORRECTIONS)
@settings(max_examples=20, deadline=None)
@given(samples=SAMPLES, data=st.data())
def test_a_sample_has_its_weights_whatever_it_is_packed_with(correction, samples, data):
    """So the split of a train step, the order of its samples and the fan-out of a rollout change no weight."""
    options = {"correction": correction, "low": LOW, "high": HIGH, "veto": 0.21}
    alone = [compute_off_policy_weights(**to_tensors([sample]), **options)[0] for sample in samples]
    order = data.draw(st.permutations(range(len(samples))))
    together = compute_off_policy_weights(**to_tensors([samples[index] for index in order]), **options)[0]
    torch.testing.assert_close(together, torch.cat([alone[index] for index in order]))


def test_truncated_weights_make_the_expectation_that_of_the_trainer():
    """Drawn from the engine's distribution and weighted, any function has the trainer's expectation."""
    old, rollout = (torch.tensor(x, dtype=torch.float64).log_softmax(0) for x in ([0.3, -0.7, 1.1], [1.0, 0.2, -0.4]))
    weights, _, _ = compute_off_policy_weights(
        old_logprobs=old,
        rollout_logprobs=rollout,
        loss_mask=torch.ones(3, dtype=torch.bool),
        sample_index=None,
        correction="token_tis",
        low=0.0,
        high=100.0,
        veto=None,
    )
    values = torch.tensor([2.0, -1.0, 5.0], dtype=torch.float64)
    torch.testing.assert_close((rollout.exp() * weights * values).sum(), (old.exp() * values).sum())


def test_no_weight_has_a_gradient():
    leaf = torch.tensor([-1.0, -2.0], requires_grad=True)
    for found in compute_off_policy_weights(
        old_logprobs=leaf,
        rollout_logprobs=torch.tensor([-1.5, -1.5]),
        loss_mask=torch.ones(2, dtype=torch.bool),
        sample_index=torch.zeros(2, dtype=torch.int64),
        correction="sequence_tis",
        low=LOW,
        high=HIGH,
        veto=None,
    ):
        assert not found.requires_grad


@pytest.mark.parametrize(("correction", "expected"), [("token_tis", 1e4), ("sequence_tis", 1e4), ("token_mis", 0.0)])
def test_a_ratio_beyond_any_number_stays_finite(correction, expected):
    weights, is_changed, _ = compute_off_policy_weights(
        old_logprobs=torch.full((2,), -1.0),
        rollout_logprobs=torch.full((2,), -1000.0),
        loss_mask=torch.ones(2, dtype=torch.bool),
        sample_index=torch.zeros(2, dtype=torch.int64),
        correction=correction,
        low=LOW,
        high=1e4,
        veto=None,
    )
    assert weights.tolist() == [expected] * 2 and is_changed.all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"correction": "tis"}, "unknown correction 'tis'"),
        ({"correction": "sequence_tis"}, "a sequence ratio needs"),
        ({"correction": "geometric_mis"}, "a geometric ratio needs"),
        ({"correction": "token_mis", "veto": 0.1}, "a veto needs"),
        ({"correction": "token_mis", "rollout_logprobs": torch.zeros(1)}, "shapes differ"),
    ],
)
def test_what_is_unknown_or_missing_is_refused(options, message):
    inputs = {"old_logprobs": torch.zeros(2), "rollout_logprobs": torch.zeros(2), "sample_index": None}
    inputs |= {"low": LOW, "high": HIGH, "veto": None}
    with pytest.raises(ContractError, match=message):
        compute_off_policy_weights(**inputs | {"loss_mask": torch.ones(2, dtype=torch.bool)} | options)


def test_levels_are_those_of_the_definition():
    tensors = to_tensors([[(-1.0, -2.0, True), (-1.0, -1.5, True), (0.0, -9.0, False)], [(-1.0, -0.5, True)]])
    found = {
        level: compute_off_policy_log_ratios(**tensors, level=level).tolist()
        for level in ("token", "sequence", "geometric")
    }
    assert found["token"] == [1.0, 0.5, 0.0, -0.5]
    assert found["sequence"] == [1.5, 1.5, 0.0, -0.5]
    assert found["geometric"] == [0.75, 0.75, 0.0, -0.5]


@pytest.mark.parametrize("poison", [math.nan, 1e9])
@settings(max_examples=60, deadline=None)
@given(samples=SAMPLES, signs=st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=20, max_size=20))
def test_opsm_equals_a_loop(poison, samples, signs):
    tensors = to_tensors(samples, poison)
    mask, advantages = tensors["loss_mask"], torch.tensor(signs[: len(tensors["loss_mask"])], dtype=torch.float64)
    is_kept = compute_opsm_mask(
        logprobs=tensors["rollout_logprobs"],
        old_logprobs=tensors["old_logprobs"],
        advantages=torch.where(mask, advantages, poison),
        loss_mask=mask,
        sample_index=tensors["sample_index"],
        delta=0.1,
    )
    expected = []
    for sample in samples:
        moved = [old - current for old, current, is_trained in sample if is_trained]
        is_far = bool(moved) and math.fsum(moved) / len(moved) > 0.1
        expected += [
            not (is_trained and is_far and advantages[len(expected) + place] < 0)
            for place, (_, _, is_trained) in enumerate(sample)
        ]
    assert is_kept.tolist() == expected


@settings(max_examples=30, deadline=None)
@given(ages=st.lists(st.integers(0, 9), min_size=1, max_size=5), power=st.sampled_from([0.0, 0.5, 1.0]))
def test_staleness_equals_a_loop(ages, power):
    got = compute_staleness_weights(staleness=torch.tensor(ages, dtype=torch.float64), power=power)
    assert got.tolist() == pytest.approx([1 / max(age, 1) ** power for age in ages])


def test_what_stands_on_a_bound_is_within_it():
    tensors = to_tensors([[(-1.0, -1.0, True), (-1.0, -1.0, True)]])
    weights, _, _ = compute_off_policy_weights(**tensors, correction="icepop", low=1.0, high=1.0, veto=1.0)
    assert weights.tolist() == [1.0, 1.0]
    is_kept = compute_opsm_mask(
        logprobs=torch.tensor([-1.5, -1.5]),
        old_logprobs=torch.tensor([-1.0, -1.0]),
        advantages=torch.tensor([-1.0, -1.0]),
        loss_mask=torch.tensor([True, True]),
        sample_index=torch.tensor([0, 0]),
        delta=0.5,
    )
    assert is_kept.all()


def test_staleness_refuses_what_would_raise_old_tokens():
    with pytest.raises(ContractError, match="must not be negative"):
        compute_staleness_weights(staleness=torch.ones(1), power=-1.0)
    with pytest.raises(ContractError, match="must be floats"):
        compute_staleness_weights(staleness=torch.ones(1, dtype=torch.int64), power=1.0)


def test_without_a_correction_no_bound_acts():
    given = to_tensors([[(-1.0, -2.0, True), (-3.0, -1.0, True)]])
    for bounds in ({"low": 1.5, "high": 2.0}, {"low": 0.0, "high": 0.5}):
        weights, is_changed, _ = compute_off_policy_weights(**given, **bounds, correction="none", veto=None)
        assert weights.tolist() == [1.0, 1.0] and not is_changed.any()
