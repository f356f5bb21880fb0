import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrecipes.algos.aggregation import compute_loss_weights
from rlrecipes.errors import ContractError

MODES = ["per_sequence", "per_rollout", "per_prompt", "per_token", "constant"]
MASKS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 2), st.lists(st.booleans(), min_size=1, max_size=6)),
    min_size=1,
    max_size=10,
)
DIVISOR = 8.0


def weights_of(mode, masks, rollout_ids):
    """The first entry of a rollout's id is its prompt."""
    return compute_loss_weights(
        mode=mode,
        loss_masks=[torch.tensor(mask, dtype=torch.bool) for mask in masks],
        rollout_ids=rollout_ids,
        prompt_ids=[prompt for prompt, _ in rollout_ids],
        divisor=DIVISOR,
    )


def aggregate(mode, losses, masks, rollout_ids):
    """The train step's loss, as the trainer sums it."""
    pairs = zip(weights_of(mode, masks, rollout_ids), losses, strict=True)
    return sum(float((weight * torch.tensor(loss)).sum()) for weight, loss in pairs)


def slow_loss(mode, losses, masks, rollout_ids):
    unit_of = {
        "per_sequence": lambda index: index,
        "per_rollout": lambda index: rollout_ids[index],
        "constant": lambda index: rollout_ids[index],
        "per_prompt": lambda index: rollout_ids[index][0],
        "per_token": lambda index: "all",
    }[mode]
    of_unit = {}
    for index, (loss, mask) in enumerate(zip(losses, masks, strict=True)):
        trained = [value for value, is_trained in zip(loss, mask, strict=True) if is_trained]
        of_unit.setdefault(unit_of(index), []).extend(trained)
    if mode == "constant":
        return sum(sum(values) / DIVISOR for values in of_unit.values()) / len(of_unit)
    return sum(sum(values) / len(values) if values else 0.0 for values in of_unit.values()) / len(of_unit)


@settings(max_examples=200, deadline=None)
@given(rows=MASKS, mode=st.sampled_from(MODES))
def test_equals_a_loop_with_fan_out_unequal_groups_and_masked_ones(rows, mode):
    rollout_ids = [(prompt, sibling) for prompt, sibling, _ in rows]
    masks = [mask for _, _, mask in rows]
    losses = [[float(1 + 7 * row + token) for token in range(len(mask))] for row, mask in enumerate(masks)]
    got = aggregate(mode, losses, masks, rollout_ids)
    assert got == pytest.approx(slow_loss(mode, losses, masks, rollout_ids), rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(rows=MASKS, mode=st.sampled_from(MODES), data=st.data())
def test_weights_move_with_their_samples(rows, mode, data):
    order = data.draw(st.permutations(range(len(rows))))
    straight, shuffled = (
        weights_of(mode, [mask for _, _, mask in some], [(prompt, sibling) for prompt, sibling, _ in some])
        for some in (rows, [rows[place] for place in order])
    )
    assert all(torch.equal(shuffled[at], straight[place]) for at, place in enumerate(order))


def test_token_mean_is_not_a_mean_of_micro_batch_means():
    losses = [[0.5] * 100, [0.3] * 900]
    masks = [[True] * 100, [True] * 900]
    rollout_ids = [("a", 0), ("b", 0)]
    assert aggregate("per_token", losses, masks, rollout_ids) == pytest.approx(0.32)
    assert aggregate("per_rollout", losses, masks, rollout_ids) == pytest.approx(0.4)
    assert aggregate("constant", losses, masks, rollout_ids) == pytest.approx(320 / 16)


def test_a_rollout_that_yields_many_samples_weighs_as_much_as_any_other():
    losses, masks = [[1.0], [1.0], [1.0], [0.0]], [[True]] * 4
    rollout_ids = [(5, 0), (5, 0), (5, 0), (5, 1)]
    assert aggregate("per_rollout", losses, masks, rollout_ids) == pytest.approx(0.5)
    assert aggregate("per_sequence", losses, masks, rollout_ids) == pytest.approx(0.75)


def test_a_prompt_with_more_rollouts_or_longer_ones_weighs_as_much_as_any_other():
    losses = [[1.0], [1.0], [1.0], [0.0, 0.0, 3.0]]
    masks = [[True], [True], [True], [True, True, True]]
    rollout_ids = [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert aggregate("per_prompt", losses, masks, rollout_ids) == pytest.approx(1.0)
    # Within a prompt all tokens weigh alike: (1 + 3) / 2 tokens of prompt 0, not the mean of 1 and 3 halves.
    assert aggregate("per_prompt", [[1.0], [0.0, 3.0]], [[True], [True, True]], [(0, 0), (0, 1)]) == pytest.approx(
        4 / 3
    )


def test_a_fully_masked_unit_counts_as_one_but_not_as_a_token():
    masks = [[False, True, True], [False, False]]
    losses = [[0.0, 1.0, 3.0], [100.0, 100.0]]
    got = {mode: aggregate(mode, losses, masks, [(0, 0), (1, 0)]) for mode in MODES}
    assert got == {"per_sequence": 1.0, "per_rollout": 1.0, "per_prompt": 1.0, "per_token": 2.0, "constant": 0.25}


@pytest.mark.parametrize("mode", MODES)
def test_a_train_step_without_a_trained_token_has_zero_weights(mode):
    (weights,) = weights_of(mode, [[False] * 3], [(0, 0)])
    assert weights.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("divisor", [None, 0.0, -1.0, float("nan")])
def test_a_constant_that_cannot_divide_is_refused(divisor):
    with pytest.raises(ContractError, match="constant cannot divide"):
        compute_loss_weights(mode="constant", loss_masks=[torch.ones(1) > 0], rollout_ids=[0], divisor=divisor)


def test_unknown_mode_and_missing_ids_are_refused():
    masks = [torch.ones(2, dtype=torch.bool)]
    with pytest.raises(ContractError, match="'per_group' is unknown"):
        compute_loss_weights(mode="per_group", loss_masks=masks, rollout_ids=[0])
    with pytest.raises(ContractError, match="prompt_ids are missing"):
        compute_loss_weights(mode="per_prompt", loss_masks=masks, rollout_ids=[0])
    for mode in MODES:
        with pytest.raises(ValueError, match="zip"):
            compute_loss_weights(mode=mode, loss_masks=masks, rollout_ids=[], prompt_ids=[], divisor=1.0)


def test_a_divisor_may_be_a_fraction():
    (weights,) = compute_loss_weights(
        mode="constant", loss_masks=[torch.ones(1, dtype=torch.bool)], rollout_ids=[0], divisor=0.5
    )
    assert weights.tolist() == [2.0]
