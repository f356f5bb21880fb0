import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrecipes.algos.returns import (
    compute_discounted_returns,
    compute_gae,
    compute_token_advantages,
    compute_token_rewards,
    compute_whitened_advantages,
)
from rlrecipes.errors import ContractError

NUMBERS = st.floats(-10, 10, width=32)
FACTORS = st.sampled_from([0.0, 0.3, 0.95, 1.0])
SAMPLES = st.lists(st.lists(st.tuples(st.booleans(), NUMBERS, NUMBERS), min_size=1, max_size=9), min_size=1, max_size=6)


def columns(samples):
    """Masks, and two lists of numbers."""
    masks, first, second = ([[row[place] for row in sample] for sample in samples] for place in range(3))
    return [torch.tensor(row) for row in masks], doubles(first), doubles(second)


def doubles(rows):
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def spoil(tensors, masks, value):
    return [torch.where(mask, tensor, value) for tensor, mask in zip(tensors, masks, strict=True)]


def assert_rows(got, expected):
    assert len(got) == len(expected)
    for row, expected_row in zip(got, expected, strict=True):
        torch.testing.assert_close(row, expected_row, rtol=1e-9, atol=1e-9)


def slow_gae(rewards, values, mask, gamma, gae_lambda):
    """Token by token from the end; None stands for no trained token yet."""
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    advantage = next_value = 0.0
    for place in reversed(range(len(mask))):
        if mask[place]:
            delta = float(rewards[place]) + gamma * next_value - float(values[place])
            advantage = delta + gamma * gae_lambda * advantage
            advantages[place], returns[place] = advantage, advantage + float(values[place])
            next_value = float(values[place])
    return advantages, returns


@settings(max_examples=100, deadline=None)
@given(samples=SAMPLES, gamma=FACTORS, gae_lambda=FACTORS)
def test_gae_equals_a_loop_over_trained_tokens(samples, gamma, gae_lambda):
    masks, rewards, values = columns(samples)
    got = compute_gae(token_rewards=rewards, values=values, loss_masks=masks, gamma=gamma, gae_lambda=gae_lambda)
    slow = [slow_gae(*row, gamma, gae_lambda) for row in zip(rewards, values, masks, strict=True)]
    assert_rows(got[0], doubles([advantages for advantages, _ in slow]))
    assert_rows(got[1], doubles([returns for _, returns in slow]))


@settings(max_examples=100, deadline=None)
@given(samples=SAMPLES, gamma=FACTORS)
def test_discounted_returns_equal_a_double_loop(samples, gamma):
    masks, rewards, _ = columns(samples)
    expected = []
    for mask, row in zip(masks, rewards, strict=True):
        trained = [place for place in range(len(mask)) if mask[place]]
        sums = [0.0] * len(mask)
        for age, place in enumerate(trained):
            sums[place] = sum(gamma**later * float(row[t]) for later, t in enumerate(trained[age:]))
        expected.append(sums)
    got = compute_discounted_returns(token_rewards=rewards, loss_masks=masks, gamma=gamma)
    assert_rows(got, doubles(expected))


@pytest.mark.parametrize("gamma", [0.0, 0.9, 0.9999, 1.0])
def test_blocks_join_at_every_length_around_their_borders(gamma):
    lengths = [1, 63, 64, 65, 127, 128, 129, 4096, 4097, 5000]
    generator = torch.Generator().manual_seed(0)
    rewards = [torch.randn(length, generator=generator, dtype=torch.float64) for length in lengths]
    masks = [torch.ones(length, dtype=torch.bool) for length in lengths]
    got = compute_discounted_returns(token_rewards=rewards, loss_masks=masks, gamma=gamma)
    for row, reward in zip(got, rewards, strict=True):
        following, expected = 0.0, []
        for value in reversed(reward.tolist()):
            following = value + gamma * following
            expected.append(following)
        torch.testing.assert_close(row, doubles([expected[::-1]])[0], rtol=1e-10, atol=1e-10)


