import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrecipes.algos.policy_loss import (
    compute_cispo_policy_loss,
    compute_clipped_policy_loss,
    compute_gspo_policy_loss,
    compute_sft_loss,
)
from rlrecipes.errors import ContractError

# Steps of 1/64 put no ratio on a bound, and no advantage where rounding decides what is clipped.
LOGPROB = st.integers(-192, 0).map(lambda steps: steps / 64)
TOKEN = st.tuples(LOGPROB, LOGPROB, st.integers(-32, 32).map(lambda steps: steps / 8))


COMPUTERS = [
    compute_clipped_policy_loss,
    compute_cispo_policy_loss,
    partial(compute_gspo_policy_loss, loss_mask=torch.tensor([True]), sample_index=torch.tensor([0])),
]


def slow_token(logprob, old_logprob, advantage, clip_low, clip_high, dual_clip):
    """Loss, d loss / d logprob and whether a bound holds, of one token."""
    ratio = math.exp(logprob - old_logprob)
    if advantage >= 0:
        if ratio > 1 + clip_high and advantage > 0:
            return -(1 + clip_high) * advantage, 0.0, True
        return -ratio * advantage, -ratio * advantage, False
    if ratio < 1 - clip_low:
        return -(1 - clip_low) * advantage, 0.0, True
    if dual_clip is not None and ratio > dual_clip:
        return -dual_clip * advantage, 0.0, True
    return -ratio * advantage, -ratio * advantage, False


@settings(max_examples=150, deadline=None)
@given(tokens=st.lists(TOKEN, min_size=1, max_size=8), dual_clip=st.sampled_from([None, 1.5, 3.0]))
def test_value_and_gradient_equal_a_loop(tokens, dual_clip):
    logprobs, old_logprobs, advantages = torch.tensor(tokens, dtype=torch.float64).unbind(1)
    logprobs = logprobs.clone().requires_grad_()
    loss, is_clipped, ratio = compute_clipped_policy_loss(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=dual_clip,
    )
    loss.sum().backward()
    slow = [slow_token(*token, 0.2, 0.28, dual_clip) for token in tokens]
    torch.testing.assert_close(loss, torch.tensor([value for value, _, _ in slow], dtype=torch.float64))
    torch.testing.assert_close(logprobs.grad, torch.tensor([grad for _, grad, _ in slow], dtype=torch.float64))
    assert is_clipped.tolist() == [is_bound for _, _, is_bound in slow]
    torch.testing.assert_close(ratio, (logprobs - old_logprobs).exp())


def test_a_step_against_the_gradient_raises_what_was_better_than_its_group():
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    loss, _, _ = compute_clipped_policy_loss(
        logprobs=logprobs,
        old_logprobs=logprobs,
        advantages=torch.tensor([1.0, -1.0]),
        clip_low=0.2,
        clip_high=0.2,
    )
    loss.sum().backward()
    assert logprobs.grad.tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("compute", COMPUTERS)
def test_no_gradient_reaches_old_logprobs_or_advantages(compute):
    leaves = [torch.tensor([value], requires_grad=True) for value in (-1.0, -1.1, 0.5)]
    logprobs, old_logprobs, advantages = leaves
    loss, _, _ = compute(
        logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, clip_low=0.2, clip_high=0.2
    )
    loss.sum().backward()
    assert logprobs.grad is not None and old_logprobs.grad is None and advantages.grad is None


@pytest.mark.parametrize("compute", COMPUTERS)
def test_shapes_that_would_broadcast_are_refused(compute):
    with pytest.raises(ContractError, match=r"advantages=\[3\]"):
        compute(
            logprobs=torch.zeros(1), old_logprobs=torch.zeros(1), advantages=torch.zeros(3), clip_low=0.2, clip_high=0.2
        )


