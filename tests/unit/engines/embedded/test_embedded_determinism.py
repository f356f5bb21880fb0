"""With --enable-deterministic-inference a request's bits do not depend on anything around it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tiny_engines import FAMILIES, play, save_model

FLAG = "--enable-deterministic-inference"


def make_bodies(count: int, seed: int) -> list[dict[str, Any]]:
    """Mixed lengths with shared beginnings, mixed sampling, some with prompt logprobs."""
    source = random.Random(seed)
    trunk = [source.randrange(3, 99) for _ in range(120)]
    bodies = []
    for place in range(count):
        prompt = trunk[: source.choice([0, 3, 40, 64, 100])] + [source.randrange(3, 99) for _ in range(1 + place % 30)]
        parameters: dict[str, Any] = {"max_new_tokens": source.randrange(1, 40), "ignore_eos": True}
        parameters |= source.choice(
            [{"temperature": 0}, {}, {"top_p": 0.8}, {"top_k": 5, "temperature": 1.4}, {"min_p": 0.1}]
        )
        parameters["sampling_seed"] = place
        body: dict[str, Any] = {"input_ids": prompt, "sampling_params": parameters, "return_logprob": True}
        body |= {"top_logprobs_num": source.choice([0, 2]), "logprob_start_len": source.choice([-1, 0, 2])}
        body["logprob_start_len"] = min(body["logprob_start_len"], len(prompt))
        bodies.append(body)
    return bodies


def bits(answer: dict[str, Any]) -> list[Any]:
    meta = answer["meta_info"]
    names = ("input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs")
    return [answer["output_ids"], *(meta.get(name) for name in names)]


@pytest.mark.parametrize("seed", range(3))
def test_bits_do_not_depend_on_company_order_cache_or_chunks(model_path: Path, seed: int) -> None:
    source = random.Random(100 + seed)
    bodies = make_bodies(20, seed)
    reference = [bits(answer) for answer in play(model_path, bodies, FLAG, delays=[0.03 * n for n in range(20)])]
    for flags in (
        ("--chunked-prefill-size", "13"),
        ("--max-total-tokens", "300", "--chunked-prefill-size", "50"),
        ("--max-running-requests", "2"),
        (),
    ):
        order = source.sample(range(20), 20)
        repeated = [bodies[place] for place in order] + [bodies[place] for place in source.sample(range(20), 10)]
        delays = [source.choice([0.0, 0.0, 0.05, 0.2]) for _ in repeated]
        answers = play(model_path, repeated, FLAG, *flags, delays=delays)
        for place, answer in zip(order, answers, strict=False):
            assert bits(answer) == reference[place]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen3-tied"])
def test_alone_equals_together_for_every_family(family: str, tmp_path: Path) -> None:
    path = save_model(tmp_path, family)
    bodies = make_bodies(6, 7)
    together = play(path, bodies, FLAG)
    for body, answer in zip(bodies[:2], together, strict=False):
        assert bits(play(path, [body], FLAG)[0]) == bits(answer)


def test_bfloat16_too(model_path: Path) -> None:
    bodies = make_bodies(8, 5)
    together = play(model_path, bodies, FLAG, "--dtype", "bfloat16")
    for body, answer in zip(bodies[:3], together, strict=False):
        assert bits(play(model_path, [body], FLAG, "--dtype", "bfloat16")[0]) == bits(answer)


def test_a_seed_fixes_the_tokens_without_the_flag_too(model_path: Path) -> None:
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 30, "sampling_seed": 11}}
    company = [{"input_ids": [9, place + 10], "sampling_params": {"max_new_tokens": 20}} for place in range(12)]
    alone = play(model_path, [body])[0]["output_ids"]
    assert play(model_path, [*company, body])[-1]["output_ids"] == alone
    other = {**body, "sampling_params": {"max_new_tokens": 30, "sampling_seed": 12}}
    assert play(model_path, [other])[0]["output_ids"] != alone


def test_requests_without_a_seed_differ_unless_deterministic(model_path: Path) -> None:
    bodies = [{"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 20}} for _ in range(2)]
    first, second = play(model_path, bodies)
    assert first["output_ids"] != second["output_ids"]
    first, second = play(model_path, bodies, FLAG)
    assert first["output_ids"] == second["output_ids"]
