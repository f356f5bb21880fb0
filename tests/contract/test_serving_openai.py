"""The OpenAI endpoints, alike on both servers."""

from __future__ import annotations

from typing import Any

import pytest
from live_servers import Server
from tiny_model import CONTEXT_LENGTH, Reference

pytestmark = pytest.mark.xdist_group("serving")
MESSAGES = [{"role": "user", "content": "hi"}]
COMPLETION_KEYS = {"id", "object", "created", "model", "choices", "usage", "metadata"}
USAGE_KEYS = {"prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details", "reasoning_tokens"}
GREEDY = {"model": "any", "temperature": 0}


@pytest.fixture(scope="session")
def chat_prompt(reference: Reference) -> list[int]:
    return list(reference.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False))


def usage(num_prompt: int, num_new: int) -> dict[str, Any]:
    counts = {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
    return counts | {"prompt_tokens_details": None, "reasoning_tokens": 0}


def test_completions(server: Server, reference: Reference) -> None:
    body = GREEDY | {"prompt": "Hello NO", "max_tokens": 5}
    answer = server.ok("/v1/completions", body)
    assert set(answer) == COMPLETION_KEYS and set(answer["usage"]) == USAGE_KEYS
    text = reference.decode(reference.greedy(reference.prompt, 5))
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "length", "matched_stop": None}
    assert answer["choices"] == [choice] and answer["usage"] == usage(8, 5)
    assert (answer["object"], answer["model"]) == ("text_completion", "any")
    assert answer["metadata"] == {"weight_version": "default"}
    by_ids = server.ok("/v1/completions", {**body, "prompt": reference.prompt})
    assert by_ids["choices"] == [choice]
    del body["model"]
    assert server.ok("/v1/completions", body)["model"] == "default"


def test_completions_of_several_prompts_and_siblings(server: Server, reference: Reference) -> None:
    body = GREEDY | {"prompt": ["Hello NO", "xyz"], "max_tokens": 3, "n": 2}
    answer = server.ok("/v1/completions", body)
    first, second = (reference.decode(reference.greedy(reference.encode(p), 3)) for p in body["prompt"])
    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate([first, first, second, second]))
    assert answer["usage"]["completion_tokens"] == 12


def test_completion_logprobs_and_echo(server: Server, reference: Reference) -> None:
    body = GREEDY | {"prompt": reference.prompt, "max_tokens": 3, "logprobs": 2, "echo": True}
    (choice,) = server.ok("/v1/completions", body)["choices"]
    ids = reference.prompt + reference.greedy(reference.prompt, 3)
    assert choice["text"] == reference.decode(ids)
    logprobs = choice["logprobs"]
    assert set(logprobs) == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    assert logprobs["tokens"] == [reference.decode([token]) for token in ids]
    rows = reference.logprobs(ids)
    expected = [rows[at, token].item() for at, token in enumerate(ids[1:])]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == pytest.approx(expected, abs=1e-5)
    for row, top in zip(rows, logprobs["top_logprobs"][1:], strict=True):
        best = row.topk(2)
        names = [reference.decode([token]) for token in best.indices.tolist()]
        assert top == pytest.approx(dict(zip(names, best.values.tolist(), strict=True)), abs=1e-5)


def test_completion_stops(server: Server, reference: Reference) -> None:
    text = reference.decode(reference.greedy(reference.prompt, 24))
    at = next(i for i in range(4, 24) if text[i] not in text[:i])
    body = GREEDY | {"prompt": "Hello NO", "max_tokens": 24, "stop": [text[at]]}
    (choice,) = server.ok("/v1/completions", body)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == (text[:at], "stop", text[at])


def test_streamed_completions(server: Server, reference: Reference) -> None:
    body = GREEDY | {"prompt": "Hello NO", "max_tokens": 5}
    events = server.stream("/v1/completions", body)
    assert all(set(event) == COMPLETION_KEYS - {"metadata"} and event["usage"] is None for event in events)
    choices = [event["choices"][0] for event in events]
    text = reference.decode(reference.greedy(reference.prompt, 5))
    assert "".join(choice["text"] for choice in choices) == text
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    *_, last = server.stream("/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 5


def test_chat(server: Server, reference: Reference, chat_prompt: list[int]) -> None:
    answer = server.ok("/v1/chat/completions", GREEDY | {"messages": MESSAGES, "max_tokens": 4})
    assert set(answer) == COMPLETION_KEYS and answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert set(choice) == {"index", "message", "logprobs", "finish_reason", "matched_stop"}
    content = reference.decode(reference.greedy(chat_prompt, 4))
    message = {"role": "assistant", "content": content, "reasoning_content": None, "tool_calls": None}
    assert choice["message"] == message and choice["finish_reason"] == "length"
    assert answer["usage"] == usage(len(chat_prompt), 4)


def test_chat_logprobs(server: Server, reference: Reference, chat_prompt: list[int]) -> None:
    body = GREEDY | {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    (choice,) = server.ok("/v1/chat/completions", body)["choices"]
    ids = reference.greedy(chat_prompt, 3)
    rows = reference.logprobs(chat_prompt + ids)[len(chat_prompt) - 1 :]
    for row, token, entry in zip(rows, ids, choice["logprobs"]["content"], strict=True):
        text = reference.decode([token])
        assert (entry["token"], entry["bytes"]) == (text, list(text.encode()))
        assert entry["logprob"] == pytest.approx(row[token].item(), abs=1e-5)
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert tops == pytest.approx(row.topk(2).values.tolist(), abs=1e-5)
        assert set(entry["top_logprobs"][0]) == {"token", "bytes", "logprob"}


def test_streamed_chat(server: Server, reference: Reference, chat_prompt: list[int]) -> None:
    body = GREEDY | {"messages": MESSAGES, "max_completion_tokens": 4}
    first, *middle, last = server.stream("/v1/chat/completions", body)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"reasoning_content": None, "role": "assistant", "content": ""}
    contents = [event["choices"][0]["delta"]["content"] for event in middle]
    assert "".join(contents) == reference.decode(reference.greedy(chat_prompt, 4))
    assert all(event["choices"][0]["finish_reason"] is None for event in [first, *middle])
    assert last["choices"][0]["finish_reason"] == "length" and "content" not in last["choices"][0]["delta"]
    *_, last = server.stream("/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    assert last["choices"] == [] and last["usage"]["total_tokens"] == len(chat_prompt) + 4


def test_refused_openai_requests(server: Server) -> None:
    refused: list[tuple[str, object]] = [
        ("/v1/completions", {"max_tokens": 4}),
        ("/v1/completions", b"{nope"),
        ("/v1/completions", GREEDY | {"prompt": "a" * (CONTEXT_LENGTH + 1), "max_tokens": 2}),
        ("/v1/completions", {"prompt": "a", "temperature": -1}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"max_tokens": 4}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a" * (CONTEXT_LENGTH + 1)}], "max_tokens": 2},
        ),
    ]
    for path, body in refused:
        status, answer = server.call(path, body)
        assert status == 400, (path, body, answer)
        assert set(answer) == {"object", "message", "type", "param", "code"} and answer["code"] == 400