@settings(max_examples=50, deadline=None)
@given(samples=SAMPLES)
def test_lambda_one_is_return_minus_value_and_the_targets_are_the_returns(samples):
    masks, rewards, values = columns(samples)
    advantages, targets = compute_gae(token_rewards=rewards, values=values, loss_masks=masks, gamma=0.9, gae_lambda=1.0)
    returns = compute_discounted_returns(token_rewards=rewards, loss_masks=masks, gamma=0.9)
    assert_rows(targets, returns)
    assert_rows(advantages, [r - torch.where(m, v, 0.0) for r, m, v in zip(returns, masks, values, strict=True)])


@settings(max_examples=50, deadline=None)
@given(samples=SAMPLES, data=st.data(), poison=st.sampled_from([math.nan, math.inf, 1e9]))
def test_nothing_depends_on_masked_slots_neighbours_or_order(samples, data, poison):
    def run(rewards, values, masks, kls):
        spread = compute_token_rewards(rewards=scores[: len(masks)], loss_masks=masks, token_kls=kls, kl_coef=0.1)
        advantages, returns = compute_gae(
            token_rewards=spread, values=values, loss_masks=masks, gamma=0.9, gae_lambda=0.8
        )
        sums = compute_discounted_returns(token_rewards=rewards, loss_masks=masks, gamma=0.9)
        flat = compute_token_advantages(advantages=scores[: len(masks)], loss_masks=masks, token_kls=kls, kl_coef=0.1)
        whitened = compute_whitened_advantages(advantages=rewards, loss_masks=masks)
        return [*advantages, *returns, *sums, *flat, *whitened]

    masks, rewards, values = columns(samples)
    scores = torch.ones(len(masks), dtype=torch.float64)
    clean = run(rewards, values, masks, rewards)
    spoilt = run(spoil(rewards, masks, poison), spoil(values, masks, poison), masks, spoil(rewards, masks, poison))
    assert all(torch.equal(*pair) for pair in zip(clean, spoilt, strict=True))
    order = data.draw(st.permutations(range(len(masks))))
    shuffled = run(*([column[place] for place in order] for column in (rewards, values, masks, rewards)))
    count = len(masks)
    assert_rows(shuffled, [clean[kind * count + place] for kind in range(5) for place in order])


@settings(max_examples=50, deadline=None)
@given(samples=SAMPLES, gaps=st.lists(st.integers(0, 3), min_size=9, max_size=9))
def test_tool_tokens_between_trained_ones_change_nothing(samples, gaps):
    """The numbers of a multi-turn sample are those of its trained tokens alone, whatever lies between them."""
    masks, rewards, values = columns(samples)
    short = [[column[mask] for column, mask in zip(kind, masks, strict=True)] for kind in (rewards, values)]
    full = [torch.ones(len(row), dtype=torch.bool) for row in short[0]]
    stretched = []
    for row in full:
        pieces = [[False] * gap + [True] for gap, _ in zip(gaps, row, strict=False)]
        stretched.append(torch.tensor([*sum(pieces, []), False]))

    def run(rewards, values, masks):
        advantages, returns = compute_gae(
            token_rewards=rewards, values=values, loss_masks=masks, gamma=0.9, gae_lambda=0.7
        )
        return [row[mask] for row, mask in zip(advantages + returns, masks + masks, strict=True)]

    def stretch(rows):
        wide = [torch.full(mask.shape, 7.0, dtype=torch.float64) for mask in stretched]
        for target, mask, row in zip(wide, stretched, rows, strict=True):
            target[mask] = row
        return wide

    assert_rows(run(*(stretch(rows) for rows in short), stretched), run(*short, full))


