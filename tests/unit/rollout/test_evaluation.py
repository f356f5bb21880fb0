import asyncio
import itertools
from dataclasses import replace

import pytest
from scripted_parts import NumberSource, RuleReward, ScriptedClient, fail_when, make_generator

from rlrecipes.errors import DataError, EngineError
from rlrecipes.rollout.evaluation import compute_pass_at_k, run_evaluation
from rlrecipes.tracking.metrics import check_metrics

PROMPTS = [NumberSource().prompt(index) for index in range(4)]


def evaluate(generator, prompts=PROMPTS, max_failed_fraction=0.5, **options):
    return asyncio.run(
        run_evaluation(
            generator, prompts, max_concurrent_requests=3, max_failed_fraction=max_failed_fraction, **options
        )
    )


def test_accuracy_counts_full_rewards_only():
    rewards = {0: 1.0, 1: 0.9, 2: 0.0, 3: 2.0}
    reward = RuleReward(lambda index, sibling: rewards[index])
    client = ScriptedClient(
        answer=lambda completion, request_id: replace(
            completion, finish_reason="length" if request_id == "run-2-0." else "stop"
        )
    )
    seen = []
    result = evaluate(make_generator(client, reward, group_size=1), on_progress=seen.append)
    assert (result.accuracy, result.mean_reward) == (0.5, pytest.approx(3.9 / 4))
    assert (result.truncated_fraction, result.mean_response_tokens, result.pass_at_k) == (0.25, 2.0, {})
    assert [group.prompt.index for group in result.groups] == [0, 1, 2, 3]
    assert seen == [1, 2, 3, 4] and client.most_running == 3
    assert result.to_metrics("sums") == {
        "eval/sums/accuracy": 0.5,
        "eval/sums/reward": pytest.approx(3.9 / 4),
        "eval/sums/truncated_fraction": 0.25,
        "eval/sums/response_tokens": 2.0,
    }


def test_several_samples_give_pass_at_k():
    # Prompt i has i right answers of 4.
    result = evaluate(make_generator(reward=RuleReward(lambda index, sibling: float(sibling < index)), group_size=4))
    assert result.accuracy == pytest.approx(6 / 16)
    assert result.pass_at_k == pytest.approx({1: 6 / 16, 2: (0 + 1 / 2 + 5 / 6 + 1) / 4, 4: 3 / 4})
    assert check_metrics(result.to_metrics("sums"))["eval/sums/pass_at_4"] == 3 / 4


@pytest.mark.parametrize(
    ("n", "c", "k"), [(n, c, k) for n in range(1, 6) for c in range(n + 1) for k in range(1, n + 1)]
)
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(n, c, k):
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert compute_pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_failures_are_wrong_and_too_many_stop():
    client = ScriptedClient(answer=fail_when(lambda request_id: request_id in ("run-0-0.", "run-1-0.")))
    generator = make_generator(client, RuleReward(lambda index, sibling: float(index > 1)), group_size=1)
    assert evaluate(generator).accuracy == 0.5
    with pytest.raises(EngineError, match="2 of 4 rollouts failed"):
        evaluate(generator, max_failed_fraction=0.3)


def test_nothing_to_evaluate_is_an_error():
    with pytest.raises(DataError, match="no prompt"):
        evaluate(make_generator(), prompts=[])
