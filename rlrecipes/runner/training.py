"""The learning half of a step: samples -> logprobs -> advantages -> loss weights -> train steps.

The driver sees every sample, so group statistics and denominators are settled here once, before anything is split
over ranks; trainer ranks compute logprobs and gradients and nothing that depends on how the batch was cut.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch

from rlrecipes.algos.advantages import compute_group_advantages
from rlrecipes.algos.aggregation import compute_loss_weights
from rlrecipes.algos.kl import compute_kl, compute_kl_penalized_rewards
from rlrecipes.algos.objective import compute_policy_objective, compute_sft_objective
from rlrecipes.batching.grid import build_grid, unpack_tokens
from rlrecipes.config.schema import RlConfig
from rlrecipes.errors import TrainerError
from rlrecipes.plan.nodes import Plan
from rlrecipes.rollout.samples import to_samples
from rlrecipes.runner.cluster import TrainerGroup
from rlrecipes.types import Group, MicroBatch, Sample

H200_BF16_FLOPS = 989e12
"""Dense bf16 peak of an H200 (and H100 SXM), FLOP/s, from NVIDIA's data sheet."""

Objective = Callable[..., Any]


class Learner:
    """Turns the samples of a step into optimizer updates.

    Args:
        plan: the Plan.
        trainers: the ranks.
    """

    def __init__(self, plan: Plan, trainers: TrainerGroup) -> None:
        self._plan = plan
        self._trainers = trainers
        self._objective = build_objective(plan)
        self._peak_flops: float | None = None

    async def train_groups(self, groups: Sequence[Group]) -> dict[str, float]:
        """GRPO on the groups of one step.

        Args:
            groups: in order; consecutive ones share a train step.

        Returns:
            Metrics of the catalogue.

        Raises:
            TrainerError: a rank died or its numbers are not finite.
        """
        size = self._plan.batch.prompts_per_train_step
        parts = [[s for g in groups[i : i + size] for s in to_samples(g)] for i in range(0, len(groups), size)]
        samples = [sample for part in parts for sample in part]
        started_s = time.monotonic()
        samples = await self._with_logprobs(samples)
        logprobs_s = time.monotonic() - started_s
        samples = self._with_advantages(samples)
        bounds = np.cumsum([0] + [len(part) for part in parts])
        metrics = await self._train([samples[a:b] for a, b in zip(bounds, bounds[1:], strict=False)])
        return metrics | {"time/logprobs_s": logprobs_s}

    async def train_samples(self, samples: Sequence[Sample]) -> dict[str, float]:
        """SFT on the samples of one step.

        Args:
            samples: as many as prompts_per_step.

        Returns:
            Metrics of the catalogue.
        """
        size = self._plan.batch.prompts_per_train_step
        metrics = await self._train([samples[i : i + size] for i in range(0, len(samples), size)])
        return metrics | {
            "sft/loss": metrics["train/loss"],
            "sft/num_tokens": float(sum(sum(s.loss_mask) for s in samples)),
        }

    def _grid(self, samples: Sequence[Sample]) -> list[list[MicroBatch]]:
        trainer = self._plan.trainer
        return build_grid(
            samples,
            num_ranks=trainer.data_parallel_size,
            max_tokens=trainer.max_tokens_per_micro_batch,
            pad_to_multiple=trainer.tensor_model_parallel_size if trainer.sequence_parallel else 1,
        )

    def _per_rank(self, *grids: Sequence[Sequence[MicroBatch]]) -> list[tuple[Sequence[MicroBatch], ...]]:
        """A row of each grid for every rank, in rank order: TP is fastest, then DP, then PP."""
        trainer = self._plan.trainer
        tp, dp = trainer.tensor_model_parallel_size, trainer.data_parallel_size
        return [tuple(grid[rank // tp % dp] for grid in grids) for rank in range(trainer.num_ranks)]

    async def _with_logprobs(self, samples: list[Sample]) -> list[Sample]:
        algo = self._plan.algo
        if not isinstance(algo, RlConfig):
            return samples
        if algo.old_logprobs == "rollout":
            samples = [
                dataclasses.replace(s, old_logprobs=np.asarray(s.rollout_logprobs, dtype=np.float32)) for s in samples
            ]
        # The only train step of a step starts from the very weights a forward pass before it would use: its own
        # logprobs are the old ones, and the objective takes them where none are given.
        is_own = self._plan.batch.num_train_steps == 1 and algo.kl.placement != "reward"
        names = ["policy"] if algo.old_logprobs == "recompute" and not is_own else []
        names += ["reference"] if self._plan.trainer.needs_reference else []
        if not names:
            return samples
        grid = self._grid(samples)
        for name in names:
            arrays = await self._compute_logprobs(grid, name, len(samples))
            pairs = zip(samples, arrays, strict=True)
            if name == "policy":
                samples = [dataclasses.replace(sample, old_logprobs=array) for sample, array in pairs]
            else:
                samples = [dataclasses.replace(sample, ref_logprobs=array) for sample, array in pairs]
        return samples

    async def _compute_logprobs(self, grid: list[list[MicroBatch]], which: str, num_samples: int) -> list[np.ndarray]:
        outputs = await self._trainers.run("compute_logprobs", which, per_rank=self._per_rank(grid))
        # Only tensor-parallel rank 0 of the last pipeline stage answers, once a data-parallel rank.
        rows = [output for output in outputs if output]
        return unpack_tokens(grid, rows, num_samples)

    def _with_advantages(self, samples: list[Sample]) -> list[Sample]:
        algo = self._plan.algo
        if not isinstance(algo, RlConfig):
            return samples
        # One entry a rollout: a rollout that yields several samples must not weigh more in its group's statistics.
        first_samples = {(sample.prompt_index, sample.sibling): sample for sample in samples}
        rollouts = {rollout: index for index, rollout in enumerate(first_samples)}
        indices = [rollouts[sample.prompt_index, sample.sibling] for sample in samples]
        rewards = torch.tensor([sample.reward for sample in first_samples.values()], dtype=torch.float64)
        if algo.kl.placement == "reward":
            rewards = _penalize(rewards, samples, indices, algo)
        advantages = compute_group_advantages(
            rewards=rewards,
            group_ids=torch.tensor([prompt_index for prompt_index, _ in first_samples]),
            normalize_std=algo.normalize_std,
        ).tolist()
        return [
            dataclasses.replace(sample, advantages=np.full(len(sample.token_ids), advantages[index], dtype=np.float32))
            for sample, index in zip(samples, indices, strict=True)
        ]

    async def _train(self, parts: Sequence[Sequence[Sample]]) -> dict[str, float]:
        started_s = time.monotonic()
        found: list[Mapping[str, float]] = []
        num_micro_batches = num_idle_tokens = 0
        for part in parts:
            if not any(any(sample.loss_mask) for sample in part):
                continue  # every rollout failed or was aborted: there is nothing to learn from
            moving, idle = self._split_by_gradient(self._weighted(part))
            grids = self._grid(moving), self._grid(idle) if idle else [[]] * self._plan.trainer.data_parallel_size
            num_micro_batches += sum(len(grid[0]) for grid in grids)
            num_idle_tokens += sum(len(sample.token_ids) for sample in idle)
            results = await self._trainers.run("train_step", self._objective, per_rank=self._per_rank(*grids))
            found.append(next(result for result in results if result))
        if not found:
            fix = "see rollout/failed_fraction and the engines' logs"
            raise TrainerError("train", "no sample of the step can be trained", fix)
        metrics = await self._summarise(found, parts, time.monotonic() - started_s, num_idle_tokens)
        return metrics | {"train/num_micro_batches": float(num_micro_batches)}

    def _split_by_gradient(self, samples: Sequence[Sample]) -> tuple[Sequence[Sample], Sequence[Sample]]:
        """Samples that move the weights, and those that cannot: all advantages 0, and nothing else in the loss.

        Groups whose rollouts all got one reward are such. When there are no others, all count as moving: a train step
        without gradient still moves what the optimizer remembers.
        """
        algo = self._plan.algo
        if not isinstance(algo, RlConfig) or algo.entropy_coef or (algo.kl.placement == "loss" and algo.kl.coef):
            return samples, []
        parts: tuple[list[Sample], list[Sample]] = ([], [])
        for sample in samples:
            parts[sample.advantages is not None and not sample.advantages.any()].append(sample)
        return parts if parts[0] else (samples, [])

    def _weighted(self, samples: Sequence[Sample]) -> list[Sample]:
        weights = compute_loss_weights(
            mode=self._plan.algo.aggregation,
            loss_masks=[torch.tensor(sample.loss_mask) for sample in samples],
            rollout_ids=[(sample.prompt_index, sample.sibling) for sample in samples],
        )
        return [
            dataclasses.replace(sample, loss_weights=weight.numpy().astype(np.float32))
            for sample, weight in zip(samples, weights, strict=True)
        ]

    async def _summarise(
        self,
        found: Sequence[Mapping[str, float]],
        parts: Sequence[Sequence[Sample]],
        duration_s: float,
        num_idle_tokens: int,
    ) -> dict[str, float]:
        num_tokens = sum(len(sample.token_ids) for part in parts for sample in part)
        peak = await self._peak()
        # A forward pass is a third of forward and backward.
        used = self._plan.model.flops_per_token * (num_tokens - num_idle_tokens * 2 / 3) / duration_s
        metrics = {
            "train/num_tokens": float(num_tokens),
            "train/num_train_steps": float(len(found)),
            "train/forward_only_fraction": num_idle_tokens / num_tokens,
            "train/time_s": duration_s,
            "train/tokens_per_s": num_tokens / duration_s,
            "train/mfu_fraction": used / (peak * self._plan.trainer.num_ranks),
        }
        for name in found[-1]:
            metrics.setdefault(f"train/{name}", _combine(name, [result[name] for result in found]))
        return metrics

    async def _peak(self) -> float:
        if self._peak_flops is None:
            is_cpu = self._plan.trainer.device == "cpu"
            measured = await self._trainers.run("measure_peak_flops") if is_cpu else [H200_BF16_FLOPS]
            self._peak_flops = max(measured)
        return self._peak_flops


def build_objective(plan: Plan) -> Objective:
    """The loss of the Plan's algorithm, as the trainer ranks call it.

    Args:
        plan: the Plan.
    """
    algo = plan.algo
    if not isinstance(algo, RlConfig):
        return compute_sft_objective
    return functools.partial(
        compute_policy_objective,
        clip_low=algo.clip_low,
        clip_high=algo.clip_high,
        dual_clip=algo.dual_clip,
        kl_coef_in_loss=algo.kl.coef if algo.kl.placement == "loss" else 0.0,
        kl_estimator=algo.kl.estimator,
        entropy_coef=algo.entropy_coef,
    )


def _penalize(rewards: torch.Tensor, samples: Sequence[Sample], indices: Sequence[int], algo: RlConfig) -> torch.Tensor:
    token_kls = []
    for sample in samples:
        if sample.ref_logprobs is None or sample.old_logprobs is None:
            raise TrainerError(
                "train", "a KL in the reward needs old and reference logprobs", "report it with the plan"
            )
        token_kls.append(
            compute_kl(
                logprobs=torch.from_numpy(sample.old_logprobs),
                ref_logprobs=torch.from_numpy(sample.ref_logprobs),
                estimator=algo.kl.estimator,
            )
        )
    return compute_kl_penalized_rewards(
        rewards=rewards,
        token_kls=token_kls,
        loss_masks=[torch.tensor(sample.loss_mask) for sample in samples],
        rollout_indices=indices,
        kl_coef=algo.kl.coef,
    )


def _combine(name: str, values: Sequence[float]) -> float:
    """One number for a step out of one per train step."""
    if name.startswith("rollout_logprob_abs_diff"):
        return values[0]  # later train steps have moved away from the weights that the engine had
    if name == "lr":
        return values[-1]
    return max(values) if name.endswith("_max") else fmean(values)
