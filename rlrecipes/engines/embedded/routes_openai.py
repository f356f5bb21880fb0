"""The OpenAI-compatible endpoints: /v1/models, /v1/completions, /v1/chat/completions. Owns their shapes.

Both generate through the same frontend as /generate; only the wrapping differs.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import orjson
from aiohttp import web

from rlrecipes.engines.embedded.answers import to_json, to_openai_error
from rlrecipes.engines.embedded.bodies import ChatBody, CompletionBody, GenerateBody, OpenAIBody
from rlrecipes.engines.embedded.routes_native import read_body, start_events
from rlrecipes.engines.embedded.server_state import STATE, ServerState

Answer = dict[str, Any]
ToChunks = Callable[[Answer, "StreamProgress"], list[dict[str, Any]]]


class StreamProgress:
    """How much of each choice a stream has sent."""

    def __init__(self) -> None:
        self.num_characters: dict[int, int] = {}
        self.num_tokens: dict[int, int] = {}
        self.last: dict[int, Answer] = {}

    def advance(self, index: int, answer: Answer) -> tuple[bool, str, int]:
        """Note an answer; gives whether it is the choice's first, its new text, and its tokens sent before."""
        is_first = index not in self.last
        self.last[index] = answer
        text = answer["text"][self.num_characters.get(index, 0) :]
        self.num_characters[index] = len(answer["text"])
        num_before = self.num_tokens.get(index, 0)
        self.num_tokens[index] = answer["meta_info"]["completion_tokens"]
        return is_first, text, num_before


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    return to_json({"object": "list", "data": [_to_model_card(request.app[STATE])]})


