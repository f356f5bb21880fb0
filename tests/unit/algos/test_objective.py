import math
import pickle
from functools import partial

import pytest
import torch

from rlrecipes.algos.objective import compute_policy_objective, compute_sft_objective
from rlrecipes.errors import ContractError

OPTIONS = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": 3.0,
    "kl_coef_in_loss": 0.5,
    "kl_estimator": "k3",
    "entropy_coef": 0.1,
}
MASK = torch.tensor([False, True, True, False])
BATCH = {
    "loss_mask": MASK,
    "advantages": torch.tensor([0.0, 1.0, -1.0, 0.0]),
    "old_logprobs": torch.tensor([0.0, -1.4, -1.5, 0.0]),
    "ref_logprobs": torch.tensor([0.0, -1.2, -1.5, 0.0]),
    "rollout_logprobs": torch.tensor([0.0, -1.3, -1.9, 0.0]),
}
LOGPROBS = torch.tensor([0.0, -1.0, -2.0, 0.0])
ENTROPY = torch.tensor([0.0, 2.0, 3.0, 0.0])


def run(batch=BATCH, logprobs=LOGPROBS, entropy=ENTROPY, objective=compute_policy_objective, **options):
    """Loss, gradients to logprobs and entropy, metrics."""
    logprobs = logprobs.clone().requires_grad_()
    entropy = None if entropy is None else entropy.clone().requires_grad_()
    loss, metrics = objective(batch, logprobs, entropy, **options)
    loss.sum().backward()
    return loss.detach(), logprobs.grad, None if entropy is None else entropy.grad, metrics


