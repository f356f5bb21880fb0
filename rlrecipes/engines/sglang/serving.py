"""The HTTP client that asks a served model, through its router. Owns what is asked, what an answer must hold, retries.

A model is asked for an answer to token ids, for its log probabilities of given token ids, or for a reply to a message.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
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
from rlrecipes.types import FINISH_ABORT, Completion, SamplingParams, TokenScores

_GENERATE, _CHAT, _EMBEDDINGS = "/generate", "/v1/chat/completions", "/v1/embeddings"
ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
_STATUS_ABORTED_IN_QUEUE = 499
_STATUSES_TO_RETRY = (502, 503)
_LOST_ENGINE = b"error sending request for url"
"""The router says so, with status 500, when the engine it chose does not take the request or dies over it."""
_RETRY_S = 60.0
"""How long an unreachable server is asked again: the router needs seconds to notice a dead worker or a new one."""
_NEUTRAL: dict[str, Any] = {
    "n": 1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "custom_params": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "stop_regex": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
    "stream_interval": None,
}
"""SGLang's other sampling fields, sent all the same: what a request leaves out, a server may take from its own options
(``preferred_sampling_params``) or from the model's generation_config.json."""
_FIX = "look at the engine's and the router's log in <run_dir>/logs"


class _UnavailableError(Exception):
    """Nothing was generated, and asking again may help."""


