import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrecipes.algos.advantages import compute_group_advantages, compute_zero_variance
from rlrecipes.errors import ContractError

REWARDS = st.one_of(st.sampled_from([0.0, 1.0, 0.9, -1.5]), st.floats(-100, 100, width=32))
BATCH = st.lists(st.tuples(st.sampled_from([7, 3, 11, -2]), REWARDS), min_size=1, max_size=24)


def slow_advantages(pairs, normalize_std, ddof, eps):
    advantages = []
    for group, reward in pairs:
        siblings = [r for g, r in pairs if g == group]
        if max(siblings) == min(siblings):
            advantages.append(0.0)
            continue
        mean = math.fsum(siblings) / len(siblings)
        advantage = reward - mean
        if normalize_std:
            advantage /= math.sqrt(math.fsum((r - mean) ** 2 for r in siblings) / (len(siblings) - ddof)) + eps
        advantages.append(advantage)
    return advantages


def advantages_of(pairs, dtype=torch.float64, **options):
    return compute_group_advantages(
        rewards=torch.tensor([reward for _, reward in pairs], dtype=dtype),
        group_ids=torch.tensor([group for group, _ in pairs]),
        **options,
    )


@settings(max_examples=100, deadline=None)
@given(pairs=BATCH, normalize_std=st.booleans(), ddof=st.sampled_from([0, 1]), eps=st.sampled_from([1e-6, 0.5]))
def test_equals_a_loop_over_unequal_interleaved_groups(pairs, normalize_std, ddof, eps):
    got = advantages_of(pairs, normalize_std=normalize_std, ddof=ddof, eps=eps)
    expected = torch.tensor(slow_advantages(pairs, normalize_std, ddof, eps), dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-9)


@settings(max_examples=50, deadline=None)
@given(pairs=BATCH, data=st.data())
def test_rewards_and_rows_stay_paired_under_permutation(pairs, data):
    order = data.draw(st.permutations(range(len(pairs))))
    straight = advantages_of(pairs, normalize_std=True)
    shuffled = advantages_of([pairs[place] for place in order], normalize_std=True)
    torch.testing.assert_close(shuffled, straight[list(order)], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 3, 6, 7, 1000])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(dtype, size):
    rewards = torch.full((size,), 0.9, dtype=dtype)
    got = compute_group_advantages(
        rewards=rewards, group_ids=torch.zeros(size, dtype=torch.int64), normalize_std=True, eps=0.0
    )
    assert got.dtype == dtype
    assert got.tolist() == [0.0] * size


def test_a_small_spread_on_a_large_reward_survives_float32():
    rewards = torch.tensor([10000.0, 10000.001], dtype=torch.float32)
    got = compute_group_advantages(rewards=rewards, group_ids=torch.zeros(2, dtype=torch.int64), normalize_std=True)
    torch.testing.assert_close(got, torch.tensor([-1.0, 1.0]) / math.sqrt(2), rtol=2e-3, atol=0)


def test_zero_variance_names_groups_in_ascending_order():
    is_flat = compute_zero_variance(
        rewards=torch.tensor([1.0, 0.9, 0.0, 0.9, 5.0]), group_ids=torch.tensor([8, 2, 8, 2, 4])
    )
    assert is_flat.tolist() == [True, True, False]


def test_a_group_far_below_zero_is_not_compared_with_zero():
    is_flat = compute_zero_variance(rewards=torch.tensor([-3.0, -3.0]), group_ids=torch.tensor([0, 0]))
    assert is_flat.tolist() == [True]


@pytest.mark.parametrize(
    "rewards", [torch.tensor([1.0, math.nan]), torch.tensor([math.inf, 1.0]), torch.tensor([1, 0])]
)
def test_rewards_that_are_not_finite_floats_are_refused(rewards):
    with pytest.raises(ContractError, match="finite floats"):
        compute_group_advantages(rewards=rewards, group_ids=torch.zeros(2, dtype=torch.int64), normalize_std=True)


def test_rewards_and_groups_of_other_shapes_are_refused():
    with pytest.raises(ContractError, match=r"rewards=\[2\], group_ids=\[1\]"):
        compute_group_advantages(
            rewards=torch.zeros(2), group_ids=torch.zeros(1, dtype=torch.int64), normalize_std=True
        )
