"""The engine's numbers against transformers', in fp32, to 1e-5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engines import FAMILIES, play, save_model
from transformers import AutoModelForCausalLM

PROMPTS = [[5, 6, 7, 8, 9, 10], [40, 41, 42], [90] * 17, list(range(20, 70)), [3]]
NUM_NEW = 12


def generate_with_transformers(path: Path, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and the log-softmax of every place of prompt and answer, without a cache."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(NUM_NEW):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
    return ids[len(prompt) :], logprobs


def ask(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        **more,
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("flags", [(), ("--chunked-prefill-size", "7", "--enable-deterministic-inference")])
def test_greedy_tokens_and_logprobs_equal_transformers(family: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    path = save_model(tmp_path, family)
    answers = play(path, [ask(prompt) for prompt in PROMPTS], *flags)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens, logprobs = generate_with_transformers(path, prompt)
        assert answer["output_ids"] == tokens
        meta = answer["meta_info"]
        entries = meta["input_token_logprobs"] + meta["output_token_logprobs"]
        assert [token for _, token, _ in entries] == prompt + tokens
        assert entries[0][0] is None
        for place, (value, token, _) in enumerate(entries[1:]):
            assert value == pytest.approx(logprobs[place, token].item(), abs=1e-5)


def test_logprobs_are_of_the_temperature_scaled_distribution(model_path: Path) -> None:
    body = ask([5, 6, 7], sampling_params={"max_new_tokens": 6, "temperature": 0.5, "top_p": 0.8, "sampling_seed": 4})
    body |= {"top_logprobs_num": 3, "token_ids_logprob": [9, 50]}
    (answer,) = play(model_path, [body])
    meta, ids = answer["meta_info"], [5, 6, 7, *answer["output_ids"]]
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    scaled = torch.log_softmax(logits / 0.5, -1)
    plain = torch.log_softmax(logits, -1)
    for place, (value, token, _) in enumerate(meta["output_token_logprobs"], start=2):
        assert value == pytest.approx(scaled[place, token].item(), abs=1e-5)
        top = scaled[place].topk(3)
        assert [token for _, token, _ in meta["output_top_logprobs"][place - 2]] == top.indices.tolist()
        named = meta["output_token_ids_logprobs"][place - 2]
        assert [value for value, _, _ in named] == pytest.approx(scaled[place, [9, 50]].tolist(), abs=1e-5)
    for place, (value, token, _) in enumerate(meta["input_token_logprobs"][1:]):
        assert value == pytest.approx(plain[place, token].item(), abs=1e-5)
    assert meta["input_top_logprobs"][0] is None


def test_bfloat16_stays_near_float32(model_path: Path) -> None:
    (answer,) = play(model_path, [ask(PROMPTS[0])], "--dtype", "bfloat16")
    _, logprobs = generate_with_transformers(model_path, PROMPTS[0])
    for place, (value, token, _) in enumerate(answer["meta_info"]["input_token_logprobs"][1:]):
        assert value == pytest.approx(logprobs[place, token].item(), abs=0.2)
