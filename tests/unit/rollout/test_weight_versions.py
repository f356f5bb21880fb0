"""What an engine answers that the weights never reached is neither trained nor counted as accuracy."""

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from scripted_parts import NumberSource, ScriptedClient, make_generator

from rlrecipes.data.buffer import SampleBuffer
from rlrecipes.errors import EngineError
from rlrecipes.rollout.collector import Collector
from rlrecipes.runner.faults import StopRequest
from rlrecipes.runner.loop import Loop

NUM_PROMPTS = 4


def answer_as(version_of):
    return ScriptedClient(
        answer=lambda completion, request_id: replace(completion, weight_version=version_of(request_id))
    )


def build_loop(client, version, num_groups=NUM_PROMPTS):
    """A loop whose engines are ready, with everything else left out."""

    class Ignore:
        def __getattr__(self, name):
            return lambda *arguments, **keywords: None

    async def load():
        return SimpleNamespace(kv_cache_use_fraction=0.0)

    async def do_nothing(*_, **__):
        return {}

    generator = make_generator(client)
    collector = Collector(
        generator,
        source=NumberSource(),
        buffer=SampleBuffer(NUM_PROMPTS),
        max_concurrent_requests=4,
        filters=[],
        max_failed_fraction=0.5,
    )
    engine = SimpleNamespace(client=SimpleNamespace(load=load), num_ranks=1)
    parts = SimpleNamespace(
        plan=SimpleNamespace(
            batch=SimpleNamespace(prompts_per_step=num_groups),
            data=SimpleNamespace(name="numbers"),
            rollout=SimpleNamespace(max_concurrent_requests=4, max_failed_fraction=0.5),
        ),
        inputs=SimpleNamespace(eval_prompts=[NumberSource().prompt(index) for index in range(NUM_PROMPTS)]),
        turns=SimpleNamespace(is_engines_turn=True, to_trainer=do_nothing),
        learner=SimpleNamespace(train_groups=do_nothing),
        serving=SimpleNamespace(policy_engines=[engine], check_alive=lambda: None),
        system=SimpleNamespace(phase=nullcontext),
        tracker=Ignore(),
        progress=Ignore(),
        stop=StopRequest(),
        collector=collector,
        evaluations={},
    )
    return Loop(parts, 0, version, is_evaluation_due=False, next_sample=0), generator, collector


def train(loop):
    return asyncio.run(loop._learn_from_rollouts())


def evaluate(loop, generator):
    return asyncio.run(loop._evaluate(generator))


def test_answers_of_an_engine_without_the_weights_stop_the_run():
    client = answer_as(lambda request_id: 0 if request_id == "run-2-1." else 7)
    loop, generator, _ = build_loop(client, version=7)
    for work in (lambda: train(loop), lambda: evaluate(loop, generator)):
        with pytest.raises(EngineError, match="weights of version 0; the last sync brought 7") as caught:
            work()
        assert "rerun the same command" in caught.value.problems[0].fix


def test_answers_of_the_last_sync_and_those_aborted_before_they_began_pass():
    client = answer_as(lambda request_id: -1 if request_id == "run-2-1." else 7)
    loop, generator, _ = build_loop(client, version=7)
    train(loop)
    evaluate(loop, generator)


def test_groups_of_a_restored_buffer_may_be_older():
    _, _, before = build_loop(answer_as(lambda _: 6), version=6)
    asyncio.run(before.collect(NUM_PROMPTS))  # a signal before they were trained
    loop, _, collector = build_loop(answer_as(lambda _: 7), version=7, num_groups=NUM_PROMPTS - 1)
    collector.restore(before.state())
    for _ in range(2):
        train(loop)
