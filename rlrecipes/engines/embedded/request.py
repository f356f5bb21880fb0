"""One request as the scheduler sees it. Owns its tokens, logprobs and reasons to finish; refuses HTTP shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlrecipes.engines.embedded.radix_cache import Node
from rlrecipes.engines.embedded.sampling import SamplingParameters

TopLogprobs = list[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class LogprobWish:
    """Which logprobs a request asks for.

    Attributes:
        start: first prompt token that is reported; the prompt's length for none.
        num_top: most likely tokens at each place; 0 for none.
        token_ids: tokens to report at each place; None for none.
    """

    start: int
    num_top: int = 0
    token_ids: tuple[int, ...] | None = None


@dataclass(slots=True)
class PlaceLogprobs:
    """Logprobs at a row of places: of the token there, of the most likely ones and of the named ones."""

    tokens: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    named: list[TopLogprobs] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Request:
    """One answer in the making.

    Attributes:
        rid: its name, unique among those alive.
        prompt_ids: int64.
        parameters: ``max_new_tokens`` already cut to what fits.
        max_new_tokens: the same number.
        stream_seed: of its draws; uint64.
        wish: None when no logprobs are asked for.
        namespace: prefixes are shared only within one.
        wants_steps: whether the owner hears of every token or of the end only.
        output_ids: generated so far.
        input_logprobs: of prompt tokens ``wish.start + 1`` and later.
        output_logprobs: of ``output_ids``.
        finish_reason: SGLang's JSON; None while it runs.
        num_cached_tokens: prompt tokens found in the prefix cache when it was first admitted.
        num_retractions: times it lost its memory and went back to the queue.
        num_computed: leading tokens whose keys and values are in the pool.
        is_decoding: whether all but the token sampled last is computed; that one has no slot yet.
        num_slots: slots in its row of the batch.
        num_shared: leading ones of them that belong to the prefix cache.
        node: the locked end of that prefix.
        admission: order in which it got memory.
        stop_window: tokens at the end that can hold a stop string; 0 without stop strings.
        is_aborting: it ends before the next step.
    """

    rid: str
    prompt_ids: np.ndarray
    parameters: SamplingParameters
    max_new_tokens: int
    stream_seed: int
    wish: LogprobWish | None
    namespace: str
    wants_steps: bool
    stop_window: int
    output_ids: list[int] = field(default_factory=list)
    input_logprobs: PlaceLogprobs = field(default_factory=PlaceLogprobs)
    output_logprobs: PlaceLogprobs = field(default_factory=PlaceLogprobs)
    finish_reason: dict[str, Any] | None = None
    num_cached_tokens: int = 0
    num_retractions: int = 0
    num_computed: int = 0
    is_decoding: bool = False
    num_slots: int = 0
    num_shared: int = 0
    node: Node | None = None
    admission: int = 0
    is_aborting: bool = False

    @property
    def num_tokens(self) -> int:
        """Of prompt and answer."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_missing_input_logprobs(self) -> int:
        """Prompt tokens whose logprob is wished for and not computed yet."""
        if self.wish is None:
            return 0
        return max(0, len(self.prompt_ids) - 1 - self.wish.start - len(self.input_logprobs.tokens))

    def to_token_ids(self) -> np.ndarray:
        """Give prompt and answer, int64."""
        return np.concatenate((self.prompt_ids, np.array(self.output_ids, dtype=np.int64)))


@dataclass(frozen=True, slots=True)
class Progress:
    """What the owner of a request hears.

    Attributes:
        request: whose lists only grow, so the first entries are safe to read from another thread.
        num_output_tokens: how many there were at this moment.
        finish_reason: set in the last one.
        was_waiting: an abort found it in the queue (SGLang reports fewer fields then).
    """

    request: Request
    num_output_tokens: int
    finish_reason: dict[str, Any] | None = None
    was_waiting: bool = False


Listener = Callable[[list[Progress]], None]