def test_the_reward_falls_on_the_last_trained_token():
    masks = [torch.tensor(row) for row in ([False, True, True, False], [False, False], [True])]
    got = compute_token_rewards(
        rewards=torch.tensor([1.0, 5.0, -2.0]),
        loss_masks=masks,
        token_kls=[torch.tensor([9.0, 0.1, 0.2, 9.0]), torch.tensor([9.0, 9.0]), torch.tensor([0.3])],
        kl_coef=0.5,
    )
    assert_rows(got, [torch.tensor(row) for row in ([0.0, -0.05, 0.9, 0.0], [0.0, 0.0], [-2.15])])
    plain = compute_token_rewards(rewards=torch.tensor([1.0, 5.0, -2.0]), loss_masks=masks)
    assert [row.tolist() for row in plain] == [[0, 0, 1, 0], [0, 0], [-2]]


def test_every_trained_token_gets_its_rollouts_advantage_less_its_own_kl():
    masks = [torch.tensor([False, True, True]), torch.tensor([True, False])]
    kls = [torch.tensor([9.0, 0.1, 0.2]), torch.tensor([0.4, 9.0])]
    got = compute_token_advantages(advantages=torch.tensor([0.75, -1.0]), loss_masks=masks, token_kls=kls, kl_coef=0.5)
    assert_rows(got, [torch.tensor([0.0, 0.7, 0.65]), torch.tensor([-1.2, 0.0])])
    plain = compute_token_advantages(advantages=torch.tensor([0.75, -1.0]), loss_masks=masks)
    assert [row.tolist() for row in plain] == [[0, 0.75, 0.75], [-1, 0]]


@pytest.mark.parametrize("ddof", [0, 1])
@settings(max_examples=50, deadline=None)
@given(samples=SAMPLES)
def test_whitening_equals_a_loop_over_all_trained_tokens(ddof, samples):
    masks, advantages, _ = columns(samples)
    trained = [float(a) for row, mask in zip(advantages, masks, strict=True) for a in row[mask]]
    got = compute_whitened_advantages(advantages=advantages, loss_masks=masks, ddof=ddof)
    if len(set(trained)) < 2:
        assert all(not row.any() for row in got)
        return
    mean = math.fsum(trained) / len(trained)
    variance = math.fsum((a - mean) ** 2 for a in trained) / (len(trained) - ddof)
    expected = [
        torch.where(mask, (row - mean) / math.sqrt(variance + 1e-8), 0.0)
        for row, mask in zip(advantages, masks, strict=True)
    ]
    for row, expected_row in zip(got, expected, strict=True):
        torch.testing.assert_close(row, expected_row, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("values", [[0.9] * 6, [0.1], [1e8 + 0.1] * 3])
def test_equal_advantages_and_one_token_whiten_to_exactly_zero(values):
    (got,) = compute_whitened_advantages(
        advantages=[torch.tensor(values)], loss_masks=[torch.ones(len(values), dtype=torch.bool)]
    )
    assert got.tolist() == [0.0] * len(values)


def test_a_small_spread_on_a_large_advantage_survives():
    (got,) = compute_whitened_advantages(
        advantages=[torch.tensor([1e7, 1e7 + 1.0, 1e7 + 2.0])], loss_masks=[torch.ones(3, dtype=torch.bool)]
    )
    torch.testing.assert_close(got, torch.tensor([-1.0, 0.0, 1.0]))


def test_nothing_trained_and_no_sample_at_all_give_zeros():
    masks, rows = [torch.zeros(2, dtype=torch.bool)], [torch.full((2,), math.nan)]
    assert compute_whitened_advantages(advantages=rows, loss_masks=masks)[0].tolist() == [0, 0]
    assert compute_discounted_returns(token_rewards=rows, loss_masks=masks, gamma=0.9)[0].tolist() == [0, 0]
    advantages, returns = compute_gae(token_rewards=rows, values=rows, loss_masks=masks, gamma=1.0, gae_lambda=1.0)
    assert advantages[0].tolist() == returns[0].tolist() == [0, 0]
    assert compute_gae(token_rewards=[], values=[], loss_masks=[], gamma=1.0, gae_lambda=1.0) == ([], [])
    assert compute_whitened_advantages(advantages=[], loss_masks=[]) == []


def test_dtypes_stay_and_no_gradient_passes():
    mask = [torch.ones(2, dtype=torch.bool)]
    rewards, values = torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.float64, requires_grad=True)
    advantages, returns = compute_gae(token_rewards=[rewards], values=[values], loss_masks=mask, gamma=1, gae_lambda=1)
    assert (advantages[0].dtype, returns[0].dtype) == (torch.float32, torch.float64)
    rows = [
        advantages[0],
        returns[0],
        compute_token_rewards(rewards=rewards[:1], loss_masks=mask, token_kls=[rewards], kl_coef=1.0)[0],
        compute_token_advantages(advantages=rewards[:1], loss_masks=mask, token_kls=[values], kl_coef=1.0)[0],
        compute_whitened_advantages(advantages=[values], loss_masks=mask)[0],
    ]
    assert not any(row.requires_grad for row in rows)
    assert rows[3].dtype == torch.float32


