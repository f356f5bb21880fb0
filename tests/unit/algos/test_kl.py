import math

import pytest
import torch

from rlrecipes.algos.kl import compute_kl, compute_kl_penalized_rewards
from rlrecipes.errors import ContractError

LOGITS = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
REF_LOGPROBS = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64).log_softmax(0)


def expected_value_and_gradient(estimator):
    """Over tokens drawn from a three-way softmax: E[estimate], and E[gradient of the estimate] to the logits."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    estimates = compute_kl(logprobs=logprobs, ref_logprobs=REF_LOGPROBS, estimator=estimator)
    drawn = logprobs.detach().exp()
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


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator):
    value, _ = expected_value_and_gradient(estimator)
    assert value == pytest.approx(float(reverse_kl(LOGITS.log_softmax(0))), rel=1e-12)


def test_expected_gradients_are_the_documented_ones():
    torch.testing.assert_close(expected_value_and_gradient("k1")[1], torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(expected_value_and_gradient("k2")[1], gradient_of(reverse_kl))
    torch.testing.assert_close(expected_value_and_gradient("k3")[1], gradient_of(forward_kl))


def test_k3_keeps_its_digits_in_float32():
    logprobs = torch.tensor([-1.0]) + torch.tensor([2.0**-14])
    got = compute_kl(logprobs=logprobs, ref_logprobs=torch.tensor([-1.0]), estimator="k3")
    assert float(got) == pytest.approx(2.0**-29, rel=0.05)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
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


def test_penalty_refuses_a_mask_of_another_length():
    with pytest.raises(ContractError, match="shapes differ"):
        compute_kl_penalized_rewards(
            rewards=torch.zeros(1),
            token_kls=[torch.zeros(3)],
            loss_masks=[torch.ones(2, dtype=torch.bool)],
            rollout_indices=[0],
            kl_coef=0.1,
        )
