import asyncio
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_parts import NumberSource, RuleReward, ScriptedClient, fail_when, make_generator

from rlrecipes.data.buffer import SampleBuffer
from rlrecipes.errors import CheckpointError, ConfigError, ContractError, EngineError, RunError
from rlrecipes.rollout.collector import MAX_PROMPTS_PER_GROUP, Collector
from rlrecipes.rollout.filters import build_filters, keep_nonzero_variance
from rlrecipes.types import RolloutStatus


def make_collector(client=None, reward=None, *, filters=(), max_failed_fraction=0.5, max_groups=8, concurrency=6):
    return Collector(
        make_generator(client, reward),
        source=NumberSource(),
        buffer=SampleBuffer(max_groups),
        max_concurrent_requests=concurrency,
        filters=filters,
        max_failed_fraction=max_failed_fraction,
    )


def indices(groups):
    return [group.prompt.index for group in groups]


def solved_when(is_zero_variance):
    """Prompts for which the rule holds have equal rewards."""
    return RuleReward(lambda index, sibling: 1.0 if is_zero_variance(index) else float(sibling))


def test_steps_take_the_next_prompts_in_order():
    async def run():
        collector = make_collector(ScriptedClient(latency_seed=3))
        return [await collector.collect(4) for _ in range(3)]

    collections = asyncio.run(run())
    assert [indices(collection.groups) for collection in collections] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    first = collections[0]
    assert [[r.reward for r in group.rollouts] for group in first.groups] == [[0.0, 1.0]] * 4
    assert (first.num_tokens, first.num_filtered) == (16, {})


def test_no_more_requests_run_than_allowed():
    client = ScriptedClient(latency_seed=1)
    asyncio.run(make_collector(client, concurrency=3).collect(8))
    assert client.most_running == 3 and len(client.requests) == 16


@settings(deadline=None, max_examples=60)
@given(solved=st.sets(st.integers(0, 40), max_size=25), latency_seed=st.integers(0, 10**6), size=st.integers(1, 8))
def test_dropped_groups_are_replaced_and_who_is_first_does_not_matter(solved, latency_seed, size):
    async def run():
        client = ScriptedClient(latency_seed=latency_seed)
        collector = make_collector(client, solved_when(solved.__contains__), filters=(keep_nonzero_variance,))
        return [await collector.collect(size) for _ in range(3)], client.requests

    collections, requests = asyncio.run(run())
    kept = [index for index in range(100) if index not in solved][: 3 * size]
    assert [index for collection in collections for index in indices(collection.groups)] == kept
    # Not one prompt more was asked than needed: all up to the last one kept, each once.
    assert sorted(r["request_id"] for r in requests) == sorted(
        f"run-{i}-{s}." for i in range(kept[-1] + 1) for s in (0, 1)
    )
    dropped = [index for collection in collections for index in indices(collection.dropped)]
    assert dropped == [index for index in range(kept[-1] + 1) if index in solved]
    assert all(collection.num_filtered.get("zero_variance", 0) == len(collection.dropped) for collection in collections)


class Killed(Exception):
    pass


class MortalRun:
    """The runner's loop, killed at random moments and started again from what was saved last."""

    def __init__(self, solved, seed, size, num_steps):
        self.random = random.Random(seed)
        self.solved, self.size, self.num_steps = solved, size, num_steps
        self.saved_state, self.saved_trained, self.num_deaths = None, [], 0

    def happens(self, probability):
        return self.random.random() < probability

    def maybe_die(self):
        if self.happens(0.1):
            self.num_deaths += 1
            raise Killed

    async def live(self):
        client = ScriptedClient(latency_seed=self.random.random())
        collector = make_collector(client, solved_when(self.solved.__contains__), filters=(keep_nonzero_variance,))
        if self.saved_state is not None:
            collector.restore(json.loads(self.saved_state))
        trained = list(self.saved_trained)

        def maybe_save(probability):
            # A checkpoint is one atomic write of the weights (here: what was trained) and of the state.
            if self.happens(probability):
                self.saved_state, self.saved_trained = json.dumps(collector.state()), list(trained)
            self.maybe_die()

        while len(trained) < self.num_steps:
            collection = await collector.collect(self.size, lambda progress: maybe_save(0.3))
            maybe_save(0.3)
            trained.append(indices(collection.groups))
            collector.confirm_trained()
            maybe_save(0.9)
        return trained


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), solved=st.sets(st.integers(0, 30), max_size=15))
def test_whenever_the_run_dies_no_prompt_is_trained_twice_or_skipped(seed, solved):
    run, trained = MortalRun(solved, seed, size=3, num_steps=4), None
    while trained is None:
        try:
            trained = asyncio.run(run.live())
        except Killed:
            assert run.num_deaths < 1000
    kept = [index for index in range(100) if index not in solved]
    assert trained == [kept[step * 3 : step * 3 + 3] for step in range(4)]


