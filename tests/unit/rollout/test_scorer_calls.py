import asyncio
from dataclasses import replace

import numpy as np
import pytest
from scripted_parts import RuleReward, make_rollout

from rlrecipes.errors import EngineError
from rlrecipes.rollout.groups import FailureTally
from rlrecipes.rollout.samples import to_samples
from rlrecipes.rollout.scoring import Scorer, ScoringReward
from rlrecipes.types import Completion, Group, Prompt, Rollout, RolloutStatus, TokenScores, Turn

PROMPT = Prompt(3, (5, 6), "p")


class RuleScores:
    """The logprob of token t at place p is -(t + p / 100), of its K likeliest k less."""

    def __init__(self, refuse=lambda request_id: False, weight_versions=None):
        self.requests = []
        self._refuse = refuse
        self._weight_versions = iter(weight_versions or [])

    async def score(self, *, input_ids, start, num_top, request_id, routing_key):
        self.requests.append((tuple(input_ids), start, num_top, request_id, routing_key))
        await asyncio.sleep(0)
        if self._refuse(request_id):
            raise EngineError("engine", "is gone", "restart it")
        rows = [(token, -(token + place / 100)) for place, token in enumerate(input_ids)][start:]
        return TokenScores(
            tuple(logprob for _, logprob in rows),
            tuple(tuple(token + k for k in range(num_top)) for token, _ in rows) if num_top else (),
            tuple(tuple(logprob - k for k in range(num_top)) for _, logprob in rows) if num_top else (),
            next(self._weight_versions, 0),
        )


def reward_group(rollouts, scorers, reward=None):
    reward = ScoringReward(reward or RuleReward(), scorers, run_id="run")
    return asyncio.run(reward.reward_group(Group(PROMPT, tuple(rollouts))))


def two_turns():
    turns = (
        Turn((5, 6), Completion((7, 8), (-0.1, -0.2), "stop", 1)),
        Turn((9,), Completion((10, 11, 12), (-0.3, -0.4, -0.5), "stop", 1)),
    )
    return Rollout(PROMPT, 0, turns, "r", RolloutStatus.COMPLETED)


def test_each_generated_token_gets_its_own_scores():
    teacher, reference = RuleScores(), RuleScores()
    group = reward_group([two_turns()], {"teacher": Scorer(teacher, num_top=2), "reference": Scorer(reference)})
    ids = (5, 6, 7, 8, 9, 10, 11, 12)
    assert teacher.requests == [(ids, 2, 2, "run-teacher-3-0.", "run-3")]
    assert reference.requests == [(ids, 2, 0, "run-reference-3-0.", "run-3")]
    (sample,) = to_samples(group)
    own = [0, 0, -7.02, -8.03, 0, -10.05, -11.06, -12.07]
    for name in ("teacher_logprobs", "ref_logprobs"):
        np.testing.assert_allclose(getattr(sample, name), own, rtol=1e-6)
        assert getattr(sample, name).dtype == np.float32
    generated = np.array(sample.loss_mask)
    assert sample.teacher_topk_ids.tolist() == [
        [t, t + 1] if m else [0, 0] for t, m in zip(ids, generated, strict=True)
    ]
    assert sample.teacher_topk_ids.dtype == np.int64
    np.testing.assert_allclose(sample.teacher_topk_logprobs, [[v, v - 1] if v else [0, 0] for v in own], rtol=1e-6)


def test_a_sample_without_scorers_has_none():
    (sample,) = to_samples(Group(PROMPT, (replace(two_turns(), reward=1.0),)))
    assert sample.ref_logprobs is sample.teacher_logprobs is sample.teacher_topk_ids is None


def test_models_are_asked_while_the_reward_is_computed():
    order = []

    class SlowReward(RuleReward):
        async def reward_group(self, group):
            order.append("reward starts")
            await asyncio.wait_for(asked.wait(), 5)
            return await super().reward_group(group)

    class Teacher(RuleScores):
        async def score(self, **request):
            order.append("teacher is asked")
            asked.set()
            return await super().score(**request)

    asked = asyncio.Event()
    reward_group([two_turns()], {"teacher": Scorer(Teacher())}, SlowReward())
    assert sorted(order) == ["reward starts", "teacher is asked"]


def test_a_rollout_that_was_not_scored_is_data():
    teacher = RuleScores(refuse=lambda request_id: request_id == "run-teacher-3-1.")
    rollouts = [make_rollout(PROMPT, sibling, reward=None) for sibling in range(3)]
    group = reward_group(rollouts, {"teacher": Scorer(teacher)})
    assert [r.status for r in group.rollouts] == [
        RolloutStatus.COMPLETED,
        RolloutStatus.FAILED,
        RolloutStatus.COMPLETED,
    ]
    assert group.rollouts[1].reason == "the teacher gave no log probabilities: is gone"
    assert group.rollouts[1].reward == 0.0
    assert [sample.sibling for sample in to_samples(group)] == [0, 2]
    with pytest.raises(EngineError, match="the teacher gave no log probabilities: is gone"):
        FailureTally(3, 0.1).add(group)


def test_what_failed_before_is_not_asked_about():
    teacher = RuleScores()
    rollouts = [
        make_rollout(PROMPT, 0, status=RolloutStatus.FAILED, reason="no answer"),
        make_rollout(PROMPT, 1, status=RolloutStatus.ABORTED),
        make_rollout(PROMPT, 2),
    ]
    group = reward_group(rollouts, {"teacher": Scorer(teacher)})
    assert [request[3] for request in teacher.requests] == ["run-teacher-3-2."]
    assert group.rollouts[0].reason == "no answer"


def test_what_the_reward_failed_keeps_its_reason():
    class Failing(RuleReward):
        async def reward_group(self, group):
            failed = [replace(r, status=RolloutStatus.FAILED, reward=0.0, reason="verifier") for r in group.rollouts]
            return replace(group, rollouts=tuple(failed))

    teacher = RuleScores(refuse=lambda request_id: True)
    group = reward_group([make_rollout(PROMPT, 0)], {"teacher": Scorer(teacher)}, Failing())
    assert group.rollouts[0].reason == "verifier"


def test_a_token_that_the_model_does_not_have_never_reaches_it():
    """SGLang 0.5.17 dies over it."""
    teacher = RuleScores()
    group = reward_group([two_turns()], {"teacher": Scorer(teacher, vocab_size=12)})
    assert teacher.requests == []
    assert group.rollouts[0].reason == "the teacher has no token 12: its vocabulary ends at 12"
    group = reward_group([two_turns()], {"teacher": Scorer(teacher, vocab_size=13)})
    assert group.rollouts[0].status is RolloutStatus.COMPLETED


def test_weights_that_change_are_told():
    reward = ScoringReward(RuleReward(), {"teacher": Scorer(RuleScores(weight_versions=[4, 4, 5]))}, run_id="run")

    async def run():
        return [await reward.reward_group(Group(PROMPT, (two_turns(),))) for _ in range(3)]

    statuses = [group.rollouts[0].status for group in asyncio.run(run())]
    assert statuses == [RolloutStatus.COMPLETED, RolloutStatus.COMPLETED, RolloutStatus.FAILED]
