"""From a prompt file to samples over real HTTP, against a server that answers as SGLang does and fails on cue."""

import asyncio
import contextlib
from dataclasses import dataclass, field

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rlrecipes.data.buffer import SampleBuffer
from rlrecipes.data.encoding import PromptEncoder
from rlrecipes.data.jsonl import JsonlPromptSource
from rlrecipes.data.rows import RowKeys
from rlrecipes.data.tokenizer import build_char_tokenizer
from rlrecipes.engines.sglang.serving import ServingClient
from rlrecipes.errors import EngineError
from rlrecipes.rewards.registry import build_reward
from rlrecipes.rollout.collector import Collector
from rlrecipes.rollout.evaluation import run_evaluation
from rlrecipes.rollout.generate import Policy, SingleTurn
from rlrecipes.rollout.groups import GroupGenerator
from rlrecipes.rollout.metrics import compute_rollout_metrics
from rlrecipes.rollout.samples import to_samples
from rlrecipes.types import RolloutStatus, SamplingParams

SAMPLING = SamplingParams(max_new_tokens=8)


@dataclass
class AddingServer:
    """Answers ``a+b=``; even seeds right, odd ones wrong. ``fail`` may answer a request in another way."""

    tokenizer: object
    fail: object = None
    running: set = field(default_factory=set)
    seen: list = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request):
        body = await request.json()
        self.seen.append(body)
        self.running.add(body["rid"])
        try:
            if self.fail is not None and (response := await self.fail(body)) is not None:
                return response
            return web.json_response(self.answer(body))
        finally:
            self.running.discard(body["rid"])
            if not self.running:
                self.left.set()

    def answer(self, body):
        first, second = self.tokenizer.decode(body["input_ids"]).rstrip("=").split("+")
        total = int(first) + int(second) + body["sampling_params"]["sampling_seed"] % 2
        ids = [*self.tokenizer(str(total))["input_ids"], self.tokenizer.eos_token_id]
        return {
            "output_ids": ids,
            "meta_info": {
                "output_token_logprobs": [[-0.5, token_id, None] for token_id in ids],
                "finish_reason": {"type": "stop", "matched": ids[-1]},
                "weight_version": "3",
                "prompt_tokens": len(body["input_ids"]),
                "cached_tokens": 1,
            },
        }


@pytest.fixture(scope="module")
def tokenizer():
    return build_char_tokenizer(alphabet="0123456789+=")