def test_restored_groups_are_not_asked_again():
    async def run():
        states = []
        collector = make_collector()
        await collector.collect(4, lambda progress: states.append(json.dumps(collector.state())))
        client = ScriptedClient()
        again = make_collector(client)
        again.restore(json.loads(states[1]))
        return await again.collect(4), client, again

    collection, client, again = asyncio.run(run())
    assert indices(collection.groups) == [0, 1, 2, 3]
    assert len(client.requests) < 8
    again.confirm_trained()
    assert again.state() == {"next_index": 4, "open": [], "buffer": {"groups": []}}


def test_cancelling_stops_every_request_and_leaves_a_valid_state():
    async def run():
        client = ScriptedClient()
        blocked = asyncio.Event()

        async def wait_forever(**request):
            if request["request_id"].startswith("run-3"):
                blocked.set()
                client.num_running += 1
                try:
                    await asyncio.Event().wait()
                finally:
                    client.num_running -= 1
            return await ScriptedClient().generate(**request)

        client.generate = wait_forever
        collector = make_collector(client)
        collecting = asyncio.create_task(collector.collect(4))
        await blocked.wait()
        for _ in range(50):
            await asyncio.sleep(0)
        collecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collecting
        others = asyncio.all_tasks() - {asyncio.current_task()}
        state = json.loads(json.dumps(collector.state()))
        client.generate = ScriptedClient().generate
        return client.num_running, others, state, await collector.collect(4)

    num_running, others, state, collection = asyncio.run(run())
    assert num_running == 0 and not others
    assert state["open"] == [3]
    assert sorted(record["prompt"]["index"] for record in state["buffer"]["groups"]) == [0, 1, 2]
    assert indices(collection.groups) == [0, 1, 2, 3]


def test_few_failures_are_data():
    client = ScriptedClient(answer=fail_when(lambda request_id: request_id.endswith("2-1.")))
    collection = asyncio.run(make_collector(client).collect(4))
    failed = [r for group in collection.groups for r in group.rollouts if r.status is RolloutStatus.FAILED]
    assert [(r.prompt.index, r.sibling) for r in failed] == [(2, 1)]


@pytest.mark.parametrize(("fraction", "is_failing"), [(0.49, True), (0.5, False)])
def test_many_failures_stop_the_run(fraction, is_failing):
    client = ScriptedClient(answer=fail_when(lambda request_id: request_id.endswith("-1.")))
    collector = make_collector(client, max_failed_fraction=fraction)
    if not is_failing:
        assert len(asyncio.run(collector.collect(4)).groups) == 4
        return
    with pytest.raises(EngineError, match=r"4 of 8 rollouts failed.*\(4\): engine is gone"):
        asyncio.run(collector.collect(4))


def test_failures_of_dropped_groups_count():
    client = ScriptedClient(answer=fail_when(lambda request_id: request_id.startswith("run-1-")))
    collector = make_collector(client, filters=(keep_nonzero_variance,), max_failed_fraction=0.2)
    with pytest.raises(EngineError, match="2 of 8 rollouts failed"):
        asyncio.run(collector.collect(4))


def test_when_all_fail_the_run_stops_whatever_the_limit():
    client = ScriptedClient(answer=fail_when(lambda request_id: True))
    with pytest.raises(EngineError, match="8 of 8 rollouts failed"):
        asyncio.run(make_collector(client, max_failed_fraction=1.0).collect(4))


def test_a_filter_that_drops_everything_stops_the_run():
    collector = make_collector(reward=solved_when(lambda index: True), filters=(keep_nonzero_variance,))
    with pytest.raises(RunError, match=f"{2 * MAX_PROMPTS_PER_GROUP} prompts gave only 0 of 2 groups"):
        asyncio.run(collector.collect(2))


def test_a_reward_that_breaks_its_protocol_stops_the_run():
    class Forgetful(RuleReward):
        async def reward_group(self, group):
            return group

    with pytest.raises(ContractError, match="without reward"):
        asyncio.run(make_collector(reward=Forgetful()).collect(2))


def test_progress_is_reported_after_every_group():
    seen = []
    reward = solved_when(lambda index: index == 1)
    asyncio.run(make_collector(reward=reward, filters=(keep_nonzero_variance,)).collect(3, seen.append))
    assert len(seen) == 4
    last = seen[-1]
    assert (last.num_groups, last.num_wanted_groups, last.num_tokens) == (3, 3, 16)
    assert last.mean_reward == (3 * 1.0 + 2.0) / 8


def test_what_cannot_be_is_refused():
    with pytest.raises(ContractError, match="9 groups do not fit into a buffer of 8"):
        asyncio.run(make_collector().collect(9))
    with pytest.raises(CheckpointError, match="KeyError"):
        make_collector().restore({"next_index": 3})
    assert build_filters(["nonzero_variance"]) == (keep_nonzero_variance,)
    with pytest.raises(ConfigError, match="did you mean 'nonzero_variance'"):
        build_filters(["non_zero_variance"])


def test_a_bug_stops_everything_else_at_once():
    async def run():
        async def generate(*, request_id, **request):
            if request_id == "run-1-1.":
                raise AssertionError("a bug")
            await asyncio.Event().wait()

        client = ScriptedClient()
        client.generate = generate
        with pytest.raises(AssertionError, match="a bug"):
            await make_collector(client).collect(3)
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert not asyncio.run(run())
