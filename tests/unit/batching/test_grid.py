from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrecipes.batching.grid import build_grid, unpack_tokens
from rlrecipes.errors import ContractError
from rlrecipes.types import Sample

LENGTHS = st.lists(st.integers(1, 12), max_size=30)
LAYOUT = {
    "num_ranks": st.integers(1, 4),
    "max_tokens": st.integers(16, 40),
    "pad_to_multiple": st.sampled_from([1, 4]),
    "num_micro_batches_multiple": st.integers(1, 3),
}


def sample_of(length, index=0, **fields):
    token_ids = tuple(100 * index + token for token in range(1, length + 1))
    loss_mask = tuple(token > 0 for token in range(length))
    return Sample(
        token_ids=token_ids, loss_mask=loss_mask, rollout_logprobs=None, prompt_index=index, sibling=0, **fields
    )


def samples_of(lengths):
    return [sample_of(length, index) for index, length in enumerate(lengths)]


def micro_batches_of(grid):
    return [micro_batch for row in grid for micro_batch in row]


def rank_tokens(grid):
    return [sum(len(micro_batch.token_ids) for micro_batch in row) for row in grid]


def test_arrays_are_aligned_to_the_position_that_predicts():
    samples = [
        Sample(
            token_ids=(5, 6, 7, 8),
            loss_mask=(False, False, True, True),
            rollout_logprobs=(0.0, 0.0, -0.3, -1.2),
            prompt_index=0,
            sibling=0,
            advantages=np.array([9.0, np.nan, 1.0, 2.0]),
            old_logprobs=np.array([9.0, 1e9, -0.4, -1.4]),
            loss_weights=np.array([9.0, 9.0, 0.25, 0.75]),
        ),
        Sample(
            token_ids=(3, 4),
            loss_mask=(False, True),
            rollout_logprobs=(0.0, -0.5),
            prompt_index=1,
            sibling=0,
            advantages=np.array([9.0, -1.0]),
            old_logprobs=np.array([9.0, -0.6]),
            loss_weights=np.array([9.0, 0.5]),
        ),
    ]
    ((micro_batch,),) = build_grid(samples, num_ranks=1, max_tokens=8, pad_to_multiple=4)
    assert micro_batch.token_ids.tolist() == [5, 6, 7, 8, 3, 4, 0, 0]
    assert micro_batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    assert micro_batch.cu_seqlens.tolist() == [0, 4, 6, 8]
    assert micro_batch.target_ids.tolist() == [6, 7, 8, 0, 4, 0, 0, 0]
    assert micro_batch.loss_mask.tolist() == [False, True, True, False, True, False, False, False]
    assert micro_batch.loss_weights.tolist() == [0, 0.25, 0.75, 0, 0.5, 0, 0, 0]
    assert micro_batch.advantages.tolist() == [0, 1, 2, 0, -1, 0, 0, 0]
    np.testing.assert_allclose(micro_batch.old_logprobs, [0, -0.4, -1.4, 0, -0.6, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(micro_batch.rollout_logprobs, [0, -0.3, -1.2, 0, -0.5, 0, 0, 0], rtol=1e-6)
    assert micro_batch.ref_logprobs is None
    assert micro_batch.sample_indices == (0, 1)
    assert (micro_batch.token_ids.dtype, micro_batch.cu_seqlens.dtype) == (np.int64, np.int32)
    assert (micro_batch.loss_mask.dtype, micro_batch.advantages.dtype) == (np.bool_, np.float32)


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, **LAYOUT)
def test_every_sample_once_and_every_rank_alike(
    lengths, num_ranks, max_tokens, pad_to_multiple, num_micro_batches_multiple
):
    grid = build_grid(
        samples_of(lengths),
        num_ranks=num_ranks,
        max_tokens=max_tokens,
        pad_to_multiple=pad_to_multiple,
        num_micro_batches_multiple=num_micro_batches_multiple,
    )
    assert len(grid) == num_ranks
    num_micro_batches = len(grid[0])
    assert num_micro_batches % num_micro_batches_multiple == 0 and num_micro_batches > 0
    assert all(len(row) == num_micro_batches for row in grid)
    placed = [index for micro_batch in micro_batches_of(grid) for index in micro_batch.sample_indices]
    assert sorted(placed) == list(range(len(lengths)))
    for micro_batch in micro_batches_of(grid):
        num_tokens = len(micro_batch.token_ids)
        sizes = np.diff(micro_batch.cu_seqlens).tolist()
        num_own = sum(sizes[: len(micro_batch.sample_indices)])
        assert 0 < num_tokens <= max_tokens and num_tokens % pad_to_multiple == 0
        assert num_tokens - num_own < pad_to_multiple or not micro_batch.sample_indices
        assert sizes[: len(micro_batch.sample_indices)] == [lengths[index] for index in micro_batch.sample_indices]
        assert min(sizes) > 0
        assert not micro_batch.loss_mask[num_own:].any()


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, data=st.data(), **LAYOUT)
def test_unpacking_is_the_inverse(lengths, data, **layout):
    samples = samples_of(lengths)
    grid = build_grid(samples, **layout)
    arrays = [[micro_batch.target_ids.astype(np.float32) for micro_batch in row] for row in grid]
    unpacked = unpack_tokens(grid, arrays, len(samples))
    assert [array.tolist() for array in unpacked] == [[0.0, *sample.token_ids[1:]] for sample in samples]
    assert all(array.dtype == np.float32 for array in unpacked)


