import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrecipes.algos.aggregation import compute_loss_weights
from rlrecipes.errors import ContractError

MASKS = st.lists(st.tuples(st.integers(0, 3), st.lists(st.booleans(), min_size=1, max_size=6)), min_size=1, max_size=10)


def aggregate(mode, losses, masks, rollout_ids):
    """The train step's loss, as the trainer sums it."""
    weights = compute_loss_weights(
        mode=mode, loss_masks=[torch.tensor(mask, dtype=torch.bool) for mask in masks], rollout_ids=rollout_ids
    )
    return sum(float((weight * torch.tensor(loss)).sum()) for weight, loss in zip(weights, losses, strict=True))


def slow_loss(mode, losses, masks, rollout_ids):
    of_rollout = {rollout: [] for rollout in rollout_ids}
    for rollout, loss, mask in zip(rollout_ids, losses, masks, strict=True):
        of_rollout[rollout] += [value for value, is_trained in zip(loss, mask, strict=True) if is_trained]
    if mode == "per_sequence":
        return sum(sum(values) / len(values) if values else 0.0 for values in of_rollout.values()) / len(of_rollout)
    tokens = [value for values in of_rollout.values() for value in values]
    return sum(tokens) / len(tokens) if tokens else 0.0


@settings(max_examples=100, deadline=None)
@given(rows=MASKS, mode=st.sampled_from(["per_sequence", "per_token"]))
def test_equals_a_loop_over_rollouts_with_fan_out_and_masked_ones(rows, mode):
    rollout_ids = [rollout for rollout, _ in rows]
    masks = [mask for _, mask in rows]
    losses = [[float(1 + 7 * row + token) for token in range(len(mask))] for row, mask in enumerate(masks)]
    got = aggregate(mode, losses, masks, rollout_ids)
    assert got == pytest.approx(slow_loss(mode, losses, masks, rollout_ids), rel=1e-12)


def test_token_mean_is_not_a_mean_of_micro_batch_means():
    losses = [[0.5] * 100, [0.3] * 900]
    masks = [[True] * 100, [True] * 900]
    assert aggregate("per_token", losses, masks, ["a", "b"]) == pytest.approx(0.32)
    assert aggregate("per_sequence", losses, masks, ["a", "b"]) == pytest.approx(0.4)


def test_a_rollout_that_yields_many_samples_weighs_as_much_as_any_other():
    masks = [[True], [True], [True], [True]]
    rollout_ids = [(5, 0), (5, 0), (5, 0), (5, 1)]
    assert aggregate("per_sequence", [[1.0], [1.0], [1.0], [0.0]], masks, rollout_ids) == pytest.approx(0.5)


def test_a_fully_masked_rollout_counts_as_a_rollout_but_not_as_a_token():
    masks = [[False, True, True], [False, False]]
    losses = [[0.0, 1.0, 3.0], [100.0, 100.0]]
    assert aggregate("per_sequence", losses, masks, [0, 1]) == pytest.approx(1.0)
    assert aggregate("per_token", losses, masks, [0, 1]) == pytest.approx(2.0)


@pytest.mark.parametrize("mode", ["per_sequence", "per_token"])
def test_a_train_step_without_a_trained_token_has_zero_weights(mode):
    (weights,) = compute_loss_weights(mode=mode, loss_masks=[torch.zeros(3, dtype=torch.bool)], rollout_ids=[0])
    assert weights.tolist() == [0.0, 0.0, 0.0]


def test_unknown_mode_and_missing_rollout_ids_are_refused():
    masks = [torch.ones(2, dtype=torch.bool)]
    with pytest.raises(ContractError, match="unknown mode 'per_prompt'"):
        compute_loss_weights(mode="per_prompt", loss_masks=masks, rollout_ids=[0])
    with pytest.raises(ValueError, match="zip"):
        compute_loss_weights(mode="per_token", loss_masks=masks, rollout_ids=[])
