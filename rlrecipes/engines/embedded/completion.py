"""When an answer ends, and which logprobs it takes along. Owns both rules; refuses memory and batching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlrecipes.engines.embedded.request import PlaceLogprobs, Request, TopLogprobs
from rlrecipes.engines.embedded.transformer import Transformer

PROMPT_LOGPROB_ROWS = 512
"""Places of a prompt whose logits are held at once; a multiple of the deterministic tile."""


class Stopper:
    """Says whether an answer ends with its newest token.

    Args:
        end_ids: end-of-sequence tokens of model and tokenizer.
        decode: token ids -> text with special tokens; None when the server has no tokenizer.
    """

    def __init__(self, end_ids: frozenset[int], decode: Callable[[Sequence[int]], str] | None) -> None:
        self.end_ids = end_ids
        self._decode = decode

    def find_reason(self, request: Request) -> dict[str, Any] | None:
        """Give SGLang's finish reason, or None to go on. Length comes first, then stop strings, then tokens."""
        parameters = request.parameters
        if len(request.output_ids) >= request.max_new_tokens:
            return {"type": "length", "length": request.max_new_tokens}
        if parameters.stop:
            tail = self._decode_tail(request)
            for text in parameters.stop:
                if text in tail:
                    return {"type": "stop", "matched": text}
        token = request.output_ids[-1]
        if not parameters.ignore_eos and (token in self.end_ids or token in parameters.stop_token_ids):
            return {"type": "stop", "matched": token}
        return None

    def is_holding(self, request: Request) -> bool:
        """Whether the text ends with the beginning of a stop string, which a stream must not show yet."""
        if not request.parameters.stop:
            return False
        tail = self._decode_tail(request)
        return any(
            tail.endswith(text[:length]) for text in request.parameters.stop for length in range(1, len(text) + 1)
        )

    def _decode_tail(self, request: Request) -> str:
        assert self._decode is not None, "stop strings are refused without a tokenizer"
        return self._decode(request.output_ids[-request.stop_window :])


def to_stop_window(stop: Sequence[str]) -> int:
    """Tokens that can hold a stop string and the token before it: one a byte at most."""
    return max(len(text.encode()) for text in stop) + 1 if stop else 0


def record_prompt_logprobs(transformer: Transformer, request: Request, hidden: torch.Tensor) -> None:
    """Append the prompt logprobs that the newly computed tokens decide.

    Prompt logprobs are at temperature 1, as SGLang's are.

    Args:
        transformer: gives logits.
        request: ``num_computed`` not yet counting these tokens.
        hidden: [count, hidden] of tokens ``num_computed`` and later.
    """
    wish = request.wish
    if wish is None:
        return
    first = wish.start + len(request.input_logprobs.tokens)
    last = min(request.num_computed + len(hidden), len(request.prompt_ids) - 1)
    for start in range(max(first, request.num_computed), last, PROMPT_LOGPROB_ROWS):
        stop = min(start + PROMPT_LOGPROB_ROWS, last)
        logits = transformer.compute_logits(hidden[start - request.num_computed : stop - request.num_computed])
        logprobs = torch.log_softmax(logits, dim=-1)
        targets = torch.from_numpy(request.prompt_ids[start + 1 : stop + 1])
        _append(request.input_logprobs, logprobs, targets, wish.num_top, wish.token_ids)


def record_sampled_logprobs(requests: Sequence[Request], scaled: torch.Tensor, tokens: torch.Tensor) -> None:
    """Append the logprobs of newly sampled tokens.

    Args:
        requests: of the N rows.
        scaled: [N, vocab] logits over temperature.
        tokens: [N] int64.
    """
    places = [
        place for place, request in enumerate(requests) if request.wish is not None and request.max_new_tokens > 0
    ]
    if not places:
        return
    if len(places) < len(requests):
        scaled, tokens = scaled[places], tokens[places]
    logprobs = torch.log_softmax(scaled, dim=-1)
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
    for row, place in enumerate(places):
        request = requests[place]
        request.output_logprobs.tokens.append(chosen[row])
        wish = request.wish
        if wish is not None and (wish.num_top or wish.token_ids is not None):
            _append_extras(request.output_logprobs, logprobs[row : row + 1], wish.num_top, wish.token_ids)


def _append(
    record: PlaceLogprobs,
    logprobs: torch.Tensor,
    targets: torch.Tensor,
    num_top: int,
    token_ids: tuple[int, ...] | None,
) -> None:
    record.tokens.extend(logprobs.gather(1, targets.unsqueeze(1)).squeeze(1).tolist())
    _append_extras(record, logprobs, num_top, token_ids)


def _append_extras(
    record: PlaceLogprobs, logprobs: torch.Tensor, num_top: int, token_ids: tuple[int, ...] | None
) -> None:
    if num_top:
        values, ids = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
        record.top.extend(_pair(values, ids))
    if token_ids is not None:
        ids = torch.tensor(token_ids).expand(len(logprobs), -1)
        record.named.extend(_pair(logprobs.gather(1, ids), ids))


def _pair(values: torch.Tensor, ids: torch.Tensor) -> list[TopLogprobs]:
    return [list(zip(*pair, strict=True)) for pair in zip(values.tolist(), ids.tolist(), strict=True)]
