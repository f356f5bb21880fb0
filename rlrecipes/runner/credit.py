"""From rewards to an advantage for every token, as the recipe asks. Owns the order of the steps; refuses arithmetic.

The order: overlong punishment and filtering, KL in the reward, the estimator, the KL in the advantage, distillation,
whitening. All of it sees the whole train step, before anything is split over ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlrecipes.algos.advantages import compute_group_advantages
from rlrecipes.algos.distillation import compute_distilled_advantages
from rlrecipes.algos.kl import compute_kl, compute_kl_penalized_rewards
from rlrecipes.algos.returns import (
    compute_discounted_returns,
    compute_gae,
    compute_token_advantages,
    compute_token_rewards,
    compute_whitened_advantages,
)
from rlrecipes.algos.reward_shaping import compute_filtered_loss_masks, compute_overlong_penalties
from rlrecipes.algos.value_loss import compute_explained_variance
from rlrecipes.config.schema import RlConfig
from rlrecipes.errors import TrainerError
from rlrecipes.types import RolloutStatus, Sample


@dataclass(frozen=True, slots=True)
class _Rollouts:
    """The rollouts behind the samples of a train step; one entry each, however many samples they gave.

    Attributes:
        of_sample: [S], which rollout a sample came from.
        rewards: [R] float64.
        group_ids: [R], their prompts.
        num_tokens: [R], generated.
        is_truncated: [R] bool.
    """

    of_sample: list[int]
    rewards: Tensor
    group_ids: Tensor
    num_tokens: Tensor
    is_truncated: Tensor


def assign_credit(
    samples: Sequence[Sample], algo: RlConfig, *, max_new_tokens: int
) -> tuple[list[Sample], dict[str, float]]:
    """Give every token of a train step its advantage, and the critic its targets.

    Args:
        samples: all of the train step, with the logprobs and values that the recipe needs.
        algo: the recipe's algorithm.
        max_new_tokens: the length at which generation stops.

    Returns:
        The samples with ``advantages``, and with a critic ``returns``; overlong filtering clears loss masks. Metrics of
        the catalogue that only some algorithms have.

    Raises:
        TrainerError: a logprob or value that the recipe needs is missing.
        ContractError: a number is not finite.
    """
    rollouts = _find_rollouts(samples)
    masks = to_masks(samples)
    rewards, is_counted, metrics = _shape(rollouts, algo, max_new_tokens)
    is_rejected = ~is_counted[rollouts.of_sample]
    masks = compute_filtered_loss_masks(loss_masks=masks, is_rejected=is_rejected)
    token_kls = _compute_token_kls(samples, algo)
    if algo.estimator == "group":
        advantages = _compare_with_group(algo, rollouts, rewards, is_counted, masks, token_kls)
        returns = None
    else:
        advantages, returns = _sum_over_tokens(samples, algo, rewards[rollouts.of_sample], masks, token_kls)
    if algo.distillation is not None and algo.distillation.form == "sampled":
        advantages = [
            compute_distilled_advantages(
                advantages=advantage,
                old_logprobs=_need(sample, "old_logprobs"),
                teacher_logprobs=_need(sample, "teacher_logprobs"),
                loss_mask=mask,
                distillation_coef=algo.distillation.coef,
            )
            for sample, advantage, mask in zip(samples, advantages, masks, strict=True)
        ]
    if returns is not None and algo.critic is not None:
        values = [_need(sample, "old_values") for sample in samples]
        metrics["critic/explained_variance"] = compute_explained_variance(
            values=values, returns=returns, loss_masks=masks
        )
    if algo.whiten_advantages:
        advantages = compute_whitened_advantages(advantages=advantages, loss_masks=masks)
    return _fill(samples, is_rejected.tolist(), advantages, returns), metrics


def to_masks(samples: Sequence[Sample]) -> list[Tensor]:
    """Loss masks as tensors; by way of numpy, since torch takes ten times as long over a tuple.

    Args:
        samples: of a train step.
    """
    return [torch.from_numpy(np.array(sample.loss_mask, dtype=np.bool_)) for sample in samples]


def _find_rollouts(samples: Sequence[Sample]) -> _Rollouts:
    first = {(sample.prompt_index, sample.sibling): sample for sample in samples}
    places = {rollout: index for index, rollout in enumerate(first)}
    of_sample = [places[sample.prompt_index, sample.sibling] for sample in samples]
    num_tokens = [0] * len(first)
    for index, sample in zip(of_sample, samples, strict=True):
        num_tokens[index] += sum(sample.loss_mask)
    return _Rollouts(
        of_sample=of_sample,
        rewards=torch.tensor([sample.reward for sample in first.values()], dtype=torch.float64),
        group_ids=torch.tensor([prompt_index for prompt_index, _ in first]),
        num_tokens=torch.tensor(num_tokens, dtype=torch.int64),
        is_truncated=torch.tensor([sample.status is RolloutStatus.TRUNCATED for sample in first.values()]),
    )


def _shape(rollouts: _Rollouts, algo: RlConfig, max_new_tokens: int) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Rewards as the estimator gets them, which rollouts count, and metrics."""
    is_counted = torch.ones_like(rollouts.is_truncated)
    rewards = rollouts.rewards
    if algo.distillation is not None and algo.distillation.is_alone:
        rewards = torch.zeros_like(rewards)
    overlong = algo.overlong
    if overlong is None:
        return rewards, is_counted, {}
    metrics = {}
    if overlong.buffer_tokens:
        penalties = compute_overlong_penalties(
            num_tokens=rollouts.num_tokens, max_tokens=max_new_tokens, buffer_tokens=overlong.buffer_tokens
        )
        rewards = rewards + overlong.penalty_coef * penalties
        metrics["overlong/penalty_mean"] = float(overlong.penalty_coef * penalties.mean())
    if overlong.should_filter:
        is_counted = ~rollouts.is_truncated
        metrics["overlong/filtered_fraction"] = float(rollouts.is_truncated.double().mean())
    return rewards, is_counted, metrics


