import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrecipes.algos.advantages import compute_group_advantages
from rlrecipes.algos.aggregation import compute_loss_weights
from rlrecipes.algos.reward_shaping import compute_filtered_loss_masks, compute_overlong_penalties
from rlrecipes.errors import ContractError


def slow_penalty(length, max_tokens, buffer_tokens):
    if length <= max_tokens - buffer_tokens:
        return 0.0
    return (max_tokens - buffer_tokens - length) / buffer_tokens if length <= max_tokens else -1.0


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(0, 30), max_size=8), max_tokens=st.integers(1, 20), data=st.data())
def test_penalty_equals_the_three_cases(lengths, max_tokens, data):
    buffer_tokens = data.draw(st.integers(1, max_tokens))
    got = compute_overlong_penalties(
        num_tokens=torch.tensor(lengths, dtype=torch.int64), max_tokens=max_tokens, buffer_tokens=buffer_tokens
    )
    assert got.dtype == torch.float64
    assert got.tolist() == [slow_penalty(length, max_tokens, buffer_tokens) for length in lengths]


@pytest.mark.parametrize("buffer_tokens", [0, 11, -1])
def test_a_buffer_that_does_not_fit_is_refused(buffer_tokens):
    with pytest.raises(ContractError, match="does not lie inside 10"):
        compute_overlong_penalties(num_tokens=torch.tensor([1]), max_tokens=10, buffer_tokens=buffer_tokens)


def test_lengths_that_are_not_integers_are_refused():
    with pytest.raises(ContractError, match="float32"):
        compute_overlong_penalties(num_tokens=torch.tensor([1.0]), max_tokens=10, buffer_tokens=5)


def test_filtering_takes_samples_out_of_the_loss_and_leaves_its_input():
    masks = [torch.tensor([False, True]), torch.tensor([True, True, False])]
    got = compute_filtered_loss_masks(loss_masks=masks, is_rejected=torch.tensor([False, True]))
    assert [row.tolist() for row in got] == [[False, True], [False, False, False]]
    got[0][1] = False
    assert [row.tolist() for row in masks] == [[False, True], [True, True, False]]


def test_filtering_needs_one_entry_a_sample():
    with pytest.raises(ValueError, match="zip"):
        compute_filtered_loss_masks(loss_masks=[torch.ones(1) > 0] * 2, is_rejected=torch.tensor([True]))


def test_a_filtered_rollout_leaves_baseline_and_loss_and_keeps_its_place_in_the_denominator():
    rewards, is_cut = torch.tensor([1.0, 0.0, 1.0, -50.0]), torch.tensor([False, False, False, True])
    advantages = compute_group_advantages(
        rewards=rewards, group_ids=torch.zeros(4, dtype=torch.int64), normalize_std=False, is_counted=~is_cut
    )
    torch.testing.assert_close(advantages, torch.tensor([1 / 3, -2 / 3, 1 / 3, 0.0]))
    masks = compute_filtered_loss_masks(loss_masks=[torch.ones(2, dtype=torch.bool)] * 4, is_rejected=is_cut)
    shares = {
        mode: [
            float(row.sum())
            for row in compute_loss_weights(
                mode=mode, loss_masks=masks, rollout_ids=[0, 1, 2, 3], prompt_ids=["p"] * 4, divisor=4.0
            )
        ]
        for mode in ("per_sequence", "per_rollout", "per_prompt", "per_token", "constant")
    }
    quarter, third, eighth = ([share] * 3 + [0.0] for share in (1 / 4, 1 / 3, 1 / 8))
    assert shares == {
        "per_sequence": pytest.approx(quarter),
        "per_rollout": pytest.approx(quarter),
        "per_prompt": pytest.approx(third),
        "per_token": pytest.approx(third),
        "constant": pytest.approx(eighth),
    }
