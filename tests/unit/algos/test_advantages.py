import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrecipes.algos.advantages import compute_group_advantages, compute_zero_variance
from rlrecipes.errors import ContractError

REWARDS = st.one_of(st.sampled_from([0.0, 1.0, 0.9, -1.5]), st.floats(-100, 100, width=32))
GROUPS = st.sampled_from([7, 3, 11, -2])
BATCH = st.lists(st.tuples(GROUPS, REWARDS), min_size=1, max_size=24)
ROWS = st.lists(st.tuples(GROUPS, REWARDS, st.sampled_from([True, True, True, False])), min_size=1, max_size=24)


def slow_advantages(rows, normalize_std, baseline, ddof, eps):
    """Rollout by rollout; rows are (group, reward, is counted)."""
    advantages = []
    for place, (group, reward, is_counted) in enumerate(rows):
        others = [r for at, (g, r, c) in enumerate(rows) if g == group and c and at != place]
        siblings = [*others, reward]
        if not is_counted:
            advantages.append(0.0)
        elif baseline == "none":
            advantages.append(reward)
        elif max(siblings) == min(siblings):
            advantages.append(0.0)
        else:
            mean = math.fsum(siblings) / len(siblings)
            scale = math.sqrt(math.fsum((r - mean) ** 2 for r in siblings) / (len(siblings) - ddof)) + eps
            compared = mean if baseline == "group_mean" else math.fsum(others) / len(others)
            advantages.append((reward - compared) / (scale if normalize_std else 1.0))
    return advantages


def advantages_of(pairs, dtype=torch.float64, **options):
    return compute_group_advantages(
        rewards=torch.tensor([reward for _, reward in pairs], dtype=dtype),
        group_ids=torch.tensor([group for group, _ in pairs]),
        **options,
    )


@settings(max_examples=200, deadline=None)
@given(
    rows=ROWS,
    form=st.sampled_from(
        [
            ("group_mean", True),
            ("group_mean", False),
            ("leave_one_out", True),
            ("leave_one_out", False),
            ("none", False),
        ]
    ),
    ddof=st.sampled_from([0, 1]),
    eps=st.sampled_from([1e-6, 0.5]),
)
def test_equals_a_loop_over_unequal_interleaved_groups(rows, form, ddof, eps):
    baseline, normalize_std = form
    got = advantages_of(
        [(group, reward if is_counted else math.nan) for group, reward, is_counted in rows],
        normalize_std=normalize_std,
        baseline=baseline,
        is_counted=torch.tensor([is_counted for _, _, is_counted in rows]),
        ddof=ddof,
        eps=eps,
    )
    expected = torch.tensor(slow_advantages(rows, normalize_std, baseline, ddof, eps), dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("poison", [math.nan, -math.inf, 1e9])
def test_rejected_rows_are_not_in_the_baseline(poison):
    rewards = torch.tensor([1.0, 0.0, poison, 2.0])
    options = {"group_ids": torch.tensor([0, 0, 0, 1]), "is_counted": torch.tensor([True, True, False, True])}
    plain = compute_group_advantages(rewards=rewards, normalize_std=False, **options)
    assert plain.tolist() == [0.5, -0.5, 0.0, 0.0]
    raw = compute_group_advantages(rewards=rewards, normalize_std=False, baseline="none", **options)
    assert raw.tolist() == [1.0, 0.0, 0.0, 2.0] and raw.dtype == rewards.dtype
    assert compute_zero_variance(rewards=rewards, **options).tolist() == [False, True]


def test_a_group_of_rejected_rows_teaches_nothing():
    options = {"group_ids": torch.tensor([3, 3]), "is_counted": torch.tensor([False, False])}
    rewards = torch.tensor([1.0, 0.0])
    assert compute_group_advantages(rewards=rewards, normalize_std=True, **options).tolist() == [0.0, 0.0]
    assert compute_zero_variance(rewards=rewards, **options).tolist() == [True]


def test_leaving_one_out_is_unbiased_and_the_group_mean_is_not():
    """Two actions, two rollouts each drawn from the policy: E[advantage x grad log policy], enumerated."""
    logit = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    logprobs = torch.stack([torch.nn.functional.logsigmoid(logit), torch.nn.functional.logsigmoid(-logit)])
    action_rewards = torch.tensor([1.0, 0.2], dtype=torch.float64)
    (true,) = torch.autograd.grad((logprobs.exp() * action_rewards).sum(), logit, retain_graph=True)
    gradients = {}
    for baseline in ("leave_one_out", "group_mean"):
        surrogate = torch.zeros((), dtype=torch.float64)
        for pair in ([0, 0], [0, 1], [1, 0], [1, 1]):
            advantages = compute_group_advantages(
                rewards=action_rewards[pair],
                group_ids=torch.zeros(2, dtype=torch.int64),
                normalize_std=False,
                baseline=baseline,
            )
            chance = logprobs[pair].sum().detach().exp()
            surrogate = surrogate + chance * (advantages * logprobs[pair]).mean()
        (gradients[baseline],) = torch.autograd.grad(surrogate, logit, retain_graph=True)
    torch.testing.assert_close(gradients["leave_one_out"], true)
    torch.testing.assert_close(gradients["group_mean"], true / 2)


@pytest.mark.parametrize(("baseline", "normalize_std"), [("mean", False), ("none", True)])
def test_a_baseline_that_no_algorithm_has_is_refused(baseline, normalize_std):
    with pytest.raises(ContractError, match="no algorithm has baseline"):
        advantages_of([(0, 1.0)], normalize_std=normalize_std, baseline=baseline)


@settings(max_examples=50, deadline=None)
@given(pairs=BATCH, data=st.data())
def test_rewards_and_rows_stay_paired_under_permutation(pairs, data):
    order = data.draw(st.permutations(range(len(pairs))))
    baseline = data.draw(st.sampled_from(["group_mean", "leave_one_out"]))
    straight = advantages_of(pairs, normalize_std=True, baseline=baseline)
    shuffled = advantages_of([pairs[place] for place in order], normalize_std=True, baseline=baseline)
    torch.testing.assert_close(shuffled, straight[list(order)], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 3, 6, 7, 1000])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(baseline, dtype, size):
    rewards = torch.full((size,), 0.9, dtype=dtype)
    got = compute_group_advantages(
        rewards=rewards,
        group_ids=torch.zeros(size, dtype=torch.int64),
        normalize_std=True,
        baseline=baseline,
        eps=0.0,
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
