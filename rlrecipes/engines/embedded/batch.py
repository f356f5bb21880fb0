"""The requests that hold memory, as rows of arrays. Owns rows and the building of steps; refuses to decide who gets in.

Rows are compact: the last one moves into a hole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rlrecipes.engines.embedded.request import Request
from rlrecipes.engines.embedded.sampling import Draw, build_draw, compute_uniforms
from rlrecipes.engines.embedded.transformer import KEY_BLOCK, AttentionGroup, Step

MAX_GATHERED_TOKENS = 1 << 16
"""Keys that one deterministic attention call gathers at most, over all its rows."""


@dataclass(frozen=True, slots=True)
class Extension:
    """A request's part of a step: compute ``count`` tokens from ``num_computed`` on."""

    row: int
    count: int


class Batch:
    """Rows of running requests.

    Args:
        max_rows: most requests.
        max_tokens: longest request.
        is_deterministic: selects how attention is grouped.
    """

    def __init__(self, max_rows: int, max_tokens: int, is_deterministic: bool) -> None:
        self.requests: list[Request] = []
        self.is_deterministic = is_deterministic
        width = -(-max_tokens // KEY_BLOCK) * KEY_BLOCK
        self._slots = torch.zeros(max_rows, width, dtype=torch.int64)
        self.slots: np.ndarray = self._slots.numpy()
        self.lengths = np.zeros(max_rows, dtype=np.int64)
        self.last_tokens = np.zeros(max_rows, dtype=np.int64)
        self.has_penalty = np.zeros(max_rows, dtype=np.bool_)
        self._temperatures = np.ones(max_rows, dtype=np.float32)
        self._top_ps = np.ones(max_rows, dtype=np.float32)
        self._min_ps = np.zeros(max_rows, dtype=np.float32)
        self._top_ks = np.ones(max_rows, dtype=np.int64)
        self._seeds = np.zeros(max_rows, dtype=np.uint64)
        self._columns = torch.arange(width)

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request, tokens: np.ndarray, slots: np.ndarray) -> None:
        """Give a request the next row; ``tokens`` are all it has so far, ``slots`` are theirs."""
        row, parameters = len(self.requests), request.parameters
        self.requests.append(request)
        self.slots[row, : len(slots)] = slots
        self.lengths[row] = request.num_computed
        self.last_tokens[row] = tokens[-1]
        self.has_penalty[row] = parameters.has_penalty
        self._temperatures[row] = parameters.temperature
        self._top_ps[row] = parameters.top_p
        self._min_ps[row] = parameters.min_p
        self._top_ks[row] = parameters.top_k
        self._seeds[row] = request.stream_seed

    def remove(self, row: int) -> None:
        """Drop a row; the last one takes its place."""
        last = len(self.requests) - 1
        if row != last:
            self.requests[row] = self.requests[last]
            arrays = (
                self.slots, self.lengths, self.last_tokens, self.has_penalty, self._temperatures, self._top_ps,
                self._min_ps, self._top_ks, self._seeds,
            )  # fmt: skip
            for array in arrays:
                array[row] = array[last]
        self.slots[last] = 0  # padding must point at slot 0, whose contents are always finite
        self.requests.pop()

    def append_slots(self, rows: np.ndarray, new_slots: np.ndarray) -> None:
        """Say where the keys and values of the tokens sampled last go, one a row."""
        self.slots[rows, self.lengths[rows]] = new_slots

    def build_step(self, decoding: np.ndarray, extensions: list[Extension]) -> Step:
        """Compute the token sampled last of some rows and pieces of others; from here on ``lengths`` count them.

        Args:
            decoding: rows in ascending order; their tokens come first.
            extensions: in ascending order of ``count``, so that equal ones are neighbours. Slots are in place.
        """
        rows = np.concatenate((decoding, np.array([part.row for part in extensions], dtype=np.int64)))
        counts = np.ones(len(rows), dtype=np.int64)
        counts[len(decoding) :] = [part.count for part in extensions]
        begins = np.cumsum(counts) - counts
        owners = np.repeat(rows, counts)
        positions = self.lengths[owners] + np.arange(len(owners)) - np.repeat(begins, counts)
        tokens = self.last_tokens[owners]
        for part, begin in zip(extensions, begins[len(decoding) :].tolist(), strict=True):
            request, first = self.requests[part.row], int(self.lengths[part.row])
            if first < request.num_tokens - 1:
                tokens[begin : begin + part.count] = request.to_token_ids()[first : first + part.count]
        groups = self._group_rows(owners, positions) if self.is_deterministic else self._group_parts(rows, counts)
        self.lengths[rows] += counts
        slots = self.slots[owners, positions]
        return Step(torch.from_numpy(tokens), torch.from_numpy(positions), torch.from_numpy(slots), groups)

    def build_draw(self, rows: np.ndarray) -> Draw:
        """How the rows' next tokens are drawn; ``lengths`` already count the step's tokens."""
        return build_draw(
            self._temperatures[rows],
            self._top_ps[rows],
            self._min_ps[rows],
            self._top_ks[rows],
            compute_uniforms(self._seeds[rows], self.lengths[rows]),
        )

    def _group_parts(self, rows: np.ndarray, counts: np.ndarray) -> list[AttentionGroup]:
        """Rows together that extend by as many tokens; ``counts`` ascend."""
        groups = []
        start = 0
        for count in np.unique(counts).tolist():
            members = rows[counts == count]
            begins = torch.from_numpy(self.lengths[members])
            length = int(begins.max()) + count
            visible = self._columns[:length] <= (begins.unsqueeze(1) + torch.arange(count)).unsqueeze(2)
            mask = None if visible.all() else _to_mask(visible).unsqueeze(1)
            stop = start + count * len(members)
            slots = self._slots[torch.from_numpy(members), :length]
            groups.append(AttentionGroup(slice(start, stop), slots, mask, count))
            start = stop
        return groups

    def _group_rows(self, rows: np.ndarray, positions: np.ndarray) -> list[AttentionGroup]:
        """Every token by itself, together with those that see as many blocks of keys."""
        lengths = (positions // KEY_BLOCK + 1) * KEY_BLOCK
        groups = []
        for length in np.unique(lengths).tolist():
            members = np.flatnonzero(lengths == length)
            for start in range(0, len(members), max(1, MAX_GATHERED_TOKENS // length)):
                some = members[start : start + max(1, MAX_GATHERED_TOKENS // length)]
                visible = self._columns[:length] <= torch.from_numpy(positions[some]).unsqueeze(1)
                slots = self._slots[torch.from_numpy(rows[some]), :length]
                mask = _to_mask(visible).view(len(some), 1, 1, length)
                groups.append(AttentionGroup(torch.from_numpy(some), slots, mask, 1))
        return groups


def _to_mask(visible: torch.Tensor) -> torch.Tensor:
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
