import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrecipes.algos.value_loss import (
    compute_clipped_value_loss,
    compute_explained_variance,
    compute_value_objective,
)
from rlrecipes.errors import ContractError

# Sixteenths, so that what is equal by hand is equal in floating point.
NUMBERS = st.integers(-64, 64).map(lambda sixteenths: sixteenths / 16)
TOKENS = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=8)


def slow_token(value, old_value, target, value_clip):
    unclipped = (value - target) ** 2
    if value_clip is None:
        return unclipped, 2 * (value - target), False
    clipped = (min(max(value, old_value - value_clip), old_value + value_clip) - target) ** 2
    return (clipped, 0.0, True) if clipped > unclipped else (unclipped, 2 * (value - target), False)


@settings(max_examples=150, deadline=None)
@given(tokens=TOKENS, value_clip=st.sampled_from([None, 0.25, 2.0]))
def test_value_and_gradient_equal_a_loop(tokens, value_clip):
    values, old_values, returns = torch.tensor(tokens, dtype=torch.float64).unbind(1)
    values = values.clone().requires_grad_()
    loss, is_clipped = compute_clipped_value_loss(
        values=values, old_values=old_values, returns=returns, value_clip=value_clip
    )
    loss.sum().backward()
    slow = [slow_token(*token, value_clip) for token in tokens]
    torch.testing.assert_close(loss, torch.tensor([value for value, _, _ in slow], dtype=torch.float64))
    torch.testing.assert_close(values.grad, torch.tensor([gradient for _, gradient, _ in slow], dtype=torch.float64))
    assert is_clipped.tolist() == [is_bound for _, _, is_bound in slow] and is_clipped.dtype == torch.bool


def test_rounding_clips_nothing():
    generator = torch.Generator().manual_seed(0)
    values, old_values, returns = (0.1 * torch.randn(4096, generator=generator) for _ in range(3))
    loss, is_clipped = compute_clipped_value_loss(values=values, old_values=old_values, returns=returns, value_clip=1.0)
    assert not is_clipped.any()
    assert torch.equal(loss, (values - returns).square())


@pytest.mark.parametrize(
    ("value", "old_value", "target", "value_clip"),
    [
        # Its distance rounds to the bound itself, old value + bound to the number above the value.
        (float.fromhex("-0x1.56389ap-5"), float.fromhex("-0x1.ef27c0p-3"), -0.05, 0.2),
        (0.5, 0.0, 0.375, 0.25),  # as far from the target as the clipped value
    ],
)
def test_on_the_bound_and_in_a_tie_the_gradient_stays(value, old_value, target, value_clip):
    values, old_values, returns = (torch.tensor([number]) for number in (value, old_value, target))
    clipped = (old_values + value_clip - returns).square()
    assert clipped > (values - returns).square() or target == 0.375
    values.requires_grad_()
    loss, is_clipped = compute_clipped_value_loss(
        values=values, old_values=old_values, returns=returns, value_clip=value_clip
    )
    loss.sum().backward()
    assert not is_clipped
    torch.testing.assert_close(values.grad, 2 * (values - returns).detach())


def test_gradients_reach_values_alone():
    leaves = [torch.tensor([number], requires_grad=True) for number in (0.5, 0.4, 1.0)]
    loss, _ = compute_clipped_value_loss(values=leaves[0], old_values=leaves[1], returns=leaves[2], value_clip=0.2)
    loss.sum().backward()
    assert leaves[0].grad.tolist() == [-1.0] and leaves[1].grad is None and leaves[2].grad is None


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e9])
@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_masked_slots_reach_neither_value_nor_gradient(poison, value_clip):
    def run(masked):
        batch = {
            "loss_mask": torch.tensor([True, False]),
            "old_values": torch.tensor([0.5, masked]),
            "returns": torch.tensor([1.0, masked]),
        }
        values = torch.tensor([0.9, masked], requires_grad=True)
        loss, metrics = compute_value_objective(batch, values, value_clip=value_clip)
        loss.sum().backward()
        assert not any(metric.requires_grad for metric in metrics.values())
        names = ["value_loss", "value_clip_fraction", "value_mean", "return_mean"]
        assert list(metrics) == names
        return [loss.tolist(), values.grad.tolist(), *(metric.tolist() for metric in metrics.values())]

    clean = run(0.0)
    assert isinstance(clean[3][0], float)
    assert run(poison) == clean
    assert clean[0][0] == pytest.approx(0.01 if value_clip is None else 0.09, rel=1e-5)
    assert all(row[1] == 0.0 for row in clean)
    assert [row[0] for row in clean[3:]] == pytest.approx([float(value_clip is not None), 0.9, 1.0])


def test_other_shapes_are_refused():
    one, two = torch.zeros(1), torch.zeros(2)
    with pytest.raises(ContractError, match=r"old_values=\[2\]"):
        compute_clipped_value_loss(values=one, old_values=two, returns=one, value_clip=None)
    with pytest.raises(ContractError, match=r"loss_mask=\[2\]"):
        compute_value_objective({"loss_mask": two > 1, "old_values": one, "returns": one}, one, value_clip=None)
    with pytest.raises(ContractError, match=r"returns=\[2\]"):
        compute_explained_variance(values=[one], returns=[two], loss_masks=[one > 1])


def explained(values, returns, mask=None):
    mask = [True] * len(values) if mask is None else mask
    # Two samples: the statistic is over all trained tokens, not a mean of each sample's.
    cut = len(values) // 2
    rows = [[torch.tensor(row[:cut]), torch.tensor(row[cut:])] for row in (values, returns, mask)]
    return compute_explained_variance(values=rows[0], returns=rows[1], loss_masks=rows[2])


def test_explained_variance_of_a_perfect_a_constant_and_a_contrary_critic():
    assert explained([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]) == 1.0
    assert explained([11.0, 12.0, 13.0, 14.0], [1.0, 2.0, 3.0, 4.0]) == 1.0
    assert explained([7.0, 7.0, 7.0, 7.0], [1.0, 2.0, 3.0, 4.0]) == 0.0
    assert explained([-1.0, -2.0, -3.0, -4.0], [1.0, 2.0, 3.0, 4.0]) == -3.0
    assert explained([0.5, 1.0, 1.5, 2.0], [1.0, 2.0, 3.0, 4.0]) == 0.75


def test_explained_variance_needs_a_row_of_each_for_every_sample():
    row = [torch.zeros(1)]
    with pytest.raises(ValueError, match="zip"):
        compute_explained_variance(values=row, returns=row, loss_masks=[])


def test_explained_variance_without_spread_or_tokens_is_zero():
    assert explained([1.0, 2.0, 3.0], [0.9, 0.9, 0.9]) == 0.0
    assert explained([math.nan, math.nan], [math.nan, math.nan], [False, False]) == 0.0
    assert compute_explained_variance(values=[], returns=[], loss_masks=[]) == 0.0


def test_explained_variance_selects_and_keeps_its_digits():
    returns = [1e7, 1e7 + 1, math.nan, 1e7 + 2]
    assert explained([0.0, 0.5, 1e9, 1.0], returns, [True, True, False, True]) == pytest.approx(0.75)
