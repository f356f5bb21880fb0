"""Collector and evaluation over the embedded engine as a process of its own."""

import asyncio
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import orjson
import pytest

from rlrecipes.data.buffer import SampleBuffer
from rlrecipes.data.encoding import PromptEncoder
from rlrecipes.data.jsonl import JsonlPromptSource
from rlrecipes.data.rows import RowKeys
from rlrecipes.data.tokenizer import build_char_tokenizer, load_tokenizer
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

SAMPLING = SamplingParams(max_new_tokens=12)
QUESTION = "State the answer: {}+{}="


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("model")
    tokenizer = build_char_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engine(model_path):
    """A running engine; gives its process and URL. The last test kills it."""
    command = [
        sys.executable,
        "-m",
        "rlrecipes.engines.embedded.server",
        "--model-path",
        str(model_path),
        "--port",
        "0",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command.append("--enable-deterministic-inference")
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        try:
            line = next((line for line in process.stdout if "http://" in line), "")
            assert line, f"the engine ended with code {process.wait()}"
            yield process, re.search(r"http://\S+", line).group()
        finally:
            process.kill()


def make_road(client, model_path, prompts_path):
    tokenizer = load_tokenizer(model_path)
    source = JsonlPromptSource(
        prompts_path,
        encoder=PromptEncoder(tokenizer, apply_chat_template=False, max_prompt_tokens=64),
        keys=RowKeys(),
        seed=1,
        should_shuffle=True,
    )
    generate = SingleTurn(Policy(client, tokenizer=tokenizer, sampling=SAMPLING, seed=5, run_id="run"))
    reward = build_reward("math", timeout_s=30, options={"extraction": "whole"})
    generator = GroupGenerator(generate, reward, group_size=4)
    collector = Collector(
        generator,
        source=source,
        buffer=SampleBuffer(8),
        max_concurrent_requests=16,
        filters=(),
        max_failed_fraction=0.5,
    )
    return source, generator, collector


@pytest.fixture
def prompts_path(tmp_path):
    path = tmp_path / "sums.jsonl"
    rows = [{"prompt": QUESTION.format(i, i), "label": 2 * i} for i in range(20)]
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def to_comparable(groups):
    return [[(s.token_ids, s.rollout_logprobs, s.reward, s.status) for s in to_samples(group)] for group in groups]


def test_greedy_rollouts_of_a_group_are_equal(engine, model_path, prompts_path):
    async def run():
        async with ServingClient(engine[1], timeout_s=30, max_connections=16) as client:
            source, generator, _ = make_road(client, model_path, prompts_path)
            greedy = SingleTurn(
                Policy(
                    client,
                    tokenizer=load_tokenizer(model_path),
                    sampling=replace(SAMPLING, temperature=0.0),
                    seed=5,
                    run_id="x",
                )
            )
            return await replace(generator, generate=greedy).run(source.prompt(0), asyncio.Semaphore(8))

    assert len({rollout.turns[0].completion.token_ids for rollout in asyncio.run(run()).rollouts}) == 1


def test_rollouts_are_whole_repeatable_and_resumable_and_a_dead_engine_stops_the_run(engine, model_path, prompts_path):
    process, url = engine

    async def run():
        states = []
        # The timeout also bounds how long a dead engine is asked again.
        async with ServingClient(url, timeout_s=6, max_connections=16) as client:
            source, generator, collector = make_road(client, model_path, prompts_path)
            first = await collector.collect(4, lambda progress: states.append(json.dumps(collector.state())))
            collector.confirm_trained()
            second = await collector.collect(4)

            _, _, resumed = make_road(client, model_path, prompts_path)
            resumed.restore(json.loads(states[1]))
            first_again = await resumed.collect(4)
            resumed.confirm_trained()
            second_again = await resumed.collect(4)

            prompts = [source.prompt(index) for index in range(3)]
            evaluation = await run_evaluation(generator, prompts, max_concurrent_requests=8, max_failed_fraction=0.1)

            process.kill()
            process.wait()
            with pytest.raises(EngineError, match="16 rollouts failed"):
                await collector.collect(4)
        return first, second, first_again, second_again, evaluation

    first, second, first_again, second_again, evaluation = asyncio.run(run())
    assert to_comparable(first_again.groups) == to_comparable(first.groups)
    assert to_comparable(second_again.groups) == to_comparable(second.groups)
    assert [group.prompt.index for group in second.groups] == [4, 5, 6, 7]
    answers = {sample.token_ids for group in first.groups for sample in to_samples(group)}
    assert len(answers) == 16, "siblings with seeds of their own differ"
    for rollout in (rollout for group in first.groups for rollout in group.rollouts):
        completion = rollout.turns[0].completion
        is_full = len(completion.token_ids) == SAMPLING.max_new_tokens
        assert rollout.status is (RolloutStatus.TRUNCATED if is_full else RolloutStatus.COMPLETED)
        assert all(-20 < logprob < 0 for logprob in completion.rollout_logprobs)
        assert (completion.num_prompt_tokens, completion.weight_version) == (len(rollout.prompt.token_ids), 0)
    assert to_comparable(evaluation.groups) == to_comparable(first.groups[:3])
    metrics = compute_rollout_metrics(second, num_gpus=1, weight_version=0)
    assert metrics["rollout/prefix_cache_hit_fraction"] > 0.5
    assert metrics["staleness/mean"] == 0
