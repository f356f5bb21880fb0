"""Rollouts of several turns: what is asked, what is trained, when they end, and what an environment may do wrong."""

import asyncio
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrecipes.data.observations import ObservationEncoder
from rlrecipes.data.tokenizer import build_char_tokenizer
from rlrecipes.errors import EngineError
from rlrecipes.rewards.verifier_reward import VerifierReward
from rlrecipes.rollout.environments import build_judge, retry
from rlrecipes.rollout.generate import Policy, compute_rollout_seed
from rlrecipes.rollout.groups import GroupGenerator
from rlrecipes.rollout.multi_turn import MultiTurn
from rlrecipes.rollout.samples import to_samples
from rlrecipes.types import Completion, Group, Prompt, RolloutStatus, SamplingParams

TOKENIZER = build_char_tokenizer(alphabet="abcdefgh>!")
END = TOKENIZER.eos_token_id
PROMPT = Prompt(7, (0, 1, 8), "ab>", label="ba")


@dataclass
class Talker:
    """Gives these answers, one a turn; an exception among them is raised."""

    answers: list
    requests: list = field(default_factory=list)

    async def generate(self, **request):
        self.requests.append(request)
        answer = self.answers[len(self.requests) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer


def says(text, reason="stop", version=1, logprob=-0.5):
    ids = (*TOKENIZER(text)["input_ids"], *([END] if reason == "stop" else []))
    return Completion(ids, (logprob,) * len(ids), reason, version, 0, 0, 0.5)


def always(text):
    return lambda episode: text


def compare(rollout):
    return float(rollout.text == rollout.prompt.label)


REWARD = VerifierReward(compare, name="mine", timeout_s=5)
BROKEN = VerifierReward(lambda rollout: "right", name="mine", timeout_s=5)


def make(client, environment, **changes):
    values = {
        "name": "mine",
        "judge": build_judge(REWARD),
        "max_turns": 3,
        "max_observation_tokens": 4,
        "timeout_s": 5.0,
    }
    policy = Policy(client, tokenizer=TOKENIZER, sampling=SamplingParams(max_new_tokens=8), seed=5, run_id="run")
    encoder = ObservationEncoder(TOKENIZER, apply_chat_template=False, role="user")
    return MultiTurn(policy, environment, encoder=encoder, **(values | changes))


def run(client, environment, **changes):
    return asyncio.run(make(client, environment, **changes)(PROMPT, 1))


def test_every_turn_sends_all_ids_before_it_as_they_are():
    client = Talker([says("c"), says("dd"), says("e")])
    rollout = run(client, always("!a"))
    first, second, third = (tuple(request["input_ids"]) for request in client.requests)
    assert first == PROMPT.token_ids
    assert second == (*first, 2, END, 9, 0)
    assert third == (*second, 3, 3, END, 9, 0)
    assert rollout.token_ids == (*third, 4, END)
    assert (rollout.status, rollout.text, len(rollout.turns)) == (RolloutStatus.COMPLETED, "e", 3)


def test_requests_of_a_rollout_have_names_and_seeds_of_their_own_and_one_engine():
    client = Talker([says("c")] * 3)
    run(client, always("!"))
    assert [request["request_id"] for request in client.requests] == ["run-7-1.", "run-7-1-1.", "run-7-1-2."]
    assert {request["routing_key"] for request in client.requests} == {"run-7"}
    seeds = [request["sampling"].seed for request in client.requests]
    assert seeds == [compute_rollout_seed(5, 7, 1, turn) for turn in range(3)]
    assert len(set(seeds)) == 3
    assert seeds[0] == compute_rollout_seed(5, 7, 1)


def test_an_environment_sees_what_was_said_and_ends_the_episode():
    seen = []

    async def environment(episode):
        seen.append((episode.answers, episode.observations, episode.rollout.text))
        return "!" * len(episode.answers) if len(episode.answers) < 3 else None

    rollout = run(Talker([says("c"), says("d"), says("e"), says("f")]), environment, max_turns=5)
    assert seen == [(("c",), (), "c"), (("c", "d"), ("!",), "d"), (("c", "d", "e"), ("!", "!!"), "e")]
    assert (rollout.status, len(rollout.turns)) == (RolloutStatus.COMPLETED, 3)


def test_no_environment_is_asked_after_the_last_turn():
    asked = []
    run(Talker([says("c"), says("d")]), lambda episode: asked.append(0) or "!", max_turns=2)
    assert len(asked) == 1


def test_retrying_ends_with_a_right_answer():
    async def again(episode):
        return await retry(episode, feedback="!{prompt}")

    client = Talker([says("ab"), says("ba"), says("ab")])
    rollout = run(client, again)
    assert (len(rollout.turns), rollout.text) == (2, "ba")
    assert rollout.turns[1].observation_ids == (9, 0, 1, 8)


@pytest.mark.parametrize(
    ("second", "status", "reason", "num_turns"),
    [
        (says("dd", "length"), RolloutStatus.TRUNCATED, "", 2),
        (says("d", "abort"), RolloutStatus.ABORTED, "the engine aborted it", 2),
        (EngineError("engines", "is gone", "restart it"), RolloutStatus.FAILED, "is gone", 1),
        (says("", "length"), RolloutStatus.FAILED, "the engine gave no token", 2),
        (says("d", logprob=float("nan")), RolloutStatus.FAILED,
         "the engine gave a log probability that is not finite", 2),
    ],
)  # fmt: skip
def test_what_ends_a_single_turn_ends_them_all(second, status, reason, num_turns):
    client = Talker([says("c"), second, says("e")])
    rollout = run(client, always("!"))
    assert (rollout.status, rollout.reason, len(rollout.turns)) == (status, reason, num_turns)
    assert len(client.requests) == 2
    samples = to_samples(Group(PROMPT, (replace(rollout, reward=0.0),)))
    assert len(samples) == (status is RolloutStatus.TRUNCATED)


async def sleep_long(episode):
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("environment", "changes", "reason"),
    [
        (lambda episode: 1 / 0, {}, "ZeroDivisionError: division by zero"),
        (lambda episode: 5, {}, "TypeError: gave 5, neither text nor None"),
        (sleep_long, {"timeout_s": 0.01}, "took longer than 0.01 s"),
        (always("!!!!!"), {},
         "ValueError: its observation has 5 tokens, more than rollout.generate.max_observation_tokens=4"),
        (always(""), {}, "ValueError: its observation is empty"),
        (always("?"), {}, "ValueError: its observation '?' has text that the tokenizer does not know"),
        (lambda episode: retry(episode, feedback="!"), {"judge": build_judge(BROKEN)},
         "verifier mine: ValueError: gave 'right', not a finite number"),
    ],
)  # fmt: skip
def test_what_an_environment_does_wrong_is_data(environment, changes, reason):
    client = Talker([says("c"), says("d")])
    rollout = run(client, environment, **changes)
    assert (rollout.status, rollout.reason) == (RolloutStatus.FAILED, f"environment mine: {reason}")
    assert len(client.requests) == len(rollout.turns) == 1
    assert to_samples(Group(PROMPT, (replace(rollout, reward=0.0),))) == []


