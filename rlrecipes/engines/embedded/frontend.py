"""From a /generate body to answers. Owns the life of a request outside the scheduler; refuses HTTP.

A call may hold several prompts, and each prompt several answers (``n``). Names are SGLang's: the caller's ``rid`` (or
a new one) for a single answer, ``{rid}_{suffix}`` for each of several.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlrecipes.engines.embedded.answers import ApiError, build_meta_info
from rlrecipes.engines.embedded.arguments import ServerArguments
from rlrecipes.engines.embedded.bodies import GenerateBody
from rlrecipes.engines.embedded.completion import to_stop_window
from rlrecipes.engines.embedded.gate import Gate
from rlrecipes.engines.embedded.request import LogprobWish, Progress, Request
from rlrecipes.engines.embedded.sampling import (
    MalformedParameterError,
    SamplingParameters,
    parse_sampling_parameters,
    to_stream_seed,
)
from rlrecipes.engines.embedded.scheduler import Scheduler
from rlrecipes.engines.embedded.tokenizer import TextStream, Tokenizer

DETERMINISTIC_SEED = 42
"""Of requests without a seed, in deterministic mode."""

MAX_BACKLOG = 16
"""Answers of one stream that may wait to be read; every answer repeats all earlier text."""

RESERVED_PROMPT_TOKENS = 5
"""SGLang keeps so many tokens of the longest request free of prompt."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long requests may be.

    Attributes:
        vocab_size: token ids are below it.
        context_length: of the model.
        num_cache_tokens: that the pool holds.
    """

    vocab_size: int
    context_length: int
    num_cache_tokens: int

    @property
    def max_request_tokens(self) -> int:
        """Prompt and answer together."""
        return min(self.context_length, self.num_cache_tokens) - 1

    @property
    def max_prompt_tokens(self) -> int:
        """Prompts must be shorter."""
        return self.max_request_tokens - RESERVED_PROMPT_TOKENS


@dataclass(slots=True)
class Item:
    """One prompt of a call."""

    rid: str
    prompt_ids: np.ndarray
    raw_parameters: Any
    parameters: SamplingParameters
    wish: LogprobWish | None
    namespace: str


@dataclass(eq=False, slots=True)
class Ticket:
    """One answer that somebody waits for."""

    request: Request
    started_s: float
    text: TextStream | None
    progress: asyncio.Queue[Progress] = field(default_factory=asyncio.Queue)
    num_decoded: int = 0
    sent_at_s: float | None = None


@dataclass(eq=False, slots=True)
class Call:
    """A logical request, by the caller's name."""

    children: set[str] = field(default_factory=set)
    is_aborted: bool = False