@pytest.mark.parametrize("compute", COMPUTERS)
@pytest.mark.parametrize("distance", [-1000.0, -90.0, 90.0, 1000.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_policy_far_away_has_a_finite_loss_and_gradient(compute, distance, advantage):
    logprobs = torch.tensor([-1.0], requires_grad=True)
    loss, _, ratio = compute(
        logprobs=logprobs,
        old_logprobs=torch.tensor([-1.0 - distance]),
        advantages=torch.tensor([advantage]),
        clip_low=0.2,
        clip_high=0.2,
    )
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad.isfinite().all()
    assert ratio.item() == pytest.approx(math.exp(math.copysign(20, distance)))


@settings(max_examples=100, deadline=None)
@given(
    samples=st.lists(st.lists(st.tuples(TOKEN, st.booleans()), min_size=1, max_size=5), min_size=1, max_size=4),
    dual_clip=st.sampled_from([None, 1.5]),
    data=st.data(),
)
def test_gspo_equals_a_loop_over_sequences(samples, dual_clip, data):
    order = data.draw(st.permutations(range(len(samples))))
    rows = [(index, *token, is_trained) for index in order for token, is_trained in samples[index]]
    sample_index, logprobs, old_logprobs, advantages, loss_mask = (list(column) for column in zip(*rows, strict=True))
    expected_loss, expected_gradient = [0.0] * len(rows), [0.0] * len(rows)
    for index in order:
        trained = [place for place, row in enumerate(rows) if row[0] == index and row[-1]]
        if not trained:
            continue
        mean = math.fsum(logprobs[place] - old_logprobs[place] for place in trained) / len(trained)
        for place in trained:
            loss, gradient, _ = slow_token(mean, 0.0, advantages[place], 0.2, 0.28, dual_clip)
            expected_loss[place] = loss
            for other in trained:
                expected_gradient[other] += gradient / len(trained)
    mask = torch.tensor(loss_mask)
    # What stands in masked slots must not reach a mean, nor a gradient.
    leaf = torch.where(mask, torch.tensor(logprobs, dtype=torch.float64), math.nan).requires_grad_()
    loss, _, _ = compute_gspo_policy_loss(
        logprobs=leaf,
        old_logprobs=torch.where(mask, torch.tensor(old_logprobs, dtype=torch.float64), 1e9),
        advantages=torch.where(mask, torch.tensor(advantages, dtype=torch.float64), math.nan),
        loss_mask=mask,
        sample_index=torch.tensor(sample_index),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=dual_clip,
    )
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), torch.tensor(expected_loss, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(leaf.grad, torch.tensor(expected_gradient, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_a_sequence_ratio_is_not_diluted_by_its_prompt_or_by_padding():
    """The mean is over trained tokens: one over all slots would give e^.1 and e^.05."""
    for num_masked in (0, 3, 9):
        _, _, ratio = compute_gspo_policy_loss(
            logprobs=torch.cat([torch.zeros(num_masked), torch.full((3,), -0.6)]),
            old_logprobs=torch.cat([torch.zeros(num_masked), torch.full((3,), -1.0)]),
            advantages=torch.ones(num_masked + 3),
            loss_mask=torch.arange(num_masked + 3) >= num_masked,
            sample_index=torch.zeros(num_masked + 3, dtype=torch.int64),
            clip_low=0.2,
            clip_high=0.2,
        )
        torch.testing.assert_close(ratio, torch.full_like(ratio, math.exp(0.4)))


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(TOKEN, min_size=1, max_size=8), clip_low=st.sampled_from([0.2, 1.0]))
def test_cispo_equals_a_loop_and_keeps_the_gradient_of_clipped_tokens(tokens, clip_low):
    logprobs, old_logprobs, advantages = torch.tensor(tokens, dtype=torch.float64).unbind(1)
    logprobs = logprobs.clone().requires_grad_()
    loss, is_clipped, ratio = compute_cispo_policy_loss(
        logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, clip_low=clip_low, clip_high=0.28
    )
    loss.sum().backward()
    ratios = [math.exp(logprob - old_logprob) for logprob, old_logprob, _ in tokens]
    weights = [min(max(each, 1 - clip_low), 1.28) for each in ratios]
    slow = [(-weight * token[2] * token[0], -weight * token[2]) for weight, token in zip(weights, tokens, strict=True)]
    torch.testing.assert_close(loss.detach(), torch.tensor([value for value, _ in slow], dtype=torch.float64))
    torch.testing.assert_close(logprobs.grad, torch.tensor([grad for _, grad in slow], dtype=torch.float64))
    assert is_clipped.tolist() == [weight != each for weight, each in zip(weights, ratios, strict=True)]
    assert not ratio.requires_grad


def test_sft_raises_every_logprob_alike():
    logprobs = torch.tensor([-0.5, -7.0], requires_grad=True)
    loss = compute_sft_loss(logprobs=logprobs)
    loss.sum().backward()
    assert loss.tolist() == [0.5, 7.0]
    assert logprobs.grad.tolist() == [-1.0, -1.0]


def test_a_ratio_on_the_dual_clip_is_within_it():
    logprobs = torch.tensor([1.25], requires_grad=True)
    options = {"old_logprobs": torch.zeros(1), "advantages": torch.tensor([-1.0]), "clip_low": 0.2, "clip_high": 0.2}
    ratio = compute_clipped_policy_loss(logprobs=logprobs, **options)[2].item()
    for dual_clip, is_bounded in ((ratio, False), (ratio - 0.01, True)):
        loss, is_clipped, _ = compute_clipped_policy_loss(logprobs=logprobs, **options, dual_clip=dual_clip)
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        assert is_clipped.tolist() == [is_bounded]
        assert gradient.item() == pytest.approx(0.0 if is_bounded else ratio)