def test_terms_add_up_in_value_and_gradient():
    loss, gradient, entropy_gradient, metrics = run(**OPTIONS)
    # Token 1: ratio e^0.4 clipped at 1.28, d = 0.2. Token 2: ratio e^-0.5 clipped at 0.8, d = -0.5.
    kl = [math.exp(-0.2) - 1 + 0.2, math.exp(0.5) - 1 - 0.5]
    torch.testing.assert_close(
        loss[MASK], torch.tensor([-1.28 + 0.5 * kl[0] - 0.2, 0.8 + 0.5 * kl[1] - 0.3]), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(gradient, 0.5 * torch.tensor([0.0, 1 - math.exp(-0.2), 1 - math.exp(0.5), 0.0]))
    torch.testing.assert_close(entropy_gradient, torch.tensor([0.0, -0.1, -0.1, 0.0]))
    expected = {
        "policy_loss": [-1.28, 0.8],
        "ratio_mean": [math.exp(0.4), math.exp(-0.5)],
        "ratio_max": [math.exp(0.4), math.exp(-0.5)],
        "clip_fraction": [1.0, 1.0],
        "approx_kl": [math.exp(0.4) - 1 - 0.4, math.exp(-0.5) - 1 + 0.5],
        "ref_kl": kl,
        "entropy": [2.0, 3.0],
        "rollout_logprob_abs_diff_mean": [0.3, 0.1],
        "rollout_logprob_abs_diff_max": [0.3, 0.1],
        "mismatch_kl_k1": [0.1, -0.4],
        "mismatch_kl_k3": [math.exp(-0.1) - 1 + 0.1, math.exp(0.4) - 1 - 0.4],
        "off_policy_weight_mean": [1.0, 1.0],
        "off_policy_weight_square_mean": [1.0, 1.0],
        "off_policy_clip_fraction": [0.0, 0.0],
    }
    assert metrics.pop("off_policy_log_ratio_counts").sum() == 2
    assert metrics.keys() == expected.keys()
    for name, values in expected.items():
        assert not metrics[name].requires_grad
        torch.testing.assert_close(metrics[name][MASK], torch.tensor(values), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("poison", [math.nan, 1e9, -1e9, math.inf])
@pytest.mark.parametrize("objective", [partial(compute_policy_objective, **OPTIONS), compute_sft_objective])
def test_what_stands_in_masked_slots_changes_nothing(poison, objective):
    clean = run(objective=objective)
    poisoned_batch = {
        name: tensor if name == "loss_mask" else torch.where(MASK, tensor, poison) for name, tensor in BATCH.items()
    }
    poisoned = run(poisoned_batch, torch.where(MASK, LOGPROBS, poison), torch.where(MASK, ENTROPY, poison), objective)
    for got, expected in zip(poisoned[:3], clean[:3], strict=True):
        assert (got is None) == (expected is None)
        assert got is None or torch.equal(got, expected)
    assert all(torch.equal(poisoned[3][name], metric) for name, metric in clean[3].items())
    assert not clean[1][~MASK].any()


def test_weights_of_zero_leave_terms_to_the_metrics():
    options = OPTIONS | {"kl_coef_in_loss": 0.0, "entropy_coef": 0.0, "kl_estimator": "k1"}
    loss, gradient, entropy_gradient, metrics = run(**options)
    torch.testing.assert_close(loss[MASK], torch.tensor([-1.28, 0.8]))
    assert not gradient.any() and entropy_gradient is None
    torch.testing.assert_close(metrics["ref_kl"][MASK], torch.tensor([0.2, -0.5]))


def test_only_what_is_given_is_reported():
    batch = {name: BATCH[name] for name in ("loss_mask", "advantages", "old_logprobs")}
    _, _, _, metrics = run(batch, entropy=None, **OPTIONS | {"kl_coef_in_loss": 0.0, "entropy_coef": 0.0})
    assert set(metrics) == {"policy_loss", "ratio_mean", "ratio_max", "clip_fraction", "approx_kl"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": {name: BATCH[name] for name in BATCH if name != "ref_logprobs"}}, "there is no ref_kl"),
        ({"kl_estimator": "k1"}, "no gradient in expectation"),
        ({"entropy": None}, "there is no entropy"),
        ({"logprobs": LOGPROBS[1:]}, "shapes differ"),
    ],
)
def test_a_weighted_term_without_its_input_is_refused(change, message):
    with pytest.raises(ContractError, match=message):
        run(**OPTIONS | change)


def test_objectives_pickle_with_their_options():
    objective = pickle.loads(pickle.dumps(partial(compute_policy_objective, **OPTIONS)))
    torch.testing.assert_close(run(objective=objective)[0], run(**OPTIONS)[0])


def test_sft_objective_is_the_negative_logprob_of_trained_tokens():
    loss, gradient, _, metrics = run(objective=compute_sft_objective)
    torch.testing.assert_close(loss, torch.tensor([0.0, 1.0, 2.0, 0.0]))
    assert gradient.tolist() == [0.0, -1.0, -1.0, 0.0]
    assert set(metrics) == {"entropy"}
    assert run(entropy=None, objective=compute_sft_objective)[3] == {}


def test_a_monitored_kl_cannot_spoil_the_loss():
    far = BATCH | {"ref_logprobs": torch.tensor([0.0, 500.0, 500.0, 0.0])}
    loss, gradient, _, metrics = run(far, **OPTIONS | {"kl_coef_in_loss": 0.0})
    assert metrics["ref_kl"].isinf().any()
    assert loss.isfinite().all() and gradient.isfinite().all()


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_the_same():
    logprobs = torch.tensor([-0.5, -1.5, -2.0], requires_grad=True)
    batch = {"loss_mask": torch.tensor([True, True, False]), "advantages": torch.tensor([1.0, -2.0, 3.0])}
    given = batch | {"old_logprobs": logprobs.detach().clone()}
    results = []
    for each in (batch, given):
        loss, metrics = compute_policy_objective(
            each, logprobs, None, **(OPTIONS | {"kl_coef_in_loss": 0.0, "entropy_coef": 0.0})
        )
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        results.append((loss.tolist(), gradient.tolist(), metrics["ratio_max"].tolist()))
    assert results[0] == results[1]
    assert results[0][1] == [-1.0, 2.0, 0.0]
    assert results[0][2] == [1.0, 1.0, 1.0]
