import math
import pickle
from functools import partial

import pytest
import torch

from rlrecipes.algos.agreement import compute_log_ratio_counts
from rlrecipes.algos.objective import compute_custom_objective, compute_policy_objective, compute_sft_objective
from rlrecipes.algos.off_policy import OffPolicy
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
PACKED = BATCH | {"sample_index": torch.tensor([0, 0, 0, 1]), "staleness": torch.tensor([0.0, 2.0, 4.0, 0.0])}
TOPK = {
    "topk_logprobs": torch.tensor([[0.0], [0.25], [0.5], [0.0]]).log(),
    "teacher_topk_logprobs": torch.tensor([[0.0], [0.5], [0.5], [0.0]]).log(),
}
PLAIN = {"dual_clip": None, "kl_coef_in_loss": 0.0, "entropy_coef": 0.0}


def double_loss(batch, logprobs, entropy, *, factor):
    """A loss of one's own, which reads the batch and would spread what stands in masked slots."""
    loss = -factor * logprobs * batch["advantages"].sum()
    return loss, {"double": loss, **({} if entropy is None else {"entropy_sum": entropy * entropy.sum()})}


def see_rows(batch, logprobs, entropy, *, seen):
    seen.append(batch["topk_logprobs"].detach())
    return logprobs, {}


def half_loss(batch, logprobs, entropy):
    return logprobs[::2], {}


def reduced_metric(batch, logprobs, entropy):
    return logprobs, {"mean": logprobs.mean()}


CUSTOM = partial(compute_custom_objective, function=double_loss, options={"factor": 2.0})
OBJECTIVES = {
    "clipped": partial(compute_policy_objective, **OPTIONS),
    "gspo": partial(compute_policy_objective, policy_loss="gspo", **OPTIONS),
    "cispo": partial(compute_policy_objective, policy_loss="cispo", **OPTIONS | {"dual_clip": None}),
    "unbiased": partial(compute_policy_objective, kl_is_unbiased=True, **OPTIONS),
    "corrected": partial(
        compute_policy_objective,
        off_policy=OffPolicy(correction="sequence_mis", veto=0.01, opsm_delta=0.2, staleness_power=1.0),
        distillation_topk_coef=0.7,
        **OPTIONS,
    ),
    "of_the_engine": partial(compute_policy_objective, old_is_rollout=True, **OPTIONS),
    "sft": compute_sft_objective,
    "custom": CUSTOM,
}


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


def test_old_logprobs_of_the_engine_hide_no_mismatch_and_leave_the_loss():
    batch = BATCH | {"old_logprobs": BATCH["rollout_logprobs"]}
    plain, found = (run(batch, old_is_rollout=old_is_rollout, **OPTIONS) for old_is_rollout in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(plain[:3], found[:3], strict=True))
    # Tokens 1 and 2: current - rollout is .3 and -.1.
    expected = {
        "mismatch_kl_k1": [-0.3, 0.1],
        "mismatch_kl_k3": [math.exp(0.3) - 1 - 0.3, math.exp(-0.1) - 1 + 0.1],
        "off_policy_weight_mean": [1.0, 1.0],
    }
    for name, values in expected.items():
        torch.testing.assert_close(found[3][name][MASK], torch.tensor(values), rtol=1e-5, atol=1e-6)
        assert not found[3][name].requires_grad
    counts = compute_log_ratio_counts(log_ratios=torch.tensor([0.3, -0.1]), loss_mask=torch.tensor([True, True]))
    assert torch.equal(found[3]["off_policy_log_ratio_counts"], counts)
    moved = {"mismatch_kl_k1", "mismatch_kl_k3", "off_policy_log_ratio_counts"}
    assert all(torch.equal(metric, plain[3][name]) for name, metric in found[3].items() if name not in moved)


