"""The HTTP client that generates, through the router. Owns /generate: its body, what an answer must hold, retries."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import orjson
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from rlrecipes.engines.sglang.http import JSON_HEADERS, to_message, to_weight_version
from rlrecipes.errors import EngineError
from rlrecipes.types import FINISH_ABORT, Completion, SamplingParams

ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
_STATUS_ABORTED_IN_QUEUE = 499
_STATUSES_TO_RETRY = (502, 503)
_LOST_ENGINE = b"error sending request for url"
"""The router says so, with status 500, when the engine it chose does not take the request or dies over it."""
_RETRY_S = 60.0
"""How long an unreachable server is asked again: the router needs seconds to notice a dead worker or a new one."""
_SHORT_TOKENS = 128
"""Answers that can be no longer cost less than their HTTP exchange, so siblings share one."""
_FIX = "look at the engine's and the router's log in <run_dir>/logs"


class _UnavailableError(Exception):
    """Nothing was generated, and asking again may help."""


class _RefusedError(EngineError):
    """The engine answered, but not as it should."""


@dataclass(slots=True, eq=False)
class _Wish:
    """One answer that somebody waits for."""

    input_ids: Sequence[int]
    sampling: dict[str, Any]
    request_id: str
    answer: asyncio.Future[Completion]


class ServingClient:
    """The way to all engines of one model: their router, or one engine itself.

    Use as ``async with ServingClient(url, timeout_s=600, max_connections=256) as client``.

    Args:
        base_url: of the router or engine, ``http://host:port``.
        timeout_s: longest time of one request, waiting for a connection included.
        max_connections: most calls in flight; further ones wait here.

    Requests for short answers with the same routing key, made by tasks that are ready together (siblings), travel as
    one call. A longer answer travels alone, so that none waits for another or is lost with it.
    """

    def __init__(self, base_url: str, *, timeout_s: float, max_connections: int) -> None:
        self._base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None
        self._gathering: dict[str, list[_Wish]] = {}
        self._calls: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._max_connections),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            headers=JSON_HEADERS,
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def generate(
        self,
        *,
        input_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        routing_key: str | None = None,
    ) -> Completion:
        """Generate one answer.

        A server that cannot be reached, or says 502 or 503, or a router that lost the engine, is asked again for a
        bounded time, under a request id of its own each time: the one before may still be running.

        Args:
            input_ids: the prompt.
            sampling: how to sample.
            request_id: names the request in the engine's logs and in ``EngineClient.abort_request``.
            routing_key: requests with the same key go to one engine, where the router's policy can.

        Returns:
            The answer. One that was aborted has what was generated until then, which may be nothing (then its
            weight version is -1).

        Raises:
            EngineError: no engine answered in time, or one refused, or its answer is not whole.
        """
        wish = _Wish(input_ids, _to_json(sampling), request_id, asyncio.get_running_loop().create_future())
        if routing_key is None or sampling.max_new_tokens > _SHORT_TOKENS:
            self._start(routing_key, [wish])
        elif routing_key in self._gathering:
            self._gathering[routing_key].append(wish)
        else:
            self._gathering[routing_key] = [wish]
            # Tasks that are ready now run before this callback: siblings started together travel together.
            asyncio.get_running_loop().call_soon(self._start_gathered, routing_key)
        return await wish.answer

    def _start_gathered(self, routing_key: str) -> None:
        wishes = [wish for wish in self._gathering.pop(routing_key) if not wish.answer.done()]
        if wishes:
            self._start(routing_key, wishes)

    def _start(self, routing_key: str | None, wishes: list[_Wish]) -> None:
        """Send a call for these wishes; it ends early when nobody waits any more."""
        call = asyncio.create_task(self._try_call(routing_key, wishes))
        self._calls.add(call)

        def hand_out(_: asyncio.Future[Any]) -> None:
            self._calls.discard(call)
            for place, wish in enumerate(wishes):
                if wish.answer.done():
                    continue
                if call.cancelled():
                    wish.answer.cancel()
                elif error := call.exception():
                    wish.answer.set_exception(error)
                elif isinstance(answer := call.result()[place], EngineError):
                    wish.answer.set_exception(answer)
                else:
                    wish.answer.set_result(answer)

        def stop_when_unwanted(_: asyncio.Future[Completion]) -> None:
            if all(wish.answer.done() for wish in wishes):
                call.cancel()

        call.add_done_callback(hand_out)
        for wish in wishes:
            wish.answer.add_done_callback(stop_when_unwanted)

    async def _try_call(self, routing_key: str | None, wishes: list[_Wish]) -> Sequence[Completion | EngineError]:
        try:
            return await self._call(routing_key, wishes)
        except _RefusedError as error:
            if len(wishes) == 1:
                return [error]
        except EngineError as error:
            return [error] * len(wishes)
        # One of them may be at fault, and the others need not suffer for it.
        alone = [self._try_call(routing_key, [wish]) for wish in wishes]
        return [answer for answers in await asyncio.gather(*alone) for answer in answers]

    async def _call(self, routing_key: str | None, wishes: list[_Wish]) -> Sequence[Completion | EngineError]:
        started = time.perf_counter()
        headers = {ROUTING_KEY_HEADER: routing_key} if routing_key is not None else None
        try:
            status, content = await self._post(_to_body(wishes), headers)
        except _UnavailableError:
            status, content = await self._post_again(wishes, headers)
        duration_s = time.perf_counter() - started
        if status == _STATUS_ABORTED_IN_QUEUE:
            return [Completion((), (), FINISH_ABORT, -1, len(wish.input_ids), 0, duration_s) for wish in wishes]
        if status != 200:
            raise self._refuse(f"answered {status}: {to_message(content)}")
        return self._to_completions(content, len(wishes), duration_s)

    def _to_completions(self, content: bytes, num_wishes: int, call_s: float) -> list[Completion | EngineError]:
        try:
            answers = orjson.loads(content) if num_wishes > 1 else [orjson.loads(content)]
            if len(answers) != num_wishes:
                raise ValueError(f"{len(answers)} answers to {num_wishes} prompts")
        except (ValueError, TypeError) as error:
            raise self._unreadable(error, content) from error
        found: list[Completion | EngineError] = []
        for answer in answers:
            try:
                found.append(_to_completion(answer, call_s))
            except (KeyError, IndexError, TypeError, ValueError) as error:
                found.append(self._unreadable(error, orjson.dumps(answer)))
        return found

    def _unreadable(self, error: Exception, content: bytes) -> EngineError:
        return self._refuse(f"gave an answer that cannot be read ({error!r}): {content[:300]!r}")

    async def _post(self, body: dict[str, Any], headers: dict[str, str] | None) -> tuple[int, bytes]:
        if self._session is None:
            raise self._error("was called outside of `async with`")
        try:
            async with self._session.post(
                self._base_url + "/generate", data=orjson.dumps(body), headers=headers
            ) as response:
                status, content = response.status, await response.read()
        except TimeoutError as error:
            raise self._error(f"had no answer within {self._timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise _UnavailableError(f"could not be reached: {error or type(error).__name__}") from error
        if status in _STATUSES_TO_RETRY or (status == 500 and _LOST_ENGINE in content):
            raise _UnavailableError(f"answered {status}: {to_message(content)}")
        return status, content

    async def _post_again(self, wishes: list[_Wish], headers: dict[str, str] | None) -> tuple[int, bytes]:
        def give_up(state: RetryCallState) -> tuple[int, bytes]:
            problem = state.outcome.exception() if state.outcome else None
            raise self._error(f"{problem} (asked {state.attempt_number + 1} times in {_RETRY_S:g} s)")

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_UnavailableError),
            wait=wait_random_exponential(multiplier=0.1, max=5),
            stop=stop_after_delay(min(_RETRY_S, self._timeout_s)),
            retry_error_callback=give_up,
        )
        attempts = iter(range(1, 1_000_000))

        # A lambda would not do: tenacity awaits only what is a coroutine function.
        async def post() -> tuple[int, bytes]:
            return await self._post(_to_body(wishes, f".{next(attempts)}"), headers)

        return await retrying(post)

    def _refuse(self, problem: str) -> EngineError:
        return _RefusedError(f"engine {self._base_url}", f"/generate {problem}", _FIX)

    def _error(self, problem: str) -> EngineError:
        return EngineError(f"engine {self._base_url}", f"/generate {problem}", _FIX)


def _to_body(wishes: list[_Wish], suffix: str = "") -> dict[str, Any]:
    """One /generate body; several prompts are lists, one is itself."""
    columns = ([w.input_ids for w in wishes], [w.sampling for w in wishes], [w.request_id + suffix for w in wishes])
    input_ids, sampling, rids = columns if len(wishes) > 1 else (column[0] for column in columns)
    return {"input_ids": input_ids, "sampling_params": sampling, "rid": rids, "return_logprob": True}


def _to_completion(answer: dict[str, Any], call_s: float) -> Completion:
    token_ids = tuple(answer["output_ids"])
    meta = answer["meta_info"]
    finish = meta["finish_reason"]["type"]
    entries = meta.get("output_token_logprobs")
    if entries is None and finish == FINISH_ABORT:  # aborted while it waited: the engine kept no logprobs
        token_ids, entries = (), ()
    logprobs = tuple([entry[0] for entry in entries])
    # A sum is finite exactly when all its terms are, and a missing term is a TypeError.
    if tuple([entry[1] for entry in entries]) != token_ids or not math.isfinite(sum(logprobs)):
        raise ValueError("token ids and log probabilities do not match")
    return Completion(
        token_ids=token_ids,
        rollout_logprobs=logprobs,
        finish_reason=finish,
        weight_version=to_weight_version(meta["weight_version"]),
        num_prompt_tokens=meta["prompt_tokens"],
        num_cached_tokens=meta.get("cached_tokens") or 0,
        duration_s=meta.get("e2e_latency") or call_s,  # the call's own includes waiting for the siblings
    )


def _to_json(sampling: SamplingParams) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_new_tokens": sampling.min_new_tokens,
        "stop": sampling.stop,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return params