def _compute_token_kls(samples: Sequence[Sample], algo: RlConfig) -> list[Tensor] | None:
    if algo.kl.placement not in ("reward", "advantage"):
        return None
    return [
        compute_kl(
            logprobs=_need(sample, "old_logprobs"),
            ref_logprobs=_need(sample, "ref_logprobs"),
            estimator=algo.kl.estimator,
        )
        for sample in samples
    ]


def _compare_with_group(
    algo: RlConfig,
    rollouts: _Rollouts,
    rewards: Tensor,
    is_counted: Tensor,
    masks: Sequence[Tensor],
    token_kls: Sequence[Tensor] | None,
) -> list[Tensor]:
    if token_kls is not None and algo.kl.placement == "reward":
        rewards = compute_kl_penalized_rewards(
            rewards=rewards,
            token_kls=token_kls,
            loss_masks=masks,
            rollout_indices=rollouts.of_sample,
            kl_coef=algo.kl.coef,
        )
        token_kls = None
    advantages = compute_group_advantages(
        rewards=rewards,
        group_ids=rollouts.group_ids,
        normalize_std=algo.normalize_std,
        baseline=algo.baseline,
        is_counted=is_counted,
    )
    return compute_token_advantages(
        advantages=advantages[rollouts.of_sample], loss_masks=masks, token_kls=token_kls, kl_coef=algo.kl.coef
    )


def _sum_over_tokens(
    samples: Sequence[Sample],
    algo: RlConfig,
    rewards: Tensor,
    masks: Sequence[Tensor],
    token_kls: Sequence[Tensor] | None,
) -> tuple[list[Tensor], list[Tensor] | None]:
    token_rewards = compute_token_rewards(rewards=rewards, loss_masks=masks, token_kls=token_kls, kl_coef=algo.kl.coef)
    if algo.estimator == "returns":
        return compute_discounted_returns(token_rewards=token_rewards, loss_masks=masks, gamma=algo.gamma), None
    return compute_gae(
        token_rewards=token_rewards,
        values=[_need(sample, "old_values") for sample in samples],
        loss_masks=masks,
        gamma=algo.gamma,
        gae_lambda=algo.gae_lambda,
    )


def _need(sample: Sample, name: str) -> Tensor:
    array = getattr(sample, name)
    if array is None:
        raise TrainerError("train", f"the recipe needs {name}, which were not computed", "report it with the plan")
    return torch.from_numpy(array)


def _fill(
    samples: Sequence[Sample],
    is_rejected: Sequence[bool],
    advantages: Sequence[Tensor],
    returns: Sequence[Tensor] | None,
) -> list[Sample]:
    filled = []
    for index, (sample, rejected, advantage) in enumerate(zip(samples, is_rejected, advantages, strict=True)):
        found: dict[str, Any] = {"advantages": advantage.numpy().astype(np.float32)}
        if returns is not None:
            found["returns"] = returns[index].numpy().astype(np.float32)
        if rejected:
            found["loss_mask"] = (False,) * len(sample.loss_mask)
        filled.append(dataclasses.replace(sample, **found))
    return filled
