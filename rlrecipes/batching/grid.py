"""The grid [data-parallel rank][micro-batch] of a train step. Owns who computes what; refuses to change any number.

Where a sample goes depends on the lengths of the samples and their order alone: a grid built again after
logprobs or advantages were filled in has the same places.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from rlrecipes.errors import ContractError
from rlrecipes.types import MicroBatch, Sample, list_optional_arrays

_OPTIONAL_FIELDS = ("loss_weights", *list_optional_arrays(MicroBatch))
_ID_FIELDS = ("teacher_topk_ids",)


def build_grid(
    samples: Sequence[Sample],
    *,
    num_ranks: int,
    max_tokens: int,
    sample_multiple: int = 1,
    pad_to_multiple: int = 1,
    num_micro_batches_multiple: int = 1,
) -> list[list[MicroBatch]]:
    """Pack samples into micro-batches, the same number on every rank, with tokens balanced over all of them.

    Every sample is in exactly one micro-batch. Where samples run out, a micro-batch holds nothing but padding, so
    that each rank takes part in every collective. A field that is None in the samples is None in the micro-batches;
    ``loss_weights`` are then 0.

    Args:
        samples: of the train step, in any order; that order breaks ties.
        num_ranks: data-parallel size, at least 1.
        max_tokens: most tokens of a micro-batch, padding included.
        sample_multiple: each sample counts as if padded to a multiple of it, which is left to whoever splits it.
        pad_to_multiple: each micro-batch is padded to a multiple of it with one fully masked sample.
        num_micro_batches_multiple: the number of micro-batches of a rank is a multiple of it.

    Returns:
        [num_ranks][number of micro-batches]; the number is the smallest found whose micro-batches fit.

    Raises:
        ContractError: a sample is empty or longer than a micro-batch, or only some samples have an optional field.
    """
    pad_to_multiple = math.lcm(sample_multiple, pad_to_multiple)
    capacity = max_tokens - max_tokens % pad_to_multiple
    _check_lengths(samples, capacity)
    fields = [name for name in _OPTIONAL_FIELDS if _is_present(name, samples)]
    lengths = np.array([len(sample.token_ids) for sample in samples], dtype=np.int64)
    lengths += -lengths % sample_multiple
    bins = _pack(lengths, capacity, num_ranks * num_micro_batches_multiple)
    rows = _deal(bins, [int(lengths[indices].sum()) for indices in bins], num_ranks)
    multiples = sample_multiple, pad_to_multiple
    return [[_build_micro_batch(samples, indices, fields, *multiples) for indices in row] for row in rows]


def unpack_tokens(
    grid: Sequence[Sequence[MicroBatch]], arrays: Sequence[Sequence[np.ndarray]], num_samples: int
) -> list[np.ndarray]:
    """Bring values computed per position back to the samples they belong to; the inverse of ``build_grid``.

    Args:
        grid: [rank][micro-batch], all of it.
        arrays: [rank][micro-batch][T], entry t speaking of the token after position t.
        num_samples: samples the grid was built from.

    Returns:
        One array a sample, aligned to its tokens: entry t speaks of token t, entry 0 is 0. In order of the samples.

    Raises:
        ContractError: an array's length is not its micro-batch's, or a sample is missing or there twice.
    """
    found: dict[int, np.ndarray] = {}
    for row, row_arrays in zip(grid, arrays, strict=True):
        for micro_batch, array in zip(row, row_arrays, strict=True):
            if len(array) != micro_batch.cu_seqlens[-1] or not found.keys().isdisjoint(micro_batch.sample_indices):
                raise ContractError(
                    "batching.unpack_tokens",
                    f"{len(array)} values for {micro_batch.cu_seqlens[-1]} tokens of samples "
                    f"{micro_batch.sample_indices}, or one of these came before",
                    "give one value a position, and each micro-batch once",
                )
            for place, index in enumerate(micro_batch.sample_indices):
                start, end = micro_batch.cu_seqlens[place : place + 2]
                found[index] = np.concatenate([np.zeros_like(array[:1]), array[start : end - 1]])
    if found.keys() != set(range(num_samples)):
        missing = sorted(set(range(num_samples)) - found.keys())
        raise ContractError(
            "batching.unpack_tokens", f"samples {missing} of {num_samples} are missing", "give every rank's row"
        )
    return [found[index] for index in range(num_samples)]


def _check_lengths(samples: Sequence[Sample], capacity: int) -> None:
    for index, sample in enumerate(samples):
        if not 0 < len(sample.token_ids) <= capacity:
            raise ContractError(
                "batching.build_grid",
                f"sample {index} (prompt {sample.prompt_index}, sibling {sample.sibling}) has "
                f"{len(sample.token_ids)} tokens; a micro-batch holds 1 to {capacity}",
                "raise parallel.max_tokens_per_micro_batch or limit the prompt and response lengths",
            )


def _is_present(name: str, samples: Sequence[Sample]) -> bool:
    num_present = sum(getattr(sample, name) is not None for sample in samples)
    if 0 < num_present < len(samples):
        raise ContractError(
            f"batching.build_grid.{name}",
            f"only {num_present} of {len(samples)} samples have it",
            "fill it in for all samples or for none",
        )
    return num_present > 0


def _pack(lengths: np.ndarray, capacity: int, num_bins_multiple: int) -> list[list[int]]:
    """Sample indices of each micro-batch: as few as fit, and among these balanced ones if there are any."""
    num_bins = num_bins_multiple * max(1, -(-int(lengths.sum()) // (capacity * num_bins_multiple)))
    while True:
        for fill in (_fill_emptiest, _fill_first):
            bins = fill(lengths, capacity, num_bins)
            if bins is not None:
                return bins
        num_bins += num_bins_multiple


def _fill_emptiest(lengths: np.ndarray, capacity: int, num_bins: int) -> list[list[int]] | None:
    """Longest processing time first: balanced, but may need a bin more than there must be; None when one is too few."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    emptiest = [(0, number) for number in range(num_bins)]  # a heap
    for index in np.argsort(-lengths, kind="stable").tolist():
        total, number = emptiest[0]
        total += int(lengths[index])
        if total > capacity:
            return None
        heapq.heapreplace(emptiest, (total, number))
        bins[number].append(index)
    return bins


