import pytest
from scripted_parts import NumberSource, make_rollout

from rlrecipes.rollout.collector import Collection
from rlrecipes.rollout.metrics import compute_rollout_metrics
from rlrecipes.tracking.metrics import check_metrics
from rlrecipes.types import Completion, Group, RolloutStatus, Turn

SOURCE = NumberSource()


def make_group(index, *rewards, status=RolloutStatus.COMPLETED, **changes):
    prompt = SOURCE.prompt(index)
    return Group(
        prompt,
        tuple(make_rollout(prompt, i, reward=reward, status=status, **changes) for i, reward in enumerate(rewards)),
    )


def turn(num_tokens, version, duration_s, num_cached_tokens):
    return Turn(
        (1, 2), Completion((0,) * num_tokens, (0.0,) * num_tokens, "stop", version, 2, num_cached_tokens, duration_s)
    )


def test_numbers_are_what_their_names_say():
    prompt = SOURCE.prompt(0)
    mixed = Group(
        prompt,
        (
            make_rollout(prompt, 0, reward=1.0, turns=(turn(4, 3, 0.5, 0),), reward_parts={"right": 1.0}),
            make_rollout(prompt, 1, reward=0.0, turns=(turn(12, 1, 2.0, 2),), reward_parts={"right": 0.0}),
            make_rollout(prompt, 2, reward=0.0, status=RolloutStatus.FAILED),
            make_rollout(prompt, 3, reward=0.5, turns=(turn(2, 3, 0.1, 1),), status=RolloutStatus.TRUNCATED),
        ),
    )
    collection = Collection(
        (mixed, make_group(1, 1.0, 1.0, turns=(turn(1, 3, 0.1, 0),))), {"zero_variance": 3}, 60, 4.0
    )
    metrics = compute_rollout_metrics(collection, num_gpus=3, weight_version=3)
    assert check_metrics(metrics) == metrics
    assert metrics == pytest.approx(
        {
            "reward/mean": 3.5 / 5,
            "reward/std": ((2 * 0.7**2 - 0 + 0.3**2 * 2 + 0.2**2 + 0.3**2 - 0.7**2) / 5) ** 0.5,
            "reward/min": 0.0,
            "reward/max": 1.0,
            "reward_part/right": 0.5,
            "response/mean_tokens": 20 / 5,
            "response/max_tokens": 12,
            "response/min_tokens": 1,
            "response/truncated_fraction": 1 / 5,
            "prompt/mean_tokens": 1.0,
            "rollout/num_groups": 2,
            "rollout/num_rollouts": 6,
            "rollout/failed_fraction": 1 / 6,
            "rollout/aborted_fraction": 0.0,
            "rollout/zero_variance_fraction": 0.5,
            "rollout/num_filtered_groups": 3,
            "rollout/time_s": 4.0,
            "rollout/tokens_per_s_per_gpu": 5.0,
            "rollout/longest_tokens_per_s": 6.0,
            "rollout/mean_turns": 1.0,
            "rollout/max_turns": 1,
            "rollout/prefix_cache_hit_fraction": 3 / 10,
            "staleness/mean": 2 / 5,
            "staleness/max": 2,
        }
    )


def test_without_an_answer_there_is_no_reward_to_report():
    collection = Collection((make_group(0, 0.0, 0.0, status=RolloutStatus.FAILED),), {}, 0, 1.0)
    metrics = compute_rollout_metrics(collection, num_gpus=1, weight_version=0)
    assert "reward/mean" not in metrics and "response/mean_tokens" not in metrics
    assert metrics["rollout/failed_fraction"] == metrics["rollout/zero_variance_fraction"] == 1.0
    assert metrics["rollout/tokens_per_s_per_gpu"] == metrics["rollout/prefix_cache_hit_fraction"] == 0.0


def test_turns_are_counted_a_rollout():
    prompt = SOURCE.prompt(0)
    one, three = (turn(4, 3, 0.5, 0),), (turn(1, 3, 0.5, 0),) * 3
    rollouts = (make_rollout(prompt, 0, turns=one), make_rollout(prompt, 1, turns=three))
    failed = make_rollout(prompt, 2, turns=one * 2, status=RolloutStatus.FAILED)
    collection = Collection((Group(prompt, (*rollouts, failed)),), {}, 60, 4.0)
    metrics = compute_rollout_metrics(collection, num_gpus=1, weight_version=3)
    assert (metrics["rollout/mean_turns"], metrics["rollout/max_turns"]) == (2.0, 3)


def test_what_is_wrong_with_dropped_groups_shows():
    kept = make_group(0, 1.0, 0.0, turns=(turn(4, 3, 0.5, 0),))
    failed = make_group(1, 0.0, 0.0, status=RolloutStatus.FAILED)
    cut = make_group(2, 0.0, 0.0, turns=(turn(16, 1, 4.0, 2),) * 2, status=RolloutStatus.TRUNCATED)
    collection = Collection((kept,), {"zero_variance": 2}, 72, 4.0, (failed, cut))
    metrics = compute_rollout_metrics(collection, num_gpus=1, weight_version=3)
    expected = {
        "reward/mean": 1 / 4,
        "response/mean_tokens": 18.0,
        "response/truncated_fraction": 1 / 2,
        "rollout/failed_fraction": 1 / 3,
        "rollout/zero_variance_fraction": 2 / 3,
        "rollout/longest_tokens_per_s": 4.0,
        "rollout/mean_turns": 1.5,
        "rollout/prefix_cache_hit_fraction": 8 / 12,
        # What training gets, and no other.
        "rollout/num_groups": 1,
        "rollout/num_rollouts": 2,
        "staleness/max": 0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
