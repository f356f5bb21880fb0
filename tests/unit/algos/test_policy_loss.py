import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrecipes.algos.policy_loss import compute_clipped_policy_loss, compute_sft_loss
from rlrecipes.errors import ContractError

# Steps of 1/64 put no ratio on a bound, and no advantage where rounding decides what is clipped.
LOGPROB = st.integers(-192, 0).map(lambda steps: steps / 64)
TOKEN = st.tuples(LOGPROB, LOGPROB, st.integers(-32, 32).map(lambda steps: steps / 8))


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


def test_no_gradient_reaches_old_logprobs_or_advantages():
    leaves = [torch.tensor([value], requires_grad=True) for value in (-1.0, -1.1, 0.5)]
    logprobs, old_logprobs, advantages = leaves
    loss, _, _ = compute_clipped_policy_loss(
        logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, clip_low=0.2, clip_high=0.2
    )
    loss.sum().backward()
    assert logprobs.grad is not None and old_logprobs.grad is None and advantages.grad is None


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ContractError, match=r"advantages=\[3\]"):
        compute_clipped_policy_loss(
            logprobs=torch.zeros(1),
            old_logprobs=torch.zeros(1),
            advantages=torch.zeros(3),
            clip_low=0.2,
            clip_high=0.2,
        )


def test_sft_raises_every_logprob_alike():
    logprobs = torch.tensor([-0.5, -7.0], requires_grad=True)
    loss = compute_sft_loss(logprobs=logprobs)
    loss.sum().backward()
    assert loss.tolist() == [0.5, 7.0]
    assert logprobs.grad.tolist() == [-1.0, -1.0]