@pytest.fixture
def prompts_path(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_bytes(b"".join(orjson.dumps({"prompt": f"{i}+{i}=", "label": 2 * i}) + b"\n" for i in range(10)))
    return path


@contextlib.asynccontextmanager
async def running_road(server, prompts_path, *, timeout_s=30, max_failed_fraction=0.5, state=None):
    """Source, client, reward and collector over a running server."""
    app = web.Application()
    app.router.add_post("/generate", server.generate)
    # Without handler_cancellation a handler would outlive a client that went away, which SGLang's does not.
    async with TestServer(app, handler_cancellation=True) as http:
        source = JsonlPromptSource(
            prompts_path,
            encoder=PromptEncoder(server.tokenizer, apply_chat_template=False, max_prompt_tokens=16),
            keys=RowKeys(),
            seed=1,
            should_shuffle=True,
        )
        async with ServingClient(str(http.make_url("")), timeout_s=timeout_s, max_connections=16) as client:
            generate = SingleTurn(Policy(client, tokenizer=server.tokenizer, sampling=SAMPLING, seed=5, run_id="run"))
            reward = build_reward("math", timeout_s=30, options={"extraction": "whole"})
            generator = GroupGenerator(generate, reward, group_size=4)
            collector = Collector(
                generator,
                source=source,
                buffer=SampleBuffer(8),
                max_concurrent_requests=8,
                filters=(),
                max_failed_fraction=max_failed_fraction,
            )
            if state is not None:
                collector.restore(state)
            yield source, generator, collector


def test_from_a_prompt_file_to_samples(prompts_path, tokenizer):
    async def run():
        server = AddingServer(tokenizer)
        async with running_road(server, prompts_path) as (source, generator, collector):
            collection = await collector.collect(5)
            prompts = [source.prompt(index) for index in range(5)]
            evaluation = await run_evaluation(generator, prompts, max_concurrent_requests=8, max_failed_fraction=0.1)
            return collection, evaluation, server.seen[:20]

    collection, evaluation, seen = asyncio.run(run())
    assert sorted(body["rid"] for body in seen) == sorted(f"run-{i}-{s}." for i in range(5) for s in range(4))
    samples = [sample for group in collection.groups for sample in to_samples(group)]
    assert [(s.prompt_index, s.sibling) for s in samples] == [(i, s) for i in range(5) for s in range(4)]
    seeds = {body["rid"]: body["sampling_params"]["sampling_seed"] for body in seen}
    for sample in samples:
        is_right = seeds[f"run-{sample.prompt_index}-{sample.sibling}."] % 2 == 0
        question, _, total = tokenizer.decode(sample.token_ids).removesuffix("<eos>").partition("=")
        assert sample.reward == float(is_right) == float(int(total) == 2 * int(question.partition("+")[0]))
        assert sample.weight_version == 3
    metrics = compute_rollout_metrics(collection, num_gpus=1, weight_version=4)
    assert metrics["reward/mean"] == evaluation.accuracy == sum(seed % 2 == 0 for seed in seeds.values()) / 20
    assert metrics["staleness/mean"] == 1.0
    assert metrics["rollout/longest_tokens_per_s"] > 0


async def refuse_siblings_0(body):
    if body["rid"].split("-")[2] == "0.":
        return web.json_response({"error": {"message": "out of memory"}}, status=500)
    return None


async def talk_nonsense_to_siblings_0(body):
    return web.Response(text="<html>") if body["rid"].split("-")[2] == "0." else None


async def hang_on_siblings_0(body):
    if body["rid"].split("-")[2] == "0.":
        await asyncio.sleep(3600)


@pytest.mark.parametrize(
    ("fail", "timeout_s", "reason"),
    [
        (refuse_siblings_0, 30, "out of memory"),
        (talk_nonsense_to_siblings_0, 30, "cannot be read"),
        (hang_on_siblings_0, 1, "no answer within 1 s"),
    ],
)
def test_what_an_engine_does_wrong_fails_that_rollout_only(prompts_path, tokenizer, fail, timeout_s, reason):
    async def run():
        async with running_road(AddingServer(tokenizer, fail), prompts_path, timeout_s=timeout_s) as (_, _, collector):
            return await collector.collect(2)

    for group in asyncio.run(run()).groups:
        assert [rollout.status for rollout in group.rollouts] == [RolloutStatus.FAILED] + [RolloutStatus.COMPLETED] * 3
        assert reason in group.rollouts[0].reason
        assert len(to_samples(group)) == 3


def test_an_engine_that_always_fails_stops_the_run(prompts_path, tokenizer):
    async def refuse(body):
        return web.json_response({"error": {"message": "out of memory"}}, status=500)

    async def run():
        async with running_road(AddingServer(tokenizer, refuse), prompts_path) as (_, _, collector):
            await collector.collect(4)

    with pytest.raises(EngineError, match="out of memory"):
        asyncio.run(run())


def test_a_stopped_run_lets_go_of_the_engine_and_goes_on_later(prompts_path, tokenizer):
    async def stop_midway():
        is_busy, has_two_groups = asyncio.Event(), asyncio.Event()

        def on_progress(progress):
            if progress.num_groups == 2:
                has_two_groups.set()

        async def hang_from_prompt_2_on(body):
            if int(body["rid"].split("-")[1]) >= 2:
                if len(server.running) == 8:
                    is_busy.set()
                await asyncio.sleep(3600)

        server = AddingServer(tokenizer, hang_from_prompt_2_on)
        async with running_road(server, prompts_path) as (_, _, collector):
            collecting = asyncio.create_task(collector.collect(4, on_progress))
            await asyncio.gather(is_busy.wait(), has_two_groups.wait())
            server.left.clear()
            collecting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await collecting
            await server.left.wait()
            return orjson.dumps(collector.state())

    async def go_on(state):
        server = AddingServer(tokenizer)
        async with running_road(server, prompts_path, state=orjson.loads(state)) as (_, _, collector):
            return await collector.collect(4), {body["rid"].split("-")[1] for body in server.seen}

    async def undisturbed():
        async with running_road(AddingServer(tokenizer), prompts_path) as (_, _, collector):
            return await collector.collect(4)

    collection, asked_again = asyncio.run(go_on(asyncio.run(stop_midway())))
    assert asked_again == {"2", "3"}

    def to_comparable(collection):
        return [[(s.token_ids, s.rollout_logprobs, s.reward) for s in to_samples(group)] for group in collection.groups]

    assert to_comparable(collection) == to_comparable(asyncio.run(undisturbed()))
