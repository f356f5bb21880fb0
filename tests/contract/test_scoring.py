"""A served model asked for its log probabilities of tokens that another model drew."""

from __future__ import annotations

import asyncio

import pytest
import torch
from live_servers import Server
from tiny_model import Reference

from rlrecipes.engines.sglang.serving import ServingClient
from rlrecipes.types import TokenScores

pytestmark = pytest.mark.xdist_group("serving")
TOKENS = {"one": "Hello NO", "two": "x + y = 12; y + x = 21", "long": "the quick brown fox " * 20}


async def score(url: str, ids: list[int], start: int, num_top: int = 0) -> TokenScores:
    async with ServingClient(url, timeout_s=60, max_connections=8) as client:
        return await client.score(input_ids=ids, start=start, num_top=num_top, request_id="score.")


@pytest.mark.parametrize("text", TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize("num_prompt", [1, 5])
def test_scores_are_the_models_token_by_token(server: Server, reference: Reference, text: str, num_prompt: int) -> None:
    """Asked twice: the second time all of it lies in the prefix cache."""
    ids = reference.encode(text)
    expected = reference.logprobs(ids)[num_prompt - 1 :]
    for _ in range(2):
        found = asyncio.run(score(server.url, ids, num_prompt, num_top=3))
        assert len(found.logprobs) == len(ids) - num_prompt
        own = expected.gather(1, torch.tensor(ids[num_prompt:]).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(found.logprobs), own, atol=1e-5, rtol=0)
        likeliest = expected.topk(3)
        torch.testing.assert_close(torch.tensor(found.topk_logprobs), likeliest.values, atol=1e-5, rtol=0)
        assert found.topk_ids == tuple(map(tuple, likeliest.indices.tolist()))
        assert found.weight_version == 0


def test_a_temperature_does_not_reach_the_logprobs_of_a_prompt(server: Server, reference: Reference) -> None:
    """So a served model can be compared with a policy at temperature 1 only; the Plan refuses any other."""
    ids = reference.prompt
    sampling = {"temperature": 0.5, "max_new_tokens": 1, "sampling_seed": 1}
    meta = server.generate(ids, body={"logprob_start_len": 0}, **sampling)["meta_info"]
    prompt = torch.tensor([entry[0] for entry in meta["input_token_logprobs"][1:]])
    wanted = torch.tensor(ids[1:]).unsqueeze(1)
    unscaled, scaled = (reference.logprobs(ids, each).gather(1, wanted).squeeze(1) for each in (1.0, 0.5))
    torch.testing.assert_close(prompt, unscaled, atol=1e-5, rtol=0)
    assert (prompt - scaled).abs().max() > 0.1
    (value, token, _), *_ = meta["output_token_logprobs"]
    whole = reference.logprobs([*ids, token], 0.5)[-1, token]
    torch.testing.assert_close(torch.tensor(value), whole, atol=1e-5, rtol=0)


def test_the_last_token_of_the_vocabulary_is_scored_as_any(server: Server, reference: Reference) -> None:
    """SGLang 0.5.17 calls it 0 in its answer; what it says of it is right."""
    last = reference.model.config.vocab_size - 1
    ids = [*reference.prompt, last, 9, last]
    start = len(reference.prompt)
    found = asyncio.run(score(server.url, ids, start))
    expected = reference.logprobs(ids)[start - 1 :].gather(1, torch.tensor([[last], [9], [last]])).squeeze(1)
    torch.testing.assert_close(torch.tensor(found.logprobs), expected, atol=1e-5, rtol=0)
    assert (expected[0] - reference.logprobs(ids)[start - 1, 0]).abs() > 0.1
    entries = server.generate(ids, body={"logprob_start_len": start - 1})["meta_info"]["input_token_logprobs"]
    told = last if server.kind == "embedded" else 0
    assert [entry[1] for entry in entries[1:]] == [told, 9, told]


def test_a_reply_is_the_likeliest_one_under_the_models_template(server: Server, reference: Reference) -> None:
    async def ask() -> str:
        async with ServingClient(server.url, timeout_s=60, max_connections=8) as client:
            return await client.chat(text="Hello", max_new_tokens=6, request_id="chat.")

    messages = [{"role": "user", "content": "Hello"}]
    prompt = reference.encode(
        reference.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    )
    assert asyncio.run(ask()) == reference.decode(reference.greedy(prompt, 6))