async def retrieve_model(request: web.Request) -> web.Response:
    """GET /v1/models/{model}."""
    state, name = request.app[STATE], request.match_info["model"]
    if name != state.arguments.served_model_name:
        error = {
            "message": f"The model '{name}' does not exist",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        return to_json({"error": error}, 404)
    return to_json(_to_model_card(state))


def _to_model_card(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.arguments.served_model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "sglang",
        "root": state.arguments.served_model_name,
        "parent": None,
        "max_model_len": state.frontend.limits.context_length,
    }


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    state = request.app[STATE]
    body = await read_body(request, CompletionBody)
    prompt = body.prompt
    if not prompt or (isinstance(prompt, list) and not any(prompt)):
        return to_openai_error("Prompt cannot be empty")
    is_text = isinstance(prompt, str) or isinstance(prompt[0], str)
    call = _to_call(
        body,
        {"text" if is_text else "input_ids": prompt},
        max_new_tokens=body.max_tokens,
        num_top=body.logprobs,
        start=0 if body.echo and body.logprobs else -1,
        defaults={},
    )
    echoes = _to_echoes(state, body) if body.echo else None

    def to_choice(answer: Answer, index: int) -> dict[str, Any]:
        echo = echoes[index // body.n] if echoes else ""
        meta = answer["meta_info"]
        choice = {
            "index": index,
            "text": echo + answer["text"],
            "logprobs": None if body.logprobs is None else _to_completion_logprobs(meta, bool(echoes), 0),
            **_to_finish(meta),
        }
        return choice | _to_token_ids(answer, body.return_token_ids)

    def to_chunks(answer: Answer, sent: StreamProgress) -> list[dict[str, Any]]:
        index, meta = answer.get("index", 0), answer["meta_info"]
        is_first, text, num_before = sent.advance(index, answer)
        logprobs = None
        if body.logprobs is not None and (num_before < meta["completion_tokens"] or is_first):
            logprobs = _to_completion_logprobs(meta, bool(echoes) and is_first, num_before)
        echo = echoes[index // body.n] if echoes and is_first else ""
        return [{"index": index, "text": echo + text, "logprobs": logprobs, **_to_finish(meta)}]

    if body.stream:
        return await _stream(request, body, call, "text_completion", to_chunks, lambda sent: [])
    return await _answer(state, body, call, "text_completion", to_choice)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    state = request.app[STATE]
    body = await read_body(request, ChatBody)
    if not body.messages:
        return to_openai_error("Messages cannot be empty.")
    try:
        prompt_ids = body.input_ids or _render(state, body)
    except ValueError as error:
        return to_openai_error(str(error), "BadRequest")
    call = _to_call(
        body,
        {"input_ids": prompt_ids},
        max_new_tokens=body.max_completion_tokens or body.max_tokens,
        num_top=(body.top_logprobs or 0) if body.logprobs else None,
        start=-1,
        defaults=dict(state.architecture.sampling_defaults),
    )

    def to_choice(answer: Answer, index: int) -> dict[str, Any]:
        meta = answer["meta_info"]
        choice: dict[str, Any] = {
            "index": index,
            "message": {
                "role": "assistant",
                "content": answer["text"],
                "reasoning_content": None,
                "tool_calls": None,
            },
            "logprobs": {"content": _to_chat_logprobs(meta, 0)} if body.logprobs else None,
            **_to_finish(meta),
        }
        if body.return_prompt_token_ids or body.return_token_ids:
            choice["prompt_token_ids"] = answer["prompt_token_ids"]
        if body.return_token_ids:
            choice["token_ids"] = answer["output_ids"]
        return choice | ({"meta_info": meta} if body.return_meta_info else {})

    def to_chunks(answer: Answer, sent: StreamProgress) -> list[dict[str, Any]]:
        index, meta = answer.get("index", 0), answer["meta_info"]
        is_first, text, num_before = sent.advance(index, answer)
        chunks = [_to_chat_chunk(index, {"role": "assistant", "content": ""})] if is_first else []
        if text:
            logprobs = {"content": _to_chat_logprobs(meta, num_before)} if body.logprobs else None
            chunks.append(_to_chat_chunk(index, {"content": text}, logprobs))
        return chunks

    def to_last_chunks(sent: StreamProgress) -> list[dict[str, Any]]:
        return [_to_chat_chunk(index, {}) | _to_finish(answer["meta_info"]) for index, answer in sent.last.items()]

    if body.stream:
        return await _stream(request, body, call, "chat.completion.chunk", to_chunks, to_last_chunks)
    return await _answer(state, body, call, "chat.completion", to_choice)


def _render(state: ServerState, body: ChatBody) -> list[int]:
    if state.frontend.tokenizer is None:
        raise ValueError("chat needs a tokenizer; the server runs with --skip-tokenizer-init")
    messages = []
    for message in body.messages:
        content = message.content
        if isinstance(content, list):
            content = " ".join(part.text for part in content)
        messages.append(message.model_dump() | {"content": content or ""})
    return state.frontend.tokenizer.render_chat(messages, body.chat_template_kwargs or {})


def _to_call(
    body: OpenAIBody,
    prompt: dict[str, Any],
    max_new_tokens: int | None,
    num_top: int | None,
    start: int,
    defaults: dict[str, float],
) -> GenerateBody:
    """Write an OpenAI body as a /generate body.

    Args:
        body: with what both OpenAI endpoints share.
        prompt: ``text`` or ``input_ids``.
        max_new_tokens: None for as many as fit.
        num_top: most likely tokens to report; None for no logprobs at all.
        start: ``logprob_start_len``.
        defaults: for sampling parameters that the caller leaves out.
    """
    shaped = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    parameters = defaults | {name: value for name, value in shaped.items() if value is not None}
    parameters |= {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": body.min_tokens,
        "stop": body.stop,
        "stop_token_ids": body.stop_token_ids,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "n": body.n,
        "no_stop_trim": body.no_stop_trim,
        "ignore_eos": body.ignore_eos,
        "skip_special_tokens": body.skip_special_tokens,
        "logit_bias": body.logit_bias,
        "sampling_seed": body.seed,
    }
    keys = [key for key in (body.cache_salt, body.extra_key) if isinstance(key, str)]
    return GenerateBody(
        **prompt,
        sampling_params=parameters,
        return_logprob=num_top is not None,
        top_logprobs_num=num_top or 0,
        logprob_start_len=start,
        return_text_in_logprobs=True,
        return_prompt_token_ids=body.return_token_ids or getattr(body, "return_prompt_token_ids", False),
        stream=body.stream,
        rid=body.rid,
        extra_key="".join(keys) or None,
    )


async def _answer(
    state: ServerState,
    body: OpenAIBody,
    call: GenerateBody,
    kind: str,
    to_choice: Callable[[Answer, int], dict[str, Any]],
) -> web.Response:
    try:
        answers = await state.frontend.answer(call)
    except ValueError as error:
        return to_openai_error(str(error), status=getattr(error, "status", 400))
    if not isinstance(answers, list):
        answers = [answers]
    first = answers[0]["meta_info"]
    return to_json(
        {
            "id": first["id"],
            "object": kind,
            "created": int(time.time()),
            "model": body.model,
            "choices": [to_choice(answer, index) for index, answer in enumerate(answers)],
            "usage": _to_usage(answers, body.n),
            "metadata": {"weight_version": first["weight_version"]},
        }
    )


async def _stream(
    request: web.Request,
    body: OpenAIBody,
    call: GenerateBody,
    kind: str,
    to_chunks: ToChunks,
    to_last_chunks: Callable[[StreamProgress], list[dict[str, Any]]],
) -> web.StreamResponse:
    """Send chunks as answers grow; what is refused before the first one is an ordinary error."""
    answers = request.app[STATE].frontend.stream(call)
    try:
        first = await anext(answers)
    except ValueError as error:
        return to_openai_error(str(error), status=getattr(error, "status", 400))
    options, sent = body.stream_options, StreamProgress()
    is_counting = bool(options and options.continuous_usage_stats)
    response = await start_events(request)
    answer_id = first["meta_info"]["id"]

    async def send(choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> None:
        chunk: dict[str, Any] = {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": body.model,
            "choices": choices,
        }
        if kind == "text_completion" or usage is not None:
            chunk["usage"] = usage
        await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")

    try:
        async for answer in _chain(first, answers):
            answer_id = answer["meta_info"]["id"]
            usage = _to_usage([answer], 1) if is_counting else None
            for choice in to_chunks(answer, sent):
                await send([choice], usage)
        for choice in to_last_chunks(sent):
            await send([choice], None)
        if options and options.include_usage:
            usage = _to_usage([sent.last[index] for index in sorted(sent.last)], body.n)
            if kind == "text_completion":  # SGLang leaves nulls out here and nowhere else
                usage = {name: value for name, value in usage.items() if value is not None}
            await send([], usage)
    finally:
        await answers.aclose()
    await response.write(b"data: [DONE]\n\n")
    return response


async def _chain(first: Answer, rest: AsyncIterator[Answer]) -> AsyncIterator[Answer]:
    yield first
    async for answer in rest:
        yield answer


def _to_usage(answers: Sequence[Answer], num_siblings: int) -> dict[str, Any]:
    metas = [answer["meta_info"] for answer in answers]
    num_prompt = sum(meta.get("prompt_tokens", 0) for meta in metas[::num_siblings])
    num_answer = sum(meta["completion_tokens"] for meta in metas)
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_answer,
        "completion_tokens": num_answer,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
    }


def _to_finish(meta: dict[str, Any]) -> dict[str, Any]:
    reason = meta["finish_reason"]
    return {"finish_reason": reason and reason["type"], "matched_stop": reason and reason.get("matched")}


def _to_token_ids(answer: Answer, is_wished: bool) -> dict[str, Any]:
    if not is_wished:
        return {}
    return {"token_ids": answer["output_ids"], "prompt_token_ids": answer.get("prompt_token_ids")}


def _to_echoes(state: ServerState, body: CompletionBody) -> list[str]:
    prompt: Any = body.prompt
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    tokenizer = state.frontend.tokenizer
    if tokenizer is None:
        return ["" for _ in prompts]
    return [each if isinstance(each, str) else tokenizer.decode(each, skip_special_tokens=True) for each in prompts]


def _to_completion_logprobs(meta: dict[str, Any], has_prompt: bool, num_before: int) -> dict[str, Any]:
    entries = meta["output_token_logprobs"][num_before:]
    tops = meta.get("output_top_logprobs", [])[num_before:]
    if has_prompt:
        entries = [*meta["input_token_logprobs"], *entries]
        tops = [*meta.get("input_top_logprobs", []), *tops]
    return {
        "text_offset": [-1] * len(entries),
        "token_logprobs": [value for value, _, _ in entries],
        "tokens": [text for _, _, text in entries],
        "top_logprobs": [top and {text: value for value, _, text in top} for top in tops],
    }


def _to_chat_logprobs(meta: dict[str, Any], num_before: int) -> list[dict[str, Any]]:
    entries = meta["output_token_logprobs"][num_before:]
    tops = meta.get("output_top_logprobs", [])[num_before:] or [[]] * len(entries)
    return [
        _to_chat_token(value, text) | {"top_logprobs": [_to_chat_token(each, name) for each, _, name in top]}
        for (value, _, text), top in zip(entries, tops, strict=True)
    ]


def _to_chat_token(value: float, text: str) -> dict[str, Any]:
    return {"token": text, "bytes": list(text.encode()), "logprob": value}


def _to_chat_chunk(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "index": index,
        "delta": {"reasoning_content": None, **delta},
        "logprobs": logprobs,
        "finish_reason": None,
        "matched_stop": None,
    }


ROUTES = (
    web.get("/v1/models", list_models),
    web.get("/v1/models/{model:.+}", retrieve_model),
    web.post("/v1/completions", completions),
    web.post("/v1/chat/completions", chat_completions),
)