class Frontend:
    """Takes calls in and gives answers out; lives on the event loop.

    Args:
        arguments: of the server.
        limits: on lengths.
        tokenizer: None when the server has none.
        end_ids: end-of-sequence tokens.
    """

    def __init__(
        self, arguments: ServerArguments, limits: Limits, tokenizer: Tokenizer | None, end_ids: frozenset[int]
    ) -> None:
        self.limits = limits
        self.tokenizer = tokenizer
        self.gate = Gate()
        self.weight_version = arguments.weight_version
        self.scheduler: Scheduler
        self.end_ids = end_ids
        self._is_deterministic = arguments.enable_deterministic_inference
        self._seeds = random.Random(arguments.random_seed)
        self._tickets: dict[str, Ticket] = {}
        self._calls: dict[str, Call] = {}

    def hear(self, news: list[Progress]) -> None:
        """Pass on what the scheduler tells; on the event loop."""
        for progress in news:
            ticket = self._tickets.get(progress.request.rid)
            if ticket is not None:
                ticket.progress.put_nowait(progress)

    async def answer(self, body: GenerateBody) -> Any:
        """Answer a call as a whole: one answer for one prompt, else a list.

        Raises:
            ApiError, ValueError: the call is refused; the text is SGLang's where SGLang has one.
            MalformedParameterError: a sampling parameter has an unknown name or a wrong type.
        """
        raw = _to_shape(body)
        with self._calling(raw.rids):
            async with self.gate:
                tickets = await self._start(raw, body)
                answers = [await self._wait(ticket, body) for ticket in tickets]
        for answer in answers:
            _raise_if_refused(answer)
        return answers[0] if raw.is_single else answers

    async def stream(self, body: GenerateBody) -> AsyncGenerator[dict[str, Any]]:
        """Answer a call bit by bit: yields each time an answer grows.

        Raises:
            ApiError, ValueError, MalformedParameterError: as ``answer``.
        """
        raw = _to_shape(body)
        with self._calling(raw.rids):
            async with self.gate:
                tickets = await self._start(raw, body)
                async with aclosing(self._merge(tickets, body)) as answers:
                    async for place, answer in answers:
                        yield answer if raw.is_single else answer | {"index": place}

    @contextmanager
    def _calling(self, rids: Sequence[str]) -> Iterator[None]:
        """Have calls known by their names; when the block is left early, what still runs for them is aborted."""
        calls = self._register(rids)
        try:
            yield
        finally:
            for rid in rids:
                self._calls.pop(rid, None)
            leftover = {child for call in calls for child in call.children} & self._tickets.keys()
            if leftover:
                for child in leftover:
                    del self._tickets[child]
                self.scheduler.run(lambda: self.scheduler.abort(leftover))

    def abort(self, rid: str, is_all: bool) -> None:
        """End one call (by its name or the name of one of its answers) or all of them; unknown names are nothing.

        As in SGLang, a name takes those along that begin with it.
        """
        if is_all:
            for each in self._calls.values():
                each.is_aborted = True
            self.scheduler.run(lambda: self.scheduler.abort(None))
            return
        call = self._calls.get(rid)
        if call is not None:
            call.is_aborted = True
        targets = tuple(call.children if call is not None else {rid} & self._tickets.keys())
        rids = {each for each in self._tickets if each.startswith(targets)} if targets else set()
        if rids:
            self.scheduler.run(lambda: self.scheduler.abort(rids))

    def _register(self, rids: Sequence[str]) -> list[Call]:
        duplicates = [rid for rid in rids if rids.count(rid) > 1]
        if duplicates:
            raise ApiError(f"Duplicate request IDs detected within the request: {sorted(set(duplicates))}")
        for rid in rids:
            if rid in self._calls or rid in self._tickets:
                raise ApiError(f"Duplicate request ID detected: {rid}")
        calls = [Call() for _ in rids]
        self._calls.update(zip(rids, calls, strict=True))
        return calls

    def _check_alive(self, rids: Sequence[str]) -> None:
        for rid in rids:
            if self._calls[rid].is_aborted:
                raise ApiError(f"Request {rid} was aborted", 499)

    def _build_item(self, raw: Shape, place: int) -> Item:
        prompt = self._to_prompt_ids(raw.prompts[place])
        raw_parameters = raw.parameters[place]
        self._check_length(len(prompt), raw_parameters)
        parameters = parse_sampling_parameters(raw_parameters, self.limits.vocab_size)
        if self.tokenizer is None and (parameters.stop or parameters.min_new_tokens):
            name = "stop" if parameters.stop else "min_new_tokens"
            raise ApiError(f"{name} is unavailable when skip_tokenizer_init=True")
        if len(prompt) >= self.limits.max_prompt_tokens:
            raise ApiError(
                f"Input length ({len(prompt)} tokens) exceeds the maximum allowed length "
                f"({self.limits.max_prompt_tokens} tokens). Use a shorter input or enable --allow-auto-truncate."
            )
        return Item(
            raw.rids[place], prompt, raw_parameters, parameters, self._build_wish(raw, place, len(prompt)),
            raw.namespaces[place],
        )  # fmt: skip

    def _to_prompt_ids(self, prompt: str | list[int]) -> np.ndarray:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ApiError(
                    "The engine initialized with skip_tokenizer_init=True cannot accept text prompts. Please provide "
                    "input_ids or re-initialize the engine with skip_tokenizer_init=False."
                )
            if not prompt:
                raise ApiError("texts cannot be empty and tokenizer must be initialized")
            prompt = self.tokenizer.encode(prompt)
        if not prompt:
            raise ApiError("input_ids cannot be empty.")
        if max(prompt) >= self.limits.vocab_size or min(prompt) < 0:
            raise ApiError(
                f"The input_ids contain values outside [0, {self.limits.vocab_size}), the model's vocabulary."
            )
        return np.array(prompt, dtype=np.int64)

    def _check_length(self, num_prompt: int, raw_parameters: Any) -> None:
        context = self.limits.context_length
        if num_prompt >= context:
            raise ApiError(
                f"The input ({num_prompt} tokens) is longer than the model's context length ({context} tokens)."
            )
        wanted = raw_parameters.get("max_new_tokens") if isinstance(raw_parameters, dict) else None
        if isinstance(wanted, int) and wanted + num_prompt > context:
            raise ApiError(
                f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested "
                f"a total of {wanted + num_prompt} tokens: {num_prompt} tokens from the input messages and {wanted} "
                "tokens for the completion. Please reduce the number of tokens in the input messages or the "
                "completion to fit within the limit."
            )

    def _build_wish(self, raw: Shape, place: int, num_prompt: int) -> LogprobWish | None:
        if not raw.return_logprob[place]:
            return None
        start = raw.logprob_start_len[place]
        if start > num_prompt:
            raise ApiError(
                f"req.logprob_start_len={start} is higher than the number of input tokens "
                f"len(req.origin_input_ids)={num_prompt}. Please use a smaller logprob_start_len."
            )
        named = raw.token_ids_logprob[place]
        for token in named or ():
            if not 0 <= token < self.limits.vocab_size:
                raise ApiError(
                    f"token_ids_logprob contains out-of-vocabulary token id {token}; valid range is "
                    f"[0, {self.limits.vocab_size})."
                )
        return LogprobWish(
            num_prompt if start < 0 else start, raw.top_logprobs_num[place], tuple(named) if named else None
        )

    async def _start(self, raw: Shape, body: GenerateBody) -> list[Ticket]:
        """Submit all answers of a call."""
        self._check_alive(raw.rids)
        items = [self._build_item(raw, place) for place in range(len(raw.rids))]
        if raw.num_siblings > 1:
            await self._warm_prefixes(items)
        return [
            self._submit(item, sibling, raw.num_siblings > 1, body.stream)
            for item in items
            for sibling in range(raw.num_siblings)
        ]

    async def _warm_prefixes(self, items: list[Item]) -> None:
        """Compute each prompt once before its siblings start, as SGLang does, so that they share it."""
        for item in items:
            silent = Item(item.rid, item.prompt_ids, item.raw_parameters, item.parameters, None, item.namespace)
            ticket = self._submit(silent, 0, True, False, max_new_tokens=0)
            await ticket.progress.get()
            self._forget(ticket)
            self._check_alive([item.rid])

    def _submit(
        self, item: Item, sibling: int, is_child: bool, is_stream: bool, max_new_tokens: int | None = None
    ) -> Ticket:
        rid = f"{item.rid}_{uuid.uuid4().hex}" if is_child else item.rid
        parameters = item.parameters
        limits, num_prompt = self.limits, len(item.prompt_ids)
        wanted = parameters.max_new_tokens if max_new_tokens is None else max_new_tokens
        fitting = min(limits.max_request_tokens - num_prompt - 1, limits.num_cache_tokens - num_prompt - 2)
        request = Request(
            rid=rid,
            prompt_ids=item.prompt_ids,
            parameters=parameters,
            max_new_tokens=max(0, fitting if wanted is None else min(wanted, fitting)),
            stream_seed=to_stream_seed(self._choose_seed(parameters), sibling),
            wish=item.wish,
            namespace=item.namespace,
            wants_steps=is_stream,
            stop_window=to_stop_window(parameters.stop),
        )
        text = None
        if self.tokenizer is not None:
            text = TextStream(self.tokenizer, item.prompt_ids.tolist(), parameters.skip_special_tokens)
        ticket = Ticket(request, time.perf_counter(), text)
        self._tickets[rid] = ticket
        self._calls[item.rid].children.add(rid)
        self.scheduler.submit(request)
        return ticket

    def _choose_seed(self, parameters: SamplingParameters) -> int:
        if parameters.sampling_seed is not None:
            return parameters.sampling_seed
        return DETERMINISTIC_SEED if self._is_deterministic else self._seeds.getrandbits(64)

    def _forget(self, ticket: Ticket) -> None:
        self._tickets.pop(ticket.request.rid, None)

    async def _wait(self, ticket: Ticket, body: GenerateBody) -> dict[str, Any]:
        """Give the next answer there is to give; a reader far behind is given newer ones only."""
        progress = await ticket.progress.get()
        while progress.finish_reason is None and ticket.progress.qsize() > MAX_BACKLOG:
            progress = ticket.progress.get_nowait()
        if progress.finish_reason is not None:
            self._forget(ticket)
        return self._build_answer(ticket, progress, body)

    async def _merge(self, tickets: list[Ticket], body: GenerateBody) -> AsyncGenerator[tuple[int, dict[str, Any]]]:
        waits = {asyncio.ensure_future(self._wait(ticket, body)): place for place, ticket in enumerate(tickets)}
        try:
            while waits:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in done:
                    place = waits.pop(wait)
                    answer = wait.result()
                    if answer["meta_info"]["finish_reason"] is None:
                        waits[asyncio.ensure_future(self._wait(tickets[place], body))] = place
                    yield place, answer
        finally:
            for wait in waits:
                wait.cancel()

    def _build_answer(self, ticket: Ticket, progress: Progress, body: GenerateBody) -> dict[str, Any]:
        request, count = ticket.request, progress.num_output_tokens
        answer: dict[str, Any] = {}
        if ticket.text is not None:
            answer["text"] = _decode(ticket, progress)
        output_ids = request.output_ids[:count]
        answer["output_ids"] = output_ids[-1:] if progress.was_waiting and body.stream else output_ids
        words = self.tokenizer if body.return_text_in_logprobs else None
        answer["meta_info"] = build_meta_info(progress, self.weight_version, ticket.started_s, words)
        if ticket.sent_at_s is None:
            ticket.sent_at_s = time.time()
            answer["meta_info"]["response_sent_to_client_ts"] = ticket.sent_at_s
        if body.return_prompt_token_ids and not progress.was_waiting:
            answer["prompt_token_ids"] = request.prompt_ids.tolist()
        return answer


