import asyncio

import pytest

from rlrecipes.errors import ConfigError, EngineError
from rlrecipes.rewards.registry import build_reward, check_reward
from rlrecipes.types import Group, Prompt, Rollout, RolloutStatus

OPTIONS = {
    "model": "reward",
    "prompt_template": 'Q {prompt} A {response} L {label} {"json": {braces}}',
    "max_new_tokens": 9,
    "pattern": r"Score: *(\d+)?",
    "scale": 0.5,
}


class Classifier:
    async def classify(self, *, text, request_id):
        return {"ab": -2.5, "[b]": 1.5}[text]


@pytest.mark.parametrize(("options", "reward"), [({}, -2.5), ({"prompt_template": "[{response}]", "scale": 2.0}, 3.0)])
def test_a_classifier_gives_its_number(options, reward):
    options = {"model": "reward"} | options
    built = build_reward("served_classifier", timeout_s=5, options=options, models={"reward": Classifier()})
    rollout = Rollout(Prompt(4, (1,), "a"), 1, (), "b", RolloutStatus.COMPLETED)
    assert asyncio.run(built.reward_group(Group(rollout.prompt, (rollout,)))).rollouts[0].reward == reward


class Judge:
    def __init__(self, reply):
        self.reply, self.asked = reply, []

    async def chat(self, *, text, max_new_tokens, request_id):
        self.asked.append((text, max_new_tokens, request_id))
        if isinstance(self.reply, Exception):
            raise self.reply
        await asyncio.sleep(0 if isinstance(self.reply, str) else 60)
        return self.reply


def judge(reply, response="{label} 7", timeout_s=5.0, **options):
    judges = {}  # as when a run starts: the reward is there before the engines
    judges["reward"] = None
    reward = build_reward("served_judge", timeout_s=timeout_s, options=OPTIONS | options, models=judges)
    judges["reward"] = Judge(reply)
    rollout = Rollout(Prompt(4, (1,), "2+5", "seven"), 1, (), response, RolloutStatus.COMPLETED)
    group = asyncio.run(reward.reward_group(Group(rollout.prompt, (rollout,))))
    return group.rollouts[0], judges["reward"].asked


def test_the_last_number_of_the_reply_is_the_reward():
    rollout, asked = judge("Score: 2 would be harsh. Score:  7. Score: none")
    assert rollout.reward == 3.5
    assert asked == [('Q 2+5 A {label} 7 L seven {"json": {braces}}', 9, "judge-4-1.")]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("I cannot say", "reward gave no number that"),
        (EngineError("engine", "had no answer", "wait"), "had no answer"),
        (None, "took longer than 0.05 s"),
    ],
)
def test_a_judge_that_fails_is_data(reply, reason):
    rollout, _ = judge(reply, timeout_s=0.05 if reply is None else 5.0)
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.reward == 0.0
    assert reason in rollout.reason


@pytest.mark.parametrize(
    ("options", "where", "message"),
    [
        ({"model": "rewrd"}, "reward.options.model", "did you mean 'reward'?"),
        ({"prompt_template": "{prompt}"}, "reward.options.prompt_template", "has no {response}"),
        ({"pattern": "(\\d+"}, "reward.options.pattern", "no regular expression"),
        ({"pattern": "\\d+"}, "reward.options.pattern", "has no group"),
        ({"max_new_tokens": 0}, "reward.options.max_new_tokens", "is 0"),
        ({"modle": "x"}, "reward.options.modle", "did you mean 'model'?"),
    ],
)
def test_wrong_options_are_told_before_a_run(options, where, message):
    (problem,) = check_reward("served_judge", OPTIONS | options, ["policy", "reward"])
    assert problem.where == where
    assert message in str(problem)
    with pytest.raises(ConfigError):
        build_reward("served_judge", timeout_s=1, options=OPTIONS | options, models={"reward": Judge("")})