@pytest.mark.parametrize("name", ["old_values", "returns"])
def test_what_the_critic_reads_is_aligned_and_masked_like_the_rest(name):
    samples = [
        sample_of(3, 0, **{name: np.array([9.0, 0.5, -0.25])}),
        replace(sample_of(3, 1), loss_mask=(False, False, True), **{name: np.array([9.0, np.nan, 2.0])}),
    ]
    ((micro_batch,),) = build_grid(samples, num_ranks=1, max_tokens=8)
    assert getattr(micro_batch, name).tolist() == [0.5, -0.25, 0, 0, 2, 0]
    assert getattr(micro_batch, name).dtype == np.float32
    ((without,),) = build_grid(samples_of([3, 3]), num_ranks=1, max_tokens=8)
    assert getattr(without, name) is None
    for broken in ([samples[0], sample_of(3, 1)], [replace(samples[0], **{name: None}), samples[1]]):
        with pytest.raises(ContractError, match=name):
            build_grid(broken, num_ranks=1, max_tokens=8)
    for record in (samples[0], micro_batch):
        with pytest.raises(ContractError, match=f"{name}=2"):
            replace(record, **{name: np.zeros(2)})


@settings(max_examples=50, deadline=None)
@given(lengths=LENGTHS, **LAYOUT)
def test_filled_in_fields_do_not_move_a_sample(lengths, **layout):
    samples = samples_of(lengths)
    filled = [replace(sample, ref_logprobs=np.zeros(len(sample.token_ids)), reward=1.0) for sample in samples]
    places = [
        [micro_batch.sample_indices for micro_batch in micro_batches_of(build_grid(batch, **layout))]
        for batch in (samples, filled)
    ]
    assert places[0] == places[1]


def test_ranks_without_a_sample_get_padding_with_the_same_fields():
    grid = build_grid(
        [sample_of(3, advantages=np.ones(3), loss_weights=np.ones(3))], num_ranks=3, max_tokens=8, pad_to_multiple=4
    )
    empty = [micro_batch for micro_batch in micro_batches_of(grid) if not micro_batch.sample_indices]
    assert len(empty) == 2
    for micro_batch in empty:
        assert micro_batch.cu_seqlens.tolist() == [0, 4]
        assert not micro_batch.loss_mask.any() and not micro_batch.loss_weights.any()
        assert micro_batch.advantages.tolist() == [0, 0, 0, 0] and micro_batch.ref_logprobs is None