class ServingClient:
    """The way to all engines of one model: their router, or one engine itself.

    Use as ``async with ServingClient(url, timeout_s=600, max_connections=256) as client``.

    Args:
        base_url: of the router or engine, ``http://host:port``.
        timeout_s: longest time of one request, waiting for a connection included.
        max_connections: most requests in flight; further ones wait here.
    """

    def __init__(self, base_url: str, *, timeout_s: float, max_connections: int) -> None:
        self._base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._max_connections),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            headers=JSON_HEADERS,
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
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
        started = time.perf_counter()
        body = {"input_ids": input_ids, "sampling_params": _to_json(sampling), "return_logprob": True}
        status, content = await self._ask(_GENERATE, body, request_id, routing_key)
        if status == _STATUS_ABORTED_IN_QUEUE:
            return Completion((), (), FINISH_ABORT, -1, len(input_ids), 0, time.perf_counter() - started)
        if status != 200:
            raise self._error(f"answered {status}: {to_message(content)}")
        return self._to_completion(content, time.perf_counter() - started)

    async def score(
        self,
        *,
        input_ids: Sequence[int],
        start: int,
        num_top: int,
        request_id: str,
        routing_key: str | None = None,
    ) -> TokenScores:
        """What the model says of given tokens, at temperature 1 over the whole vocabulary; nothing is generated.

        SGLang divides the logits of tokens it generates by the temperature, and those of a prompt never.

        Args:
            input_ids: all tokens, context first.
            start: first token that is scored, at least 1.
            num_top: likeliest tokens to name at each place; 0 for none.
            request_id: as in :meth:`generate`.
            routing_key: as in :meth:`generate`.

        Returns:
            Scores of ``input_ids[start:]``.

        Raises:
            EngineError: no engine answered in time, or one refused, or its answer is not whole.
        """
        body = {
            "input_ids": input_ids,
            "sampling_params": _to_json(SamplingParams(max_new_tokens=0)),
            "return_logprob": True,
            "logprob_start_len": start - 1,  # the token there comes first, without a value
            "top_logprobs_num": num_top,
        }
        status, content = await self._ask(_GENERATE, body, request_id, routing_key)
        if status != 200:
            raise self._error(f"answered {status}: {to_message(content)}")
        return self._to_scores(content, list(input_ids[start:]), num_top)

    async def chat(self, *, text: str, max_new_tokens: int, request_id: str) -> str:
        """The model's likeliest reply to a message of a user, under its own chat template.

        Args:
            text: of the message.
            max_new_tokens: most tokens of the reply.
            request_id: as in :meth:`generate`.

        Raises:
            EngineError: no engine answered in time, or one refused, or its answer is not whole.
        """
        messages = [{"role": "user", "content": text}]
        body = {"model": "default", "messages": messages, "temperature": 0.0, "max_tokens": max_new_tokens}
        status, content = await self._ask(_CHAT, body, request_id, None)
        if status != 200:
            raise self._error(f"answered {status}: {to_message(content)}", _CHAT)
        try:
            return str(orjson.loads(content)["choices"][0]["message"]["content"] or "")
        except (orjson.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise self._error(f"gave an answer that cannot be read ({error!r}): {content[:300]!r}", _CHAT) from error

    async def classify(self, *, text: str, request_id: str) -> float:
        """The number that a model with a reward head gives a text; its engines run with ``is_embedding``.

        SGLang gives it as an embedding of one number, which the router passes on, as it does not ``/classify``.
        ``/v1/classify`` gives probabilities of labels.

        Args:
            text: whole, as the model was trained to see it.
            request_id: as in :meth:`generate`.

        Raises:
            EngineError: no engine answered in time, or one refused, or its answer is not one number.
        """
        status, content = await self._ask(_EMBEDDINGS, {"model": "default", "input": text}, request_id, None)
        if status != 200:
            raise self._error(f"answered {status}: {to_message(content)}", _EMBEDDINGS)
        try:
            (number,) = orjson.loads(content)["data"][0]["embedding"]
            return float(number)
        except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise self._error(f"gave no single number ({error!r}): {content[:300]!r}", _EMBEDDINGS) from error

    async def _ask(
        self, path: str, body: dict[str, Any], request_id: str, routing_key: str | None
    ) -> tuple[int, bytes]:
        headers = {ROUTING_KEY_HEADER: routing_key} if routing_key is not None else None
        try:
            return await self._post(path, body | {"rid": request_id}, headers)
        except _UnavailableError:
            return await self._post_again(path, body, request_id, headers)

    async def _post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None) -> tuple[int, bytes]:
        if self._session is None:
            raise self._error("was called outside of `async with`", path)
        try:
            async with self._session.post(self._base_url + path, data=orjson.dumps(body), headers=headers) as response:
                status, content = response.status, await response.read()
        except TimeoutError as error:
            raise self._error(f"had no answer within {self._timeout_s:g} s", path) from error
        except aiohttp.ClientError as error:
            raise _UnavailableError(f"could not be reached: {error or type(error).__name__}") from error
        if status in _STATUSES_TO_RETRY or (status == 500 and _LOST_ENGINE in content):
            raise _UnavailableError(f"answered {status}: {to_message(content)}")
        return status, content

    async def _post_again(
        self, path: str, body: dict[str, Any], request_id: str, headers: dict[str, str] | None
    ) -> tuple[int, bytes]:
        def give_up(state: RetryCallState) -> tuple[int, bytes]:
            problem = state.outcome.exception() if state.outcome else None
            raise self._error(f"{problem} (asked {state.attempt_number + 1} times in {_RETRY_S:g} s)", path)

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_UnavailableError),
            wait=wait_random_exponential(multiplier=0.1, max=5),
            stop=stop_after_delay(min(_RETRY_S, self._timeout_s)),
            retry_error_callback=give_up,
        )
        attempts = iter(range(1, 1_000_000))

        # A lambda would not do: tenacity awaits only what is a coroutine function.
        async def post() -> tuple[int, bytes]:
            return await self._post(path, body | {"rid": f"{request_id}.{next(attempts)}"}, headers)

        return await retrying(post)

    def _to_completion(self, content: bytes, duration_s: float) -> Completion:
        try:
            answer = orjson.loads(content)
            meta = answer["meta_info"]
            token_ids = tuple(answer["output_ids"])
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
                duration_s=duration_s,
            )
        except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise self._error(f"gave an answer that cannot be read ({error!r}): {content[:300]!r}") from error

    def _to_scores(self, content: bytes, token_ids: list[int], num_top: int) -> TokenScores:
        try:
            meta = orjson.loads(content)["meta_info"]
            entries = meta["input_token_logprobs"][1:]
            logprobs = tuple([entry[0] for entry in entries])
            top = meta["input_top_logprobs"][1:] if num_top else []
            if not _are_same([entry[1] for entry in entries], token_ids) or not math.isfinite(sum(logprobs)):
                raise ValueError("token ids and log probabilities do not match")
            if num_top and [len(row) for row in top] != [num_top] * len(token_ids):
                raise ValueError(f"not every place has its {num_top} likeliest tokens")
            return TokenScores(
                logprobs=logprobs,
                topk_ids=tuple([tuple([entry[1] for entry in row]) for row in top]),
                topk_logprobs=tuple([tuple([entry[0] for entry in row]) for row in top]),
                weight_version=to_weight_version(meta["weight_version"]),
            )
        except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise self._error(f"gave an answer that cannot be read ({error!r}): {content[:300]!r}") from error

    def _error(self, problem: str, path: str = _GENERATE) -> EngineError:
        return EngineError(f"engine {self._base_url}", f"{path} {problem}", _FIX)


def _are_same(told: Sequence[int], asked: Sequence[int]) -> bool:
    """Whether scores are of the tokens asked about.

    SGLang 0.5.17 says 0 for the last token of a vocabulary, whose log probability is its own all the same.
    """
    if len(told) != len(asked):
        return False
    differing = {pair for pair in zip(told, asked, strict=True) if pair[0] != pair[1]}
    return not differing or (len(differing) == 1 and differing.pop()[0] == 0)


def _to_json(sampling: SamplingParams) -> dict[str, Any]:
    return _NEUTRAL | {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_new_tokens": sampling.min_new_tokens,
        "stop": sampling.stop,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": sampling.ignore_eos,
        "sampling_seed": sampling.seed,
    }