@pytest.mark.parametrize("poison", [math.nan, 1e9, -1e9, math.inf])
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_what_stands_in_masked_slots_changes_nothing(poison, objective):
    batch = PACKED | TOPK
    clean = run(batch, objective=objective)
    poisoned_batch = {
        name: torch.where(MASK if tensor.ndim == 1 else MASK[:, None], tensor, poison)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in batch.items()
    }
    poisoned = run(poisoned_batch, torch.where(MASK, LOGPROBS, poison), torch.where(MASK, ENTROPY, poison), objective)
    for got, expected in zip(poisoned[:3], clean[:3], strict=True):
        assert (got is None) == (expected is None)
        assert got is None or torch.equal(got, expected)
    assert all(torch.equal(poisoned[3][name], metric) for name, metric in clean[3].items())
    assert not clean[1][~MASK].any()


def test_policy_losses_differ_in_ratio_and_gradient():
    found = {
        kind: run(PACKED, policy_loss=kind, clip_low=0.2, clip_high=0.28, kl_estimator="k3", **PLAIN)
        for kind in ("clipped", "gspo", "cispo")
    }
    mean = math.exp((0.4 - 0.5) / 2)
    torch.testing.assert_close(found["clipped"][0][MASK], torch.tensor([-1.28, 0.8]))
    torch.testing.assert_close(found["gspo"][0][MASK], torch.tensor([-mean, mean]))
    torch.testing.assert_close(found["gspo"][3]["ratio_mean"][MASK], torch.tensor([mean, mean]))
    # The two tokens pull against one another over their common mean.
    torch.testing.assert_close(found["gspo"][1], torch.zeros(4), atol=1e-7, rtol=0)
    torch.testing.assert_close(found["cispo"][0][MASK], torch.tensor([1.28 * 1.0, -0.8 * 2.0]))
    torch.testing.assert_close(found["cispo"][1], torch.tensor([0.0, -1.28, 0.8, 0.0]))


def test_weights_multiply_and_a_mask_leaves_the_other_terms():
    options = {"clip_low": 0.2, "clip_high": 0.28, "kl_estimator": "k3", **PLAIN | {"entropy_coef": 0.1}}
    corrected = OffPolicy(correction="token_tis", high=1.0, staleness_power=0.5)
    loss, gradient, _, metrics = run(PACKED, off_policy=corrected, **options)
    # old - rollout: -.1 and .4; ages 2 and 4.
    weights = torch.tensor([math.exp(-0.1) / math.sqrt(2), 1.0 / 2])
    torch.testing.assert_close(loss[MASK], weights * torch.tensor([-1.28, 0.8]) - 0.1 * ENTROPY[MASK])
    torch.testing.assert_close(metrics["policy_loss"][MASK], weights * torch.tensor([-1.28, 0.8]))
    torch.testing.assert_close(metrics["off_policy_weight_mean"][MASK], weights)
    torch.testing.assert_close(metrics["off_policy_weight_square_mean"][MASK], weights.square())
    assert metrics["off_policy_clip_fraction"][MASK].tolist() == [0.0, 1.0]
    assert not gradient.any()  # both tokens are clipped
    # The mean of old - current is (-.4 + .5) / 2; only the token with a bad advantage goes.
    loss, _, _, metrics = run(PACKED, off_policy=OffPolicy(opsm_delta=0.04), **options)
    torch.testing.assert_close(loss[MASK], torch.tensor([-1.28 - 0.2, -0.3]))
    assert metrics["opsm_fraction"][MASK].tolist() == [0.0, 1.0]
    assert run(PACKED, off_policy=OffPolicy(opsm_delta=0.06), **options)[3]["opsm_fraction"].tolist() == [0.0] * 4


def test_a_correction_is_bounded_by_2_above_and_not_below_unless_told():
    batch = PACKED | {"rollout_logprobs": BATCH["old_logprobs"] + torch.tensor([0.0, -1.0, 3.0, 0.0])}
    options = {"clip_low": 0.2, "clip_high": 0.28, "kl_estimator": "k3", **PLAIN}
    _, _, _, metrics = run(batch, off_policy=OffPolicy(correction="token_tis"), **options)
    torch.testing.assert_close(metrics["off_policy_weight_mean"][MASK], torch.tensor([2.0, math.exp(-3.0)]))