def _fill_first(lengths: np.ndarray, capacity: int, num_bins: int) -> list[list[int]] | None:
    """First fit decreasing: few bins, unbalanced; None when these are too few."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    free = np.full(num_bins, capacity, dtype=np.int64)
    for index in np.argsort(-lengths, kind="stable").tolist():
        number = int(np.argmax(free >= lengths[index]))
        if free[number] < lengths[index]:
            return None
        free[number] -= lengths[index]
        bins[number].append(index)
    return bins


def _deal(bins: list[list[int]], totals: list[int], num_ranks: int) -> list[list[list[int]]]:
    """Deal bins to ranks, as many to each, fullest first to the rank with the fewest tokens so far."""
    rows: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    row_totals = [0] * num_ranks
    for place in sorted(range(len(bins)), key=lambda place: -totals[place]):
        rank = min(range(num_ranks), key=lambda rank: (len(rows[rank]) * num_ranks >= len(bins), row_totals[rank]))
        rows[rank].append(bins[place])
        row_totals[rank] += totals[place]
    return rows


def _build_micro_batch(
    samples: Sequence[Sample],
    indices: list[int],
    fields: Sequence[str],
    sample_multiple: int,
    pad_to_multiple: int,
) -> MicroBatch:
    chosen = [samples[index] for index in indices]
    lengths = [len(sample.token_ids) for sample in chosen]
    counted = sum(length + -length % sample_multiple for length in lengths)
    num_padding = -counted % pad_to_multiple if chosen else pad_to_multiple
    if num_padding:
        lengths.append(num_padding)
    starts = np.cumsum([0, *lengths], dtype=np.int32)

    def lay_out(name: str, dtype: type[np.generic], shift: int) -> np.ndarray:
        """One field over the micro-batch; shift 1 moves it from a token to the position that predicts the token."""
        width = np.shape(getattr(samples[0], name))[1:] if samples else ()
        laid_out = np.zeros((starts[-1], *width), dtype)
        for start, sample in zip(starts, chosen, strict=False):
            values = getattr(sample, name)[shift:]
            laid_out[start : start + len(values)] = values
        return laid_out

    token_ids = lay_out("token_ids", np.int64, 0)
    target_ids = np.append(token_ids[1:], 0)
    target_ids[starts[1:] - 1] = 0
    loss_mask = lay_out("loss_mask", np.bool_, 1)
    trained = {name: lay_out(name, np.int64 if name in _ID_FIELDS else np.float32, 1) for name in fields}
    for values in trained.values():
        values[~loss_mask] = 0
    return MicroBatch(
        token_ids=token_ids,
        position_ids=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        cu_seqlens=starts,
        target_ids=target_ids,
        loss_mask=loss_mask,
        loss_weights=trained.pop("loss_weights", np.zeros(starts[-1], np.float32)),
        sample_indices=tuple(indices),
        **trained,
    )
