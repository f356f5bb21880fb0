"""What a server samples and reports, against what the trainer computes from transformers' logits of the same tokens."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
import torch
from live_servers import Server
from tiny_model import Reference

from rlrecipes.engines.embedded.sampling import SamplingParameters
from rlrecipes.engines.megatron.logprobs import Logprobs, compute_logprobs
from rlrecipes.engines.sglang.serving import ServingClient, _to_json
from rlrecipes.types import Completion, SamplingParams

pytestmark = pytest.mark.xdist_group("serving")
CUTS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 0.8, "top_k": 4},
    {"temperature": 1.5, "top_p": 0.8, "top_k": 9},
]
NUM_TOKENS = 40


class Alone:
    """A group of one."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def read_as_trainer(reference: Reference, prompt: list[int], answer: list[int], cut: dict[str, Any]) -> Logprobs:
    with torch.no_grad():
        logits = reference.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return compute_logprobs(
        logits, torch.tensor(answer), **cut, vocab_size=logits.shape[1], group=Alone()  # type: ignore
    )  # fmt: skip


async def generate(url: str, prompts: list[list[int]], sampling: SamplingParams) -> list[Completion]:
    async with ServingClient(url, timeout_s=60, max_connections=8) as client:
        calls = (
            client.generate(
                input_ids=prompt, sampling=dataclasses.replace(sampling, seed=index), request_id=f"agree-{index}."
            )
            for index, prompt in enumerate(prompts)
        )
        return await asyncio.gather(*calls)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_rollout_logprobs_are_the_trainers_of_the_whole_distribution(
    server: Server, reference: Reference, cut: dict[str, Any]
) -> None:
    prompts = [reference.encode(text) for text in ("Hello NO", "a", "count to ten", "x + y = ")]
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, **cut)
    for prompt, completion in zip(prompts, asyncio.run(generate(server.url, prompts, sampling)), strict=True):
        answer = list(completion.token_ids)
        found = read_as_trainer(reference, prompt, answer, cut)
        reported = torch.tensor(completion.rollout_logprobs)
        torch.testing.assert_close(reported, found.logprobs + found.kept_log_mass, atol=1e-5, rtol=0)
        torch.testing.assert_close(reported - found.kept_log_mass, found.logprobs, atol=1e-5, rtol=0)
        assert (found.kept_log_mass < 0).any() == ("top_p" in cut or "top_k" in cut)


@pytest.mark.parametrize("cut", [cut for cut in CUTS if "top_k" in cut], ids=str)
def test_the_kept_tokens_and_their_mass_are_those_the_server_names(
    servers: dict[str, Server], reference: Reference, cut: dict[str, Any]
) -> None:
    """SGLang can name them, where no router is between and top_k is given; the embedded server cannot."""
    if "sglang" not in servers:
        pytest.skip("the real SGLang was not asked for")
    server = servers["sglang"]
    asyncio.run(server.process.wait_until_ready(server.url, 240))
    body = {"return_sampling_mask": True}
    answer = server.generate(reference.prompt, body=body, max_new_tokens=NUM_TOKENS, ignore_eos=True, **cut)
    meta, ids = answer["meta_info"], answer["output_ids"]
    found = read_as_trainer(reference, reference.prompt, ids, cut)
    reported = torch.tensor(meta["output_token_sampling_logprobs"])
    torch.testing.assert_close(found.logprobs, reported, atol=1e-5, rtol=0)
    for place, kept in enumerate(meta["output_token_sampling_mask"]):
        # read as a target, a kept token has its share of the mass; any other is added to it
        one = [read_as_trainer(reference, reference.prompt + ids[:place], [token], cut) for token in kept]
        masses = torch.stack([each.logprobs.exp() for each in one])
        torch.testing.assert_close(masses.sum(), torch.tensor(1.0), atol=1e-5, rtol=0)


def test_every_sampling_field_is_sent() -> None:
    """The embedded server knows SGLang's fields and no others."""
    names = {field.name for field in dataclasses.fields(SamplingParameters)}
    assert _to_json(SamplingParams(max_new_tokens=1)).keys() == names
