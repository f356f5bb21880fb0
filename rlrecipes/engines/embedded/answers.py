"""The JSON the server writes: errors and ``meta_info``, in SGLang's shapes. Owns shapes; refuses to compute."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from rlrecipes.engines.embedded.request import PlaceLogprobs, Progress, Request, TopLogprobs
from rlrecipes.engines.embedded.tokenizer import Tokenizer

Entry = tuple[float | None, int, str | None]


class ApiError(ValueError):
    """A request that is answered with an error.

    Args:
        message: for the caller.
        status: of HTTP.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class BodyError(ValueError):
    """A body that is not JSON or has a field of the wrong type."""


def to_json(content: object, status: int = 200) -> web.Response:
    """Answer with JSON."""
    return web.Response(
        body=orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), status=status, content_type="application/json"
    )


def to_native_error(error: ValueError) -> web.Response:
    """Answer as the native endpoints do."""
    return to_json({"error": {"message": str(error)}}, getattr(error, "status", 400))


def to_openai_error(message: str, kind: str = "BadRequestError", status: int = 400) -> web.Response:
    """Answer as the OpenAI endpoints (and all body checks) do."""
    content = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return to_json(content, status)


def build_meta_info(
    progress: Progress, weight_version: str, started_s: float, text_tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Describe an answer, or what there is of it.

    Args:
        progress: where it stands.
        weight_version: of the server.
        started_s: ``time.perf_counter()`` when the request came.
        text_tokenizer: to write tokens beside their logprobs; None to leave them out.
    """
    request, count = progress.request, progress.num_output_tokens
    meta: dict[str, Any] = {"id": request.rid, "finish_reason": progress.finish_reason}
    if not progress.was_waiting:
        meta["prompt_tokens"] = len(request.prompt_ids)
    meta["weight_version"] = weight_version
    if not progress.was_waiting:
        meta["num_retractions"] = request.num_retractions
    if request.wish is not None:
        meta |= _build_logprobs(request, count, text_tokenizer)
    if not progress.was_waiting:
        meta["reasoning_tokens"] = 0
    meta["completion_tokens"] = count
    if not progress.was_waiting:
        cached = request.num_cached_tokens
        meta["cached_tokens"] = cached
        meta["cached_tokens_details"] = {"device": cached, "host": 0} if cached else None
        meta["dp_rank"] = None
    if progress.finish_reason is not None:
        meta["e2e_latency"] = time.perf_counter() - started_s
    return meta


def _build_logprobs(request: Request, count: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    wish = request.wish
    assert wish is not None
    prompt = request.prompt_ids[wish.start :].tolist()
    first: list[float | None] = [None]
    values = first + list(request.input_logprobs.tokens)
    outputs = request.output_ids[:count]
    fields: dict[str, Any] = {
        "input_token_logprobs": _to_entries(list(zip(values, prompt, strict=False)), tokenizer),
        "output_token_logprobs": _to_entries(
            list(zip(request.output_logprobs.tokens[:count], outputs, strict=True)), tokenizer
        ),
        "output_token_logprobs_length": count,
    }
    for kind, is_wished in (("top", wish.num_top > 0), ("named", wish.token_ids is not None)):
        if is_wished:
            name = "top_logprobs" if kind == "top" else "token_ids_logprobs"
            fields[f"input_{name}"] = _to_places(request.input_logprobs, kind, len(prompt), tokenizer)
            places: list[TopLogprobs] = getattr(request.output_logprobs, kind)[:count]
            fields[f"output_{name}"] = [_to_entries(place, tokenizer) for place in places]
    return fields


def _to_places(record: PlaceLogprobs, kind: str, num_prompt: int, tokenizer: Tokenizer | None) -> list[Any]:
    if not num_prompt:
        return []
    places: list[TopLogprobs] = getattr(record, kind)
    return [None, *(_to_entries(place, tokenizer) for place in places)]


def _to_entries(pairs: Sequence[tuple[float | None, int]], tokenizer: Tokenizer | None) -> list[Entry]:
    if tokenizer is None:
        return [(value, token, None) for value, token in pairs]
    return [(value, token, tokenizer.decode([token])) for value, token in pairs]