@pytest.mark.parametrize("kind", ["clipped", "gspo"])
def test_a_dual_clip_bounds_what_a_bad_token_counts(kind):
    batch = PACKED | {"advantages": torch.tensor([0.0, -1.0, -1.0, 0.0]), "old_logprobs": LOGPROBS - math.log(10)}
    options = {"clip_low": 0.2, "clip_high": 0.28, "kl_estimator": "k3", "policy_loss": kind, **PLAIN}
    torch.testing.assert_close(run(batch, **options)[0][MASK], torch.tensor([10.0, 10.0]))
    loss, gradient, _, metrics = run(batch, **options | {"dual_clip": 4.0})
    torch.testing.assert_close(loss[MASK], torch.tensor([4.0, 4.0]))
    assert not gradient.any() and metrics["clip_fraction"][MASK].tolist() == [1.0, 1.0]


def test_a_veto_drops_the_whole_sample_and_counts_its_tokens():
    options = {"clip_low": 0.2, "clip_high": 0.28, "kl_estimator": "k3", **PLAIN}
    # old - rollout: -.1 and .4, so the least token ratio is .905.
    for veto, weights in ((0.91, [0.0, 0.0]), (0.9, [math.exp(-0.1), math.exp(0.4)])):
        _, _, _, metrics = run(PACKED, off_policy=OffPolicy(correction="token_tis", veto=veto), **options)
        torch.testing.assert_close(metrics["off_policy_weight_mean"][MASK], torch.tensor(weights))
        assert metrics["off_policy_clip_fraction"][MASK].tolist() == [float(not any(weights))] * 2


def test_a_token_of_weight_zero_stays_out_even_if_its_loss_is_infinite():
    logprobs = torch.tensor([0.0, -math.inf, -2.0, 0.0])
    options = {"clip_low": 0.2, "clip_high": 0.28, "kl_estimator": "k3", "policy_loss": "cispo", **PLAIN}
    assert run(PACKED, logprobs, **options)[0].isinf().any()
    loss, gradient, _, _ = run(PACKED, logprobs, off_policy=OffPolicy(correction="token_mis", low=1.0), **options)
    assert loss[1] == 0 and gradient[1] == 0 and loss[2] != 0  # old - rollout: -.1 and .4


def test_every_metric_is_a_number_that_can_be_averaged():
    metrics = run(PACKED | TOPK, objective=OBJECTIVES["corrected"])[3]
    counts = metrics.pop("off_policy_log_ratio_counts")
    assert counts.dtype == torch.float64 and {metric.dtype for metric in metrics.values()} == {torch.float32}


def test_top_k_of_the_teacher_is_a_term_and_a_metric():
    batch = PACKED | TOPK
    options = {"clip_low": 0.2, "clip_high": 0.28, "kl_estimator": "k3", **PLAIN}
    expected = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    plain, _, _, metrics = run(batch, **options)
    torch.testing.assert_close(metrics["teacher_topk_kl"][MASK], torch.tensor([expected, 0.0]))
    loss, _, _, _ = run(batch, distillation_topk_coef=2.0, **options)
    torch.testing.assert_close((loss - plain)[MASK], torch.tensor([2 * expected, 0.0]))


def test_an_unbiased_kl_is_weighted_by_the_ratio_with_its_gradient():
    options = OPTIONS | {"entropy_coef": 0.0, "kl_estimator": "k3", "kl_coef_in_loss": 1.0, "dual_clip": None}
    _, gradient, _, metrics = run(kl_is_unbiased=True, **options)
    ratio = torch.tensor([math.exp(0.4), math.exp(-0.5)])
    kl = torch.tensor([math.exp(-0.2) - 1 + 0.2, math.exp(0.5) - 1 - 0.5])
    torch.testing.assert_close(metrics["ref_kl"][MASK], ratio * kl)
    # Both tokens are clipped: what is left is d (w k3) = w (logprobs - ref_logprobs).
    torch.testing.assert_close(gradient[MASK], ratio * torch.tensor([0.2, -0.5]))


