"""How good the policy is on held-out prompts. Owns accuracy and pass@k; refuses to train on anything."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rlrecipes.errors import DataError
from rlrecipes.rollout.groups import FailureTally, GroupGenerator, run_together
from rlrecipes.types import Group, Prompt, Rollout, RolloutStatus


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What one evaluation found. Failed rollouts count as wrong.

    Attributes:
        accuracy: fraction of rollouts with a reward of 1 or more.
        mean_reward: over all rollouts.
        truncated_fraction: rollouts cut at the length limit.
        mean_response_tokens: per rollout.
        pass_at_k: k -> estimated probability that one of k answers is right, for k = 1, 2, 4 ... up to the samples per
            prompt; empty with one sample per prompt.
        groups: every prompt with its answers.
    """

    accuracy: float
    mean_reward: float
    truncated_fraction: float
    mean_response_tokens: float
    pass_at_k: Mapping[int, float]
    groups: tuple[Group, ...]

    def to_metrics(self, dataset: str) -> dict[str, float]:
        """The same as metrics, ``eval/<dataset>/...``."""
        metrics = {
            "accuracy": self.accuracy,
            "reward": self.mean_reward,
            "truncated_fraction": self.truncated_fraction,
            "response_tokens": self.mean_response_tokens,
        }
        metrics |= {f"pass_at_{k}": value for k, value in self.pass_at_k.items()}
        return {f"eval/{dataset}/{name}": value for name, value in metrics.items()}


async def run_evaluation(
    generator: GroupGenerator,
    prompts: Sequence[Prompt],
    *,
    max_concurrent_requests: int,
    max_failed_fraction: float,
    on_progress: Callable[[int], None] | None = None,
) -> EvaluationResult:
    """Answer held-out prompts and judge the answers.

    Args:
        generator: makes the group of a prompt; its group size is the samples per prompt.
        prompts: at least one.
        max_concurrent_requests: rollouts running at once.
        max_failed_fraction: more failed rollouts than this stop the run.
        on_progress: called with the prompts done so far.

    Raises:
        DataError: there is no prompt.
        EngineError: too many rollouts failed.
    """
    if not prompts:
        raise DataError("rollout.evaluation", "there is no prompt to evaluate", "give an evaluation file with prompts")
    slots = asyncio.Semaphore(max_concurrent_requests)
    failures = FailureTally(len(prompts) * generator.group_size, max_failed_fraction)
    num_done = 0

    async def run_one(prompt: Prompt) -> Group:
        nonlocal num_done
        group = await generator.run(prompt, slots)
        failures.add(group)
        num_done += 1
        if on_progress is not None:
            on_progress(num_done)
        return group

    return _summarise(await run_together(run_one(prompt) for prompt in prompts))


def _summarise(groups: Sequence[Group]) -> EvaluationResult:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    group_size = len(groups[0].rollouts)
    ks = [2**power for power in range(group_size.bit_length()) if group_size > 1]
    num_right = [sum(map(_is_right, group.rollouts)) for group in groups]
    return EvaluationResult(
        accuracy=fmean(map(_is_right, rollouts)),
        mean_reward=fmean(rollout.reward or 0.0 for rollout in rollouts),
        truncated_fraction=fmean(rollout.status is RolloutStatus.TRUNCATED for rollout in rollouts),
        mean_response_tokens=fmean(rollout.num_response_tokens for rollout in rollouts),
        pass_at_k={k: fmean(compute_pass_at_k(group_size, right, k) for right in num_right) for k in ks},
        groups=tuple(groups),
    )


def _is_right(rollout: Rollout) -> bool:
    return (rollout.reward or 0.0) >= 1.0


def compute_pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k answers is right (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    Args:
        num_samples: answers given, n.
        num_right: right ones among them, c.
        k: at most ``num_samples``.

    Returns:
        ``1 - C(n - c, k) / C(n, k)``, in [0, 1].
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)