def test_tokens_are_balanced_over_ranks():
    lengths = np.random.default_rng(0).lognormal(5, 1, 96).astype(int) + 1
    grid = build_grid(samples_of(lengths.tolist()), num_ranks=4, max_tokens=4096)
    tokens = rank_tokens(grid)
    assert max(tokens) < 1.01 * min(tokens)
    grid = build_grid(samples_of([8, 8, 1, 1, 1, 1]), num_ranks=2, max_tokens=8)
    assert rank_tokens(grid) == [10, 10]
    grid = build_grid(samples_of([8, 7, 6, 5]), num_ranks=2, max_tokens=8)
    assert rank_tokens(grid) == [13, 13]


def test_ties_go_by_the_order_of_samples():
    ((micro_batch,),) = build_grid(samples_of([2] * 200), num_ranks=1, max_tokens=400)
    assert micro_batch.sample_indices == tuple(range(200))


def test_full_bins_are_found_where_balanced_ones_do_not_fit():
    grid = build_grid(samples_of([3, 3, 2, 2, 2]), num_ranks=2, max_tokens=6)
    assert [[micro_batch.sample_indices for micro_batch in row] for row in grid] == [[(0, 1)], [(2, 3, 4)]]


def test_balanced_bins_are_preferred_to_full_ones():
    grid = build_grid(samples_of([2, 2, 2, 2]), num_ranks=2, max_tokens=8)
    assert rank_tokens(grid) == [4, 4]


def test_a_sample_longer_than_a_micro_batch_is_named_with_the_cap():
    samples = samples_of([3, 9])
    with pytest.raises(ContractError, match=r"sample 1 \(prompt 1, sibling 0\) has 9 tokens.* 1 to 8"):
        build_grid(samples, num_ranks=1, max_tokens=11, pad_to_multiple=4)
    assert build_grid(samples, num_ranks=1, max_tokens=12, pad_to_multiple=4)


def test_an_empty_sample_and_a_field_in_only_some_samples_are_refused():
    with pytest.raises(ContractError, match="has 0 tokens"):
        build_grid([sample_of(0)], num_ranks=1, max_tokens=8)
    with pytest.raises(ContractError, match=r"advantages: only 1 of 2 samples"):
        build_grid([sample_of(2), sample_of(2, advantages=np.ones(2))], num_ranks=1, max_tokens=8)


@pytest.mark.parametrize("change", ["short array", "missing rank", "rank twice"])
def test_unpacking_refuses_what_is_not_the_whole_grid(change):
    grid = build_grid(samples_of([4, 4]), num_ranks=2, max_tokens=8)
    arrays = [[np.ones(len(micro_batch.token_ids)) for micro_batch in row] for row in grid]
    if change == "short array":
        arrays[1][0] = np.ones(3)
    rows = {"short array": [0, 1], "missing rank": [0], "rank twice": [0, 0, 1]}[change]
    with pytest.raises(ContractError, match=r"unpack_tokens"):
        unpack_tokens([grid[row] for row in rows], [arrays[row] for row in rows], 2)


def test_there_are_as_many_micro_batches_as_must_be_when_none_can_be_full():
    grid = build_grid(samples_of([6, 6, 6]), num_ranks=1, max_tokens=10)
    assert [len(row) for row in grid] == [3]  # 18 tokens would go into two of 10, three samples of 6 do not


def test_a_sample_takes_the_place_that_its_padding_will_need():
    samples = samples_of([5, 5])
    for max_tokens, num_micro_batches in ((15, 2), (16, 1)):
        (row,) = build_grid(samples, num_ranks=1, max_tokens=max_tokens, sample_multiple=4)
        assert len(row) == num_micro_batches
    assert len(build_grid(samples, num_ranks=1, max_tokens=15)[0]) == 1
    with pytest.raises(ContractError, match="5 tokens"):
        build_grid(samples, num_ranks=1, max_tokens=7, sample_multiple=4)