def test_a_cancelled_environment_is_no_data():
    async def cancel():
        task = asyncio.create_task(make(Talker([says("c")]), sleep_long)(PROMPT, 0))
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())


ANSWERS = st.lists(
    st.tuples(
        st.lists(st.integers(0, END), min_size=1, max_size=6),
        st.text("abcdefgh>!", min_size=1, max_size=4),
        st.integers(0, 9),
        st.floats(-9, -0.001),
    ),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=200)
@given(turns=ANSWERS, last=st.sampled_from(["stop", "length"]))
def test_trained_are_exactly_the_ids_that_were_sampled(turns, last):
    """Sampled ids need not be what the tokenizer makes of their text."""
    completions = [
        Completion(tuple(ids), tuple(logprob * (i + 1) for i in range(len(ids))), "stop", version)
        for ids, _, version, logprob in turns
    ]
    completions[-1] = replace(completions[-1], finish_reason=last)
    client = Talker(completions)
    generate = make(client, lambda episode: turns[len(episode.answers) - 1][1], max_turns=len(turns))
    group = asyncio.run(GroupGenerator(generate, REWARD, 1).run(PROMPT, asyncio.Semaphore(1)))
    (sample,) = to_samples(group)
    trained = [token for token, is_trained in zip(sample.token_ids, sample.loss_mask, strict=True) if is_trained]
    assert trained == [token for completion in completions for token in completion.token_ids]
    logprobs = zip(sample.rollout_logprobs, sample.loss_mask, strict=True)
    expected = iter(logprob for completion in completions for logprob in completion.rollout_logprobs)
    assert all(logprob == (next(expected) if is_trained else 0.0) for logprob, is_trained in logprobs)
    for request, completion in zip(client.requests, completions, strict=True):
        sent = (*request["input_ids"], *completion.token_ids)
        assert sample.token_ids[: len(sent)] == sent
    assert len(sample.token_ids) == len(sent)
    assert sample.weight_version == min(completion.weight_version for completion in completions)
    assert (sample.status is RolloutStatus.TRUNCATED) == (last == "length")
    assert sample.reward == float(TOKENIZER.decode(completions[-1].token_ids, skip_special_tokens=True) == "ba")
