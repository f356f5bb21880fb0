import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrecipes.algos.kl import compute_kl, compute_kl_loss, compute_kl_penalized_rewards
from rlrecipes.errors import ContractError

LOGITS = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
REF_LOGPROBS = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64).log_softmax(0)


OLD_LOGPROBS = torch.tensor([-0.2, 0.5, 0.1], dtype=torch.float64).log_softmax(0)


def expected_value_and_gradient(estimator, old_logprobs=None, logits=LOGITS):
    """Over tokens drawn from a three-way softmax: E[estimate], and E[gradient of the estimate] to the logits."""
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    estimates = compute_kl(logprobs=logprobs, ref_logprobs=REF_LOGPROBS, estimator=estimator, old_logprobs=old_logprobs)
    drawn = (logprobs.detach() if old_logprobs is None else old_logprobs).exp()
    (drawn * estimates).sum().backward()
    return float((drawn * estimates.detach()).sum()), logits.grad


def gradient_of(function):
    logits = LOGITS.clone().requires_grad_()
    function(logits.log_softmax(0)).backward()
    return logits.grad


def reverse_kl(logprobs):
    return (logprobs.exp() * (logprobs - REF_LOGPROBS)).sum()


def forward_kl(logprobs):
    return (REF_LOGPROBS.exp() * (REF_LOGPROBS - logprobs)).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_clamped", "k1_straight_through"])
def test_k1_and_k3_are_unbiased(estimator):
    value, _ = expected_value_and_gradient(estimator)
    assert value == pytest.approx(float(reverse_kl(LOGITS.log_softmax(0))), rel=1e-12)


def test_expected_gradients_are_the_documented_ones():
    torch.testing.assert_close(expected_value_and_gradient("k1")[1], torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(expected_value_and_gradient("k2")[1], gradient_of(reverse_kl))
    torch.testing.assert_close(expected_value_and_gradient("k3")[1], gradient_of(forward_kl))
    torch.testing.assert_close(expected_value_and_gradient("k3_clamped")[1], gradient_of(forward_kl))
    torch.testing.assert_close(expected_value_and_gradient("k1_straight_through")[1], gradient_of(reverse_kl))


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_clamped"])
@pytest.mark.parametrize("is_first_train_step", [True, False])
def test_weighted_estimates_have_value_and_gradient_of_the_reverse_kl(estimator, is_first_train_step):
    old_logprobs = LOGITS.log_softmax(0) if is_first_train_step else OLD_LOGPROBS
    value, gradient = expected_value_and_gradient(estimator, old_logprobs)
    assert value == pytest.approx(float(reverse_kl(LOGITS.log_softmax(0))), rel=1e-12)
    torch.testing.assert_close(gradient, gradient_of(reverse_kl))


def test_weighted_k2_has_the_gradient_of_its_own_expectation():
    got = expected_value_and_gradient("k2", OLD_LOGPROBS)[1]
    torch.testing.assert_close(got, gradient_of(lambda now: (now.exp() * (now - REF_LOGPROBS).square() / 2).sum()))


def slow_kl(logprob, ref_logprob, old_logprob, estimator):
    """Value and closed-form gradient of one token."""
    d = logprob - ref_logprob
    value, slope = {
        "k1": (d, 1.0),
        "k2": (d * d / 2, d),
        "k3": (math.exp(-d) - 1 + d, 1 - math.exp(-d)),
        "k3_clamped": (math.exp(-d) - 1 + d, 1 - math.exp(-d)),
        "k1_straight_through": (d, d),
    }[estimator]
    if old_logprob is not None:
        weight = math.exp(logprob - old_logprob)
        value, slope = weight * value, weight * (value + slope)
    return (10.0, 0.0) if estimator == "k3_clamped" and value > 10 else (value, slope)


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.tuples(*[st.floats(-6, 0)] * 3), min_size=1, max_size=6),
    estimator=st.sampled_from(["k1", "k2", "k3", "k3_clamped", "k1_straight_through"]),
    is_weighted=st.booleans(),
)
def test_value_and_gradient_equal_a_loop(tokens, estimator, is_weighted):
    is_weighted = is_weighted and estimator != "k1_straight_through"
    logprobs, ref_logprobs, old_logprobs = torch.tensor(tokens, dtype=torch.float64).unbind(1)
    logprobs = logprobs.clone().requires_grad_()
    got = compute_kl(
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        estimator=estimator,
        old_logprobs=old_logprobs if is_weighted else None,
    )
    got.sum().backward()
    slow = [slow_kl(a, b, c if is_weighted else None, estimator) for a, b, c in tokens]
    expected, gradient = torch.tensor(slow, dtype=torch.float64).unbind(1)
    torch.testing.assert_close(got.detach(), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(logprobs.grad, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("ref_logprob", [-1.0, -1e4, 1e4])
@pytest.mark.parametrize("old_logprob", [None, 1e4, -1e4])
def test_the_clamp_holds_value_and_gradient_finite(ref_logprob, old_logprob):
    logprobs = torch.tensor([-200.0], requires_grad=True)
    got = compute_kl(
        logprobs=logprobs,
        ref_logprobs=torch.tensor([ref_logprob]),
        estimator="k3_clamped",
        old_logprobs=None if old_logprob is None else torch.tensor([old_logprob]),
    )
    got.sum().backward()
    assert 0.0 <= float(got.detach()) <= 10.0
    assert math.isfinite(float(logprobs.grad))


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 50.0), ("k2", 1250.0), ("k1_straight_through", 50.0)])
def test_only_the_clamped_estimator_bounds_differences(estimator, expected):
    pair = {"logprobs": torch.tensor([-1.0]), "ref_logprobs": torch.tensor([-51.0])}
    assert compute_kl(**pair, estimator=estimator).tolist() == [expected]


