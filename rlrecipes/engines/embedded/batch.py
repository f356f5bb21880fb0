"""The requests that hold memory, as rows of arrays. Owns rows and the building of steps; refuses to decide who gets in.

Rows are compact (the last one moves into a hole), so that the usual step, one token for every row, reads the arrays
as they are.
"""

from __future__ import annotations

from collections import defaultdict
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
        self._temperatures = np.ones(max_rows, dtype=np.float32)
        self._top_ps = np.ones(max_rows, dtype=np.float32)
        self._min_ps = np.zeros(max_rows, dtype=np.float32)
        self._top_ks = np.ones(max_rows, dtype=np.int64)
        self._seeds = np.zeros(max_rows, dtype=np.uint64)
        self._columns = torch.arange(width)

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request, slots: np.ndarray) -> None:
        """Give a request the next row; ``slots`` are those of all its tokens so far."""
        row, parameters = len(self.requests), request.parameters
        self.requests.append(request)
        self.slots[row, : len(slots)] = slots
        self.lengths[row] = request.num_computed
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
                self.slots, self.lengths, self.last_tokens, self._temperatures, self._top_ps, self._min_ps,
                self._top_ks, self._seeds,
            )  # fmt: skip
            for array in arrays:
                array[row] = array[last]
        self.slots[last] = 0  # padding must point at slot 0, whose contents are always finite
        self.requests.pop()

    def build_decode_step(self, new_slots: np.ndarray) -> Step:
        """One token for every row, the one sampled last.

        Args:
            new_slots: [rows] where its keys and values go.
        """
        count = len(self.requests)
        positions = self.lengths[:count].copy()
        self.slots[np.arange(count), positions] = new_slots
        return Step(
            torch.from_numpy(self.last_tokens[:count].copy()),
            torch.from_numpy(positions),
            torch.from_numpy(new_slots),
            self._group_rows(np.arange(count), positions) if self.is_deterministic else [self._group_all(positions)],
        )

    def build_step(self, extensions: list[Extension]) -> Step:
        """Compute some tokens of some rows; slots of all of them are in place.

        Args:
            extensions: in ascending order of ``count``, so that equal ones are neighbours.
        """
        rows = np.concatenate([np.full(part.count, part.row) for part in extensions])
        positions = np.concatenate(
            [np.arange(self.lengths[part.row], self.lengths[part.row] + part.count) for part in extensions]
        )
        tokens = np.concatenate([self._tokens_of(part) for part in extensions])
        groups = self._group_rows(rows, positions) if self.is_deterministic else self._group_extensions(extensions)
        return Step(
            torch.from_numpy(tokens),
            torch.from_numpy(positions),
            torch.from_numpy(self.slots[rows, positions]),
            groups,
        )

    def build_draw(self, rows: np.ndarray) -> Draw:
        """How the rows' next tokens are drawn; ``lengths`` already count the step's tokens."""
        return build_draw(
            self._temperatures[rows],
            self._top_ps[rows],
            self._min_ps[rows],
            self._top_ks[rows],
            compute_uniforms(self._seeds[rows], self.lengths[rows]),
        )

    def _tokens_of(self, part: Extension) -> np.ndarray:
        if part.count == 1 and self.lengths[part.row] == self.requests[part.row].num_tokens - 1:
            request = self.requests[part.row]
            return np.array([request.output_ids[-1] if request.output_ids else request.prompt_ids[-1]], dtype=np.int64)
        start = self.lengths[part.row]
        return self.requests[part.row].to_token_ids()[start : start + part.count]

    def _group_all(self, positions: np.ndarray) -> AttentionGroup:
        count, length = len(positions), int(positions.max()) + 1
        mask = None
        if int(positions.min()) + 1 < length:
            visible = self._columns[:length] <= torch.from_numpy(positions).unsqueeze(1)
            mask = _to_mask(visible).view(count, 1, 1, -1)
        return AttentionGroup(slice(0, count), self._slots[:count, :length], mask, 1)

    def _group_extensions(self, extensions: list[Extension]) -> list[AttentionGroup]:
        by_count: defaultdict[int, list[int]] = defaultdict(list)
        for part in extensions:
            by_count[part.count].append(part.row)
        groups = []
        start = 0
        for count, rows in by_count.items():
            begins = torch.from_numpy(self.lengths[rows])
            length = int(begins.max()) + count
            visible = self._columns[:length] <= (begins.unsqueeze(1) + torch.arange(count)).unsqueeze(2)
            stop = start + count * len(rows)
            slots = self._slots[rows, :length]
            groups.append(AttentionGroup(slice(start, stop), slots, _to_mask(visible).unsqueeze(1), count))
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