def _decode(ticket: Ticket, progress: Progress) -> str:
    """Give the text so far, cut at what ended it unless ``no_stop_trim``."""
    assert ticket.text is not None
    reason = progress.finish_reason or {}
    matched, parameters = reason.get("matched"), ticket.request.parameters
    stop = progress.num_output_tokens
    if isinstance(matched, int) and not parameters.no_stop_trim:
        stop -= 1
    fresh = ticket.request.output_ids[ticket.num_decoded : stop]
    ticket.num_decoded = stop
    text = ticket.text.extend(fresh, is_last=bool(reason))
    if isinstance(matched, str) and matched in text:
        text = text[: text.index(matched) + (len(matched) if parameters.no_stop_trim else 0)]
    return text


def _raise_if_refused(answer: dict[str, Any]) -> None:
    reason = answer["meta_info"]["finish_reason"]
    if reason["type"] == "abort" and reason.get("status_code") == 400:
        raise ApiError(reason["message"])


@dataclass(frozen=True, slots=True)
class Shape:
    """A /generate body with one entry a prompt in every list."""

    is_single: bool
    num_siblings: int
    prompts: list[str] | list[list[int]]
    rids: list[str]
    parameters: list[Any]
    return_logprob: list[bool]
    logprob_start_len: list[int]
    top_logprobs_num: list[int]
    token_ids_logprob: list[list[int] | None]
    namespaces: list[str]