def test_blocks_join_beside_samples_without_a_trained_token():
    masks = [torch.zeros(3, dtype=torch.bool), torch.ones(65, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)]
    rewards = [torch.ones(len(mask), dtype=torch.float64) for mask in masks]
    got = compute_discounted_returns(token_rewards=rewards, loss_masks=masks, gamma=1.0)
    assert [row.tolist() for row in got] == [[0.0] * 3, [65.0 - place for place in range(65)], [0.0] * 3]


def test_a_kl_of_another_dtype_changes_no_dtype_and_costs_nothing_without_a_coefficient():
    options = {"loss_masks": [torch.ones(1, dtype=torch.bool)], "token_kls": [torch.ones(1, dtype=torch.float64)]}
    for got in (
        compute_token_rewards(rewards=torch.ones(1), **options),
        compute_token_advantages(advantages=torch.ones(1), **options),
    ):
        assert got[0].dtype == torch.float32 and got[0].tolist() == [1.0]


def test_wrong_shapes_factors_and_rewards_are_refused():
    mask, row = [torch.ones(2, dtype=torch.bool)], [torch.ones(2)]
    with pytest.raises(ContractError, match=r"values=\[3\], loss_masks=\[2\]"):
        compute_gae(token_rewards=row, values=[torch.ones(3)], loss_masks=mask, gamma=1.0, gae_lambda=1.0)
    with pytest.raises(ContractError, match=r"compute_gae.gae_lambda"):
        compute_gae(token_rewards=row, values=row, loss_masks=mask, gamma=1.0, gae_lambda=1.5)
    with pytest.raises(ContractError, match=r"compute_discounted_returns.gamma: -0.1 is outside"):
        compute_discounted_returns(token_rewards=row, loss_masks=mask, gamma=-0.1)
    with pytest.raises(ContractError, match="compute_token_rewards"):
        compute_token_rewards(rewards=torch.ones(1), loss_masks=mask, token_kls=[torch.ones(3)])
    with pytest.raises(ContractError, match="compute_token_advantages"):
        compute_token_advantages(advantages=torch.ones(1), loss_masks=mask, token_kls=[torch.ones(3)])
    for rewards in (torch.tensor([math.nan]), torch.tensor([1])):
        with pytest.raises(ContractError, match="finite floats"):
            compute_token_rewards(rewards=rewards, loss_masks=mask)
    with pytest.raises(ValueError, match="zip"):
        compute_whitened_advantages(advantages=row, loss_masks=[])
    with pytest.raises(ValueError, match="zip"):
        compute_token_rewards(rewards=torch.ones(2), loss_masks=mask)
    with pytest.raises(ValueError, match="zip"):
        compute_token_advantages(advantages=torch.ones(2), loss_masks=mask)
    with pytest.raises(ValueError, match="zip"):
        compute_gae(token_rewards=row, values=[], loss_masks=mask, gamma=1.0, gae_lambda=1.0)
