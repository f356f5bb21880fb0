"""Which generate function a recipe gets, and what one of the user's own may do wrong."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_parts import NumberSource, NumberTokenizer, ScriptedClient

from rlrecipes.config.compose import compose
from rlrecipes.errors import ConfigError
from rlrecipes.rollout.generate import Policy, SingleTurn, start_rollout
from rlrecipes.rollout.multi_turn import MultiTurn
from rlrecipes.rollout.registry import build_generate
from rlrecipes.types import Rollout, RolloutStatus, SamplingParams

PAGE = Path(__file__).parents[3] / "docs" / "rollouts.md"
PROMPT = NumberSource().prompt(7)
CODE = """
from dataclasses import replace
from rlrecipes.rollout.generate import start_rollout

async def ask_twice(policy, prompt, sibling, *, shown=3):
    rollout = await policy.extend(start_rollout(prompt, sibling), prompt.token_ids)
    return await policy.extend(rollout, (shown,))

async def take_another(policy, prompt, sibling):
    return await ask_twice(policy, prompt, sibling + 1)

async def answer_nothing(policy, prompt, sibling):
    return start_rollout(prompt, sibling)

async def give_text(policy, prompt, sibling):
    return "text"

async def break_down(policy, prompt, sibling):
    raise ValueError("no luck")

def answer(episode, *, text="again"):
    return text

if __name__ != "never":
    made_elsewhere = 1
    made_elsewhere += 1
"""


class Encoder:
    def __init__(self, problem=None):
        self.problem = problem

    def check(self):
        if self.problem:
            raise self.problem

    def encode(self, text, answer_ids):
        return (len(text),)


async def judge(rollout):
    return float(len(rollout.turns) > 2)


@pytest.fixture
def build(tmp_path, monkeypatch):
    (tmp_path / "own_rollouts.py").write_text(CODE)
    (tmp_path / "my_module.py").write_text("\n".join(re.findall("```python\n(.*?)```", PAGE.read_text(), re.DOTALL)))
    monkeypatch.syspath_prepend(tmp_path)

    def build(*words, encoder=None):
        config = compose([f"rollout.generate.{word}" if "." in word or "=" in word else word for word in words]).config
        policy = Policy(
            ScriptedClient(),
            tokenizer=NumberTokenizer(),
            sampling=SamplingParams(max_new_tokens=4),
            seed=5,
            run_id="run",
        )
        return build_generate(config.rollout, judge=judge, encoder=encoder or Encoder())(policy)

    return build


def run(generate) -> Rollout:
    return asyncio.run(generate(PROMPT, 1))


def test_the_default_is_one_turn(build):
    assert isinstance(build(), SingleTurn)


def test_a_recipe_chooses_turns_and_environment(build):
    words = ["name=multi_turn", "max_turns=3", "max_observation_tokens=5"]
    generate = build(*words, "environment={name: own_rollouts:answer, options: {text: four}}")
    assert isinstance(generate, MultiTurn)
    rollout = run(generate)
    assert [turn.observation_ids for turn in rollout.turns] == [(7,), (4,), (4,)]
    assert (rollout.status, rollout.reason) == (RolloutStatus.COMPLETED, "")


def test_a_template_that_rewrites_answers_is_told_before_anything_is_asked(build):
    problem = ConfigError("rollout.generate.observation_role", "is user", "use tool")
    words = ["name=multi_turn", "environment={name: own_rollouts:answer, options: {}}"]
    with pytest.raises(ConfigError, match="is user"):
        build(*words, encoder=Encoder(problem))


def test_what_only_importing_can_tell_is_told_at_start(build):
    with pytest.raises(ConfigError, match="has no function 'made_elsewhere'"):
        build("name=own_rollouts:made_elsewhere")


def test_a_function_of_ones_own_runs_rollouts(build):
    rollout = run(build("name=own_rollouts:ask_twice", "options={shown: 9}", "max_turns=2", "max_observation_tokens=1"))
    assert [turn.observation_ids for turn in rollout.turns] == [(7,), (9,)]
    assert rollout.status is RolloutStatus.COMPLETED


def test_a_rollout_that_is_over_gets_no_further_turn(build):
    generate = build("name=own_rollouts:ask_twice", "max_turns=2", "max_observation_tokens=1")
    client = generate.policy.client
    client.answer = lambda completion, _: replace(completion, finish_reason="length")
    rollout = run(generate)
    assert (rollout.status, len(rollout.turns), len(client.requests)) == (RolloutStatus.TRUNCATED, 1, 1)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("take_another", "gave the rollout of another prompt or sibling"),
        ("answer_nothing", "gave an answered rollout without a generated token"),
        ("give_text", "TypeError: gave 'text', not a Rollout"),
        ("break_down", "ValueError: no luck"),
        ("ask_twice", "gave 5 tokens after the prompt; rollout.generate allows 4"),
    ],
)
def test_what_it_does_wrong_is_data(build, name, reason):
    rollout = run(build(f"name=own_rollouts:{name}"))
    assert rollout == replace(
        start_rollout(PROMPT, 1), status=RolloutStatus.FAILED, reason=f"own_rollouts:{name}: {reason}"
    )


def test_what_the_page_shows_runs(build):
    assert [
        turn.observation_ids
        for turn in run(build("name=my_module:run", "max_turns=2", "max_observation_tokens=2")).turns
    ] == [(7,), (3, 4)]
    words = ["name=multi_turn", "max_turns=9", "max_observation_tokens=99"]
    rollout = run(build(*words, "environment={name: my_module:answer, options: {limit: 3}}"))
    assert [turn.observation_ids for turn in rollout.turns] == [(7,), (8,), (8,)]