def test_gradients_reach_the_current_policy_alone():
    leaves = [torch.tensor([value], requires_grad=True) for value in (-1.0, -1.5, -1.2)]
    compute_kl(logprobs=leaves[0], ref_logprobs=leaves[1], estimator="k3", old_logprobs=leaves[2]).sum().backward()
    assert leaves[0].grad is not None and leaves[1].grad is None and leaves[2].grad is None


def test_k1_is_no_loss_unless_weighted_or_straight_through():
    pair = {"logprobs": torch.tensor([-1.0]), "ref_logprobs": torch.tensor([-2.0])}
    with pytest.raises(ContractError, match="no gradient in expectation"):
        compute_kl_loss(**pair, estimator="k1")
    assert compute_kl_loss(**pair, estimator="k1", old_logprobs=torch.tensor([-1.0])).tolist() == [1.0]
    assert compute_kl_loss(**pair, estimator="k1_straight_through").tolist() == [1.0]
    assert compute_kl_loss(**pair, estimator="k2").tolist() == [0.5]


def test_the_straight_through_form_is_not_weighted():
    row = torch.tensor([-1.0])
    with pytest.raises(ContractError, match="weighted: True"):
        compute_kl_loss(logprobs=row, ref_logprobs=row, estimator="k1_straight_through", old_logprobs=row)


def test_k3_keeps_its_digits_in_float32():
    logprobs = torch.tensor([-1.0]) + torch.tensor([2.0**-14])
    got = compute_kl(logprobs=logprobs, ref_logprobs=torch.tensor([-1.0]), estimator="k3")
    assert float(got) == pytest.approx(2.0**-29, rel=0.05)


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_clamped", "k1_straight_through"])
def test_losses_pull_towards_the_reference(estimator):
    logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
    compute_kl(logprobs=logprobs, ref_logprobs=torch.tensor([-2.0, -2.0]), estimator=estimator).sum().backward()
    assert logprobs.grad[0] > 0 > logprobs.grad[1]


def test_unknown_estimator_and_other_shapes_are_refused():
    with pytest.raises(ContractError, match="unknown estimator 'k4'"):
        compute_kl(logprobs=torch.zeros(2), ref_logprobs=torch.zeros(2), estimator="k4")
    with pytest.raises(ContractError, match=r"logprobs=\[2\], ref_logprobs=\[1\]"):
        compute_kl(logprobs=torch.zeros(2), ref_logprobs=torch.zeros(1), estimator="k1")


def test_penalty_sums_trained_tokens_over_all_samples_of_a_rollout():
    got = compute_kl_penalized_rewards(
        rewards=torch.tensor([1.0, 0.0]),
        token_kls=[torch.tensor([math.nan, 0.2, 0.3]), torch.tensor([1e9, 1.0]), torch.tensor([math.nan, 0.5])],
        loss_masks=[torch.tensor([False, True, True]), torch.tensor([False, True]), torch.tensor([False, True])],
        rollout_indices=[0, 1, 0],
        kl_coef=0.1,
    )
    torch.testing.assert_close(got, torch.tensor([0.9, -0.1]))


def test_penalties_are_summed_in_float64():
    got = compute_kl_penalized_rewards(
        rewards=torch.zeros(1),
        token_kls=[torch.tensor([2.0**24]), torch.tensor([1.0]), torch.tensor([-(2.0**24)])],
        loss_masks=[torch.ones(1, dtype=torch.bool)] * 3,
        rollout_indices=[0, 0, 0],
        kl_coef=1.0,
    )
    assert got.tolist() == [-1.0]


def test_penalty_needs_an_index_for_every_sample():
    with pytest.raises(ValueError, match="zip"):
        compute_kl_penalized_rewards(
            rewards=torch.zeros(1),
            token_kls=[torch.zeros(1)],
            loss_masks=[torch.ones(1) > 0],
            rollout_indices=[],
            kl_coef=1,
        )


def test_penalty_refuses_a_mask_of_another_length():
    with pytest.raises(ContractError, match="shapes differ"):
        compute_kl_penalized_rewards(
            rewards=torch.zeros(1),
            token_kls=[torch.zeros(3)],
            loss_masks=[torch.ones(2, dtype=torch.bool)],
            rollout_indices=[0],
            kl_coef=0.1,
        )
