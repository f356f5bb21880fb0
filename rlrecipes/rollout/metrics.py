"""Numbers of a collection that people steer by. Owns how they are computed; their names stand in the catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

from rlrecipes.rollout.collector import Collection
from rlrecipes.rollout.filters import has_zero_variance
from rlrecipes.rollout.groups import is_answered
from rlrecipes.types import Completion, Rollout, RolloutStatus


def compute_rollout_metrics(collection: Collection, *, num_gpus: int, weight_version: int) -> dict[str, float]:
    """Compute the metrics of one collection.

    They are of everything that was asked, groups that filters dropped included: what is wrong with these must show.
    What training gets (``rollout/num_groups``, ``rollout/num_rollouts`` and staleness) is of the kept groups. Rewards,
    lengths, turns and staleness speak of answered rollouts (completed or truncated); when there is none, their metrics
    are absent.

    Args:
        collection: at least one group.
        num_gpus: accelerators (CPU: engines) that served it.
        weight_version: of the trainer now; staleness counts back from it.

    Returns:
        Metric name -> value.
    """
    kept = [rollout for group in collection.groups for rollout in group.rollouts]
    groups = collection.groups + collection.dropped
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    completions = [turn.completion for rollout in rollouts for turn in rollout.turns]
    num_prompt_tokens = sum(completion.num_prompt_tokens for completion in completions)
    metrics = {
        "rollout/num_groups": len(collection.groups),
        "rollout/num_rollouts": len(kept),
        "rollout/failed_fraction": fmean(r.status is RolloutStatus.FAILED for r in rollouts),
        "rollout/aborted_fraction": fmean(r.status is RolloutStatus.ABORTED for r in rollouts),
        "rollout/zero_variance_fraction": fmean(has_zero_variance(group) for group in groups),
        "rollout/num_filtered_groups": sum(collection.num_filtered.values()),
        "rollout/time_s": collection.duration_s,
        "rollout/tokens_per_s_per_gpu": _divide(collection.num_tokens, collection.duration_s * num_gpus),
        "rollout/prefix_cache_hit_fraction": _divide(sum(c.num_cached_tokens for c in completions), num_prompt_tokens),
        "prompt/mean_tokens": fmean(len(group.prompt.token_ids) for group in groups),
    }
    answered = [rollout for rollout in rollouts if is_answered(rollout)]
    if answered:
        metrics |= _compute_reward_metrics(answered) | _compute_length_metrics(answered)
        num_turns = [len(rollout.turns) for rollout in answered]
        metrics |= {"rollout/mean_turns": fmean(num_turns), "rollout/max_turns": max(num_turns)}
    trained = [turn.completion for rollout in kept if is_answered(rollout) for turn in rollout.turns]
    if trained:
        metrics |= _compute_staleness_metrics(trained, weight_version)
    return metrics


def _compute_reward_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    rewards = [rollout.reward or 0.0 for rollout in rollouts]
    metrics = {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
    }
    for name in sorted({name for rollout in rollouts for name in rollout.reward_parts}):
        metrics[f"reward_part/{name}"] = fmean(r.reward_parts[name] for r in rollouts if name in r.reward_parts)
    return metrics


def _compute_length_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = [rollout.num_response_tokens for rollout in rollouts]
    longest = max(rollouts, key=lambda rollout: rollout.num_response_tokens)
    longest_s = sum(turn.completion.duration_s for turn in longest.turns)
    return {
        "response/mean_tokens": fmean(lengths),
        "response/max_tokens": max(lengths),
        "response/min_tokens": min(lengths),
        "response/truncated_fraction": fmean(r.status is RolloutStatus.TRUNCATED for r in rollouts),
        "rollout/longest_tokens_per_s": _divide(longest.num_response_tokens, longest_s),
    }


def _compute_staleness_metrics(completions: Sequence[Completion], weight_version: int) -> dict[str, float]:
    ages = [weight_version - completion.weight_version for completion in completions]
    return {"staleness/mean": fmean(ages), "staleness/max": max(ages)}


def _divide(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
