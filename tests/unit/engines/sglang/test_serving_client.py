"""What the client that generates makes of answers, good and bad."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from scripted_server import Handler, with_server

from rlrecipes.engines.sglang import serving as client_module
from rlrecipes.engines.sglang.serving import ServingClient
from rlrecipes.errors import EngineError
from rlrecipes.types import Completion, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=3, stop=("x",), stop_token_ids=(7,), seed=11)


def answer(**changes: Any) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": 4,
        "weight_version": "3",
        "cached_tokens": 1,
        "output_token_logprobs": [[-0.5, 8, None], [-1.25, 9, None]],
    }
    return {"text": "ab", "output_ids": [8, 9], "meta_info": meta | changes}


def generate(handler: Handler, timeout_s: float = 5, **kwargs: Any) -> Completion:
    async def use(url: str) -> Completion:
        async with ServingClient(url, timeout_s=timeout_s, max_connections=4) as client:
            return await client.generate(input_ids=(1, 2, 3, 4), sampling=SAMPLING, request_id="r", **kwargs)

    completion: Completion = asyncio.run(with_server(handler, use))
    return completion


def test_a_request_says_everything_and_its_answer_is_read() -> None:
    seen: dict[str, Any] = {}

    async def handler(request: web.Request) -> web.Response:
        seen.update(body=await request.json(), key=request.headers.get("X-SMG-Routing-Key"))
        return web.json_response(answer())

    completion = generate(handler, routing_key="k")
    assert seen["key"] == "k"
    assert seen["body"] == {
        "input_ids": [1, 2, 3, 4],
        "rid": "r",
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": 3,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_new_tokens": 0,
            "stop": ["x"],
            "stop_token_ids": [7],
            "ignore_eos": False,
            "sampling_seed": 11,
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
        },
    }
    assert (completion.token_ids, completion.rollout_logprobs) == ((8, 9), (-0.5, -1.25))
    assert (completion.finish_reason, completion.weight_version) == ("length", 3)
    assert (completion.num_prompt_tokens, completion.num_cached_tokens) == (4, 1) and completion.duration_s > 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"weight_version": "default"}, ((8, 9), 0)),
        ({"finish_reason": {"type": "abort"}, "output_token_logprobs": None}, ((), 3)),
    ],
)
def test_answers_of_fresh_weights_and_of_aborted_waiting(changes: dict[str, Any], expected: object) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response(answer(**changes))

    completion = generate(handler)
    assert (completion.token_ids, completion.weight_version) == expected


def test_a_request_aborted_before_it_ran_is_an_empty_completion() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "Request r was aborted"}}, status=499)

    completion = generate(handler)
    assert (completion.token_ids, completion.finish_reason, completion.weight_version) == ((), "abort", -1)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (answer(output_token_logprobs=[[-0.5, 8, None]]), "do not match"),
        (answer(output_token_logprobs=[[-0.5, 8, None], [-1.0, 7, None]]), "do not match"),
        (answer(output_token_logprobs=[[-0.5, 8, None], [None, 9, None]]), "cannot be read"),
        (answer(output_token_logprobs=[[-0.5, 8, None], [1e400, 9, None]]), "cannot be read"),
        (answer(output_token_logprobs=None), "cannot be read"),
        (answer(weight_version="abc"), "cannot be read"),
        ({"text": "no ids"}, "cannot be read"),
        ([], "cannot be read"),
    ],
)
def test_answers_that_are_not_whole_are_refused(content: object, says: str) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response(content)

    with pytest.raises(EngineError, match=says):
        generate(handler)


@pytest.mark.parametrize(
    "body", [b'{"error": {"message": "too long"}}', b'{"message": "too long"}', b'{"detail": "too long"}', b"too long"]
)
def test_a_refusal_carries_the_servers_words(body: bytes) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=400, body=body)

    with pytest.raises(EngineError, match="/generate answered 400: too long"):
        generate(handler)


def test_unavailable_servers_are_asked_again_under_new_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    ids: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        ids.append((await request.json())["rid"])
        if len(ids) == 2:  # a connection that breaks
            assert request.transport is not None
            request.transport.close()
        if len(ids) == 3:
            return web.Response(status=500, text="error sending request for url (http://engine/generate)")
        return web.json_response(answer(), status=503 if len(ids) == 1 else 200)

    assert generate(handler).token_ids == (8, 9)
    assert ids == ["r", "r.1", "r.2", "r.3"]

    async def never(_: web.Request) -> web.Response:
        return web.Response(status=503, text="no worker")

    monkeypatch.setattr(client_module, "_RETRY_S", 0.3)
    with pytest.raises(EngineError, match=r"answered 503: no worker \(asked \d+ times"):
        generate(never)


def test_a_server_that_hangs_is_given_up() -> None:
    num_asked = 0

    async def handler(_: web.Request) -> web.Response:
        nonlocal num_asked
        num_asked += 1
        await asyncio.sleep(5)
        return web.Response()

    with pytest.raises(EngineError, match="had no answer within 0.2 s"):
        generate(handler, timeout_s=0.2)
    assert num_asked == 1  # a long generation is not asked for twice