def _to_shape(body: GenerateBody) -> Shape:
    """Spread scalars over prompts.

    Raises:
        ApiError: nothing to generate from, or a list of another length.
    """
    prompts: Any = body.input_ids if body.input_ids is not None else body.text
    if prompts is None:
        raise ApiError("Either text, input_ids or input_embeds should be provided.")
    if body.input_ids is not None and not prompts:
        raise ApiError("input_ids cannot be empty.")
    is_one_prompt = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
    if is_one_prompt:
        prompts = [prompts]
    count = len(prompts)
    parameters = body.sampling_params if body.sampling_params is not None else {}
    parameters = parameters if isinstance(parameters, list) else [parameters] * count
    if len(parameters) != count:
        raise MalformedParameterError("the length of sampling_params should be equal to the batch size")
    siblings = {each.get("n") or 1 if isinstance(each, dict) else 1 for each in parameters}
    if len(siblings) > 1:
        raise ApiError("The parallel_sample_num should be the same for all samples in sample params.")
    num_siblings = siblings.pop() if siblings else 1
    named = body.token_ids_logprob or None
    return Shape(
        is_single=is_one_prompt and num_siblings == 1,
        num_siblings=num_siblings,
        prompts=prompts,
        rids=_spread_rids(body.rid, count),
        parameters=parameters,
        return_logprob=_spread(body.return_logprob, count, False, "return_logprob"),
        logprob_start_len=_spread(body.logprob_start_len, count, -1, "logprob_start_len"),
        top_logprobs_num=_spread(body.top_logprobs_num, count, 0, "top_logprobs_num"),
        token_ids_logprob=_spread(
            named, count, None, "token_ids_logprob", bool(named) and isinstance(named and named[0], list)
        ),
        namespaces=_spread(body.extra_key, count, "", "extra_key"),
    )


def _spread(value: Any, count: int, default: Any, name: str, is_list: bool | None = None) -> list[Any]:
    if value is None:
        return [default] * count
    if not (isinstance(value, list) if is_list is None else is_list):
        return [value] * count
    if len(value) != count:
        raise ApiError(f"The length of {name} should be equal to the batch size.")
    return list(value)


def _spread_rids(rid: str | list[str] | None, count: int) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str):
        return [rid] if count == 1 else [f"{rid}_{place}" for place in range(count)]
    if len(rid) != count:
        raise ApiError("The specified rids length mismatch with the batch_size for batch processing.")
    return rid