def test_a_loss_of_ones_own_gets_its_options_and_sees_no_masked_slot():
    loss, gradient, _, metrics = run(BATCH | {"advantages": torch.tensor([7.0, 2.0, 1.0, 7.0])}, objective=CUSTOM)
    assert loss.tolist() == [0.0, 6.0, 12.0, 0.0]
    assert gradient.tolist() == [0.0, -6.0, -6.0, 0.0]
    assert metrics["entropy_sum"].tolist() == [0.0, 10.0, 15.0, 0.0]
    assert not metrics["double"].requires_grad
    seen = []
    rows = {name: torch.full((4, 2), -0.5) for name in TOPK}
    run(BATCH | rows, objective=partial(compute_custom_objective, function=see_rows, options={"seen": seen}))
    assert seen[0][:, 0].tolist() == [0.0, -0.5, -0.5, 0.0]
    assert set(run(entropy=None, objective=CUSTOM)[3]) == {"double"}


@pytest.mark.parametrize(("function", "name"), [(half_loss, r"loss=\[2\]"), (reduced_metric, r"mean=\[\]")])
def test_a_loss_of_ones_own_that_reduces_is_refused(function, name):
    with pytest.raises(ContractError, match=name):
        run(objective=partial(compute_custom_objective, function=function, options={}))


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
        ({"batch": BATCH | {"loss_mask": MASK[:3]}}, "shapes differ"),
        ({"policy_loss": "gspo"}, "there is no sample_index"),
        ({"policy_loss": "ppo"}, "no policy loss 'ppo'"),
        ({"policy_loss": "cispo"}, "no policy loss 'cispo' with dual_clip=3.0"),
        ({"distillation_topk_coef": 0.1}, "there is no teacher_topk_kl"),
        ({"off_policy": OffPolicy(opsm_delta=0.1)}, "there is no sample_index"),
        ({"off_policy": OffPolicy(staleness_power=1.0)}, "there is no staleness"),
        ({"off_policy": OffPolicy(correction="sequence_tis")}, "needs to know which sample"),
        (
            {
                "batch": {name: BATCH[name] for name in BATCH if name != "rollout_logprobs"},
                "off_policy": OffPolicy(correction="icepop"),
            },
            "there is no rollout_logprobs",
        ),
        ({"batch": BATCH | {name: rows[1:] for name, rows in TOPK.items()}}, "shapes differ"),
    ],
)
def test_a_weighted_term_without_its_input_is_refused(change, message):
    with pytest.raises(ContractError, match=message):
        run(**OPTIONS | change)


@pytest.mark.parametrize("name", ["clipped", "corrected", "custom"])
def test_objectives_pickle_with_their_options(name):
    objective = pickle.loads(pickle.dumps(OBJECTIVES[name]))
    torch.testing.assert_close(
        run(PACKED | TOPK, objective=objective)[0], run(PACKED | TOPK, objective=OBJECTIVES[name])[0]
    )


def test_sft_objective_is_the_negative_logprob_of_trained_tokens():
    loss, gradient, _, metrics = run(objective=compute_sft_objective)
    torch.testing.assert_close(loss, torch.tensor([0.0, 1.0, 2.0, 0.0]))
    assert gradient.tolist() == [0.0, -1.0, -1.0, 0.0]
    assert set(metrics) == {"nll", "entropy"}
    assert metrics["nll"].tolist() == [0.0, 1.0, 2.0, 0.0] and not metrics["nll"].requires_grad
    assert set(run(entropy=None, objective=compute_sft_objective)[3]) == {"nll"}


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
