"""Who gets memory: pressure, sharing, limits, ends. ``play`` itself checks that no slot is lost."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from tiny_engines import play

from rlrecipes.engines.embedded.application import build_state
from rlrecipes.engines.embedded.arguments import parse_arguments

GREEDY = {"temperature": 0, "ignore_eos": True}


def ask(prompt: list[int], num_new: int, **more: Any) -> dict[str, Any]:
    return {"input_ids": prompt, "sampling_params": {**GREEDY, "max_new_tokens": num_new}, **more}


def make_bodies(count: int, seed: int) -> list[dict[str, Any]]:
    source = random.Random(seed)
    return [
        ask([source.randrange(3, 99) for _ in range(source.randrange(1, 40))], source.randrange(1, 60), rid=f"r{place}")
        for place in range(count)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_too_little_memory_only_costs_time(model_path: Path, seed: int) -> None:
    bodies = make_bodies(24, seed)
    flags = ("--enable-deterministic-inference",)
    roomy = play(model_path, bodies, *flags)
    tight = play(model_path, bodies, *flags, "--max-total-tokens", "110", "--chunked-prefill-size", "16")
    assert [answer["output_ids"] for answer in tight] == [answer["output_ids"] for answer in roomy]
    for body, answer in zip(bodies, tight, strict=True):
        assert len(answer["output_ids"]) == body["sampling_params"]["max_new_tokens"]


def test_requests_are_retracted_when_memory_runs_out_and_still_end(model_path: Path) -> None:
    bodies = [ask([10 + place] * 4, 90) for place in range(8)]
    answers = play(model_path, bodies, "--max-total-tokens", "256")
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    assert all(len(answer["output_ids"]) == 90 for answer in answers)


def test_few_rows_serve_many_requests(model_path: Path) -> None:
    answers = play(model_path, make_bodies(20, 1), "--max-running-requests", "3")
    assert all(answer["meta_info"]["finish_reason"]["type"] == "length" for answer in answers)


def test_later_requests_reuse_prefixes(model_path: Path) -> None:
    prompt = list(range(20, 60))
    bodies = [ask(prompt, 4), ask(prompt, 4), ask([*prompt, 5, 6], 4), ask(prompt, 4, extra_key="other")]
    bodies.append(ask(prompt, 4, return_logprob=True, logprob_start_len=10))
    answers = play(model_path, bodies, delays=[0, 0.6, 0.6, 0.6, 0.6])
    cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
    assert cached == [0, 39, 40, 0, 10]
    assert len(answers[4]["meta_info"]["input_token_logprobs"]) == 30


def test_siblings_that_come_together_compute_their_prompt_once(model_path: Path) -> None:
    answers = play(model_path, [ask(list(range(20, 60)), 4) for _ in range(6)])
    assert sorted(answer["meta_info"]["cached_tokens"] for answer in answers) == [0, 39, 39, 39, 39, 39]


def test_answers_of_one_call_share_the_prompt_and_differ(model_path: Path) -> None:
    body = {"input_ids": [list(range(20, 40)), [5, 6]], "sampling_params": {"n": 3, "max_new_tokens": 8}, "rid": "x"}
    (answers,) = play(model_path, [body])
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [20, 20, 20, 2, 2, 2]
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [19, 19, 19, 1, 1, 1]
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 6
    assert len({answer["meta_info"]["id"] for answer in answers}) == 6


def test_an_answer_ends_by_token_string_length_or_not_at_all(model_path: Path) -> None:
    base = play(model_path, [ask([5, 6, 7], 20)])[0]
    third, text = base["output_ids"][2], base["text"]
    place = base["output_ids"].index(third)
    by_token = {"stop_token_ids": [third], "temperature": 0, "max_new_tokens": 20}
    by_text = {"stop": [text[1:3]], "temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    token, kept, string, none, zero = play(
        model_path,
        [
            {"input_ids": [5, 6, 7], "sampling_params": by_token},
            {"input_ids": [5, 6, 7], "sampling_params": {**by_token, "no_stop_trim": True}},
            {"input_ids": [5, 6, 7], "sampling_params": by_text},
            {"input_ids": [5, 6, 7], "sampling_params": {**by_token, "ignore_eos": True}},
            ask([5, 6, 7], 0, return_logprob=True, logprob_start_len=0),
        ],
    )
    assert token["output_ids"] == base["output_ids"][: place + 1]
    assert token["meta_info"]["finish_reason"] == {"type": "stop", "matched": third}
    assert token["text"] + text[len(token["text"]) : len(kept["text"])] == kept["text"]
    assert len(kept["text"]) == len(token["text"]) + 1
    assert string["meta_info"]["finish_reason"] == {"type": "stop", "matched": text[1:3]}
    assert string["text"] == text[: text.index(text[1:3])]
    assert none["output_ids"] == base["output_ids"]
    assert (zero["output_ids"], zero["meta_info"]["finish_reason"]) == ([], {"type": "length", "length": 0})
    assert len(zero["meta_info"]["input_token_logprobs"]) == 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (ask([5] * 600, 4), "The input (600 tokens) is longer than the model's context length (512 tokens)."),
        (ask([5] * 506, 2), "Input length (506 tokens) exceeds the maximum allowed length (506 tokens)."),
        (ask([5] * 6, 600), "Requested token count exceeds the model's maximum context length of 512 tokens."),
        (ask([], 4), "input_ids cannot be empty."),
        (ask([5, 99], 4), "The input_ids contain values outside [0, 99)"),
        (ask([5], 4, return_logprob=True, logprob_start_len=2), "req.logprob_start_len=2 is higher than the number"),
        ({"sampling_params": {}}, "Either text, input_ids or input_embeds should be provided."),
        ({"input_ids": [[5], [6]], "rid": ["a", "a"]}, "Duplicate request IDs detected within the request: ['a']"),
        ({"input_ids": [[5], [6]], "rid": ["a"]}, "The specified rids length mismatch with the batch_size"),
    ],
)
def test_what_cannot_be_generated_is_refused_and_nothing_else_is(
    model_path: Path, body: dict[str, Any], message: str
) -> None:
    refused, served = play(model_path, [body, ask([5, 6], 3)])
    assert str(refused).startswith(message)
    assert len(served["output_ids"]) == 3


def test_the_longest_possible_request_runs(model_path: Path) -> None:
    (answer,) = play(model_path, [ask([5] * 505, 7)])
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    (answer,) = play(model_path, [ask([5] * 50, 100)], "--max-total-tokens", "64")
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


def test_a_caller_who_has_gone_harms_nobody(model_path: Path) -> None:
    async def run() -> list[str]:
        state = build_state(parse_arguments(["--model-path", str(model_path)]), asyncio.get_running_loop())
        state.scheduler.start()
        try:
            gone = [state.scheduler.run(lambda: "late") for _ in range(50)]
            for future in gone:
                future.cancel()
            return [state.scheduler.run(lambda: "served").result(timeout=10)]
        finally:
            state.scheduler.stop()

    assert asyncio.run(run()) == ["served"]
