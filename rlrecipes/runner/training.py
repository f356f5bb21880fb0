"""The learning half of a step: samples -> logprobs -> advantages -> loss weights -> train steps.

The driver sees every sample, so group statistics and denominators are settled here once, before anything is split
over ranks; trainer ranks compute logprobs and gradients and nothing that depends on how the batch was cut.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import fmean
from typing import Any, cast

import numpy as np

from rlrecipes.algos.aggregation import compute_loss_weights
from rlrecipes.algos.agreement import check_logprob_agreement
from rlrecipes.algos.objective import (
    PolicyLoss,
    compute_custom_objective,
    compute_policy_objective,
    compute_sft_objective,
)
from rlrecipes.algos.off_policy import OffPolicy
from rlrecipes.algos.value_loss import compute_value_objective
from rlrecipes.batching.grid import build_grid, unpack_tokens
from rlrecipes.config.schema import RlConfig
from rlrecipes.custom import load_custom
from rlrecipes.errors import TrainerError
from rlrecipes.plan.nodes import Plan
from rlrecipes.plan.parameters import compute_flops_per_token
from rlrecipes.plan.passes import find_logprob_passes
from rlrecipes.plan.rules.objective import POLICY_LOSS
from rlrecipes.rollout.samples import to_samples
from rlrecipes.runner.cluster import TrainerGroup
from rlrecipes.runner.credit import assign_credit, to_masks
from rlrecipes.types import Group, MicroBatch, Sample

Objective = Callable[..., Any]


class Learner:
    """Turns the samples of a step into optimizer updates.

    Args:
        plan: the Plan.
        trainers: the ranks.
        enter_phase: told by name what is done; entered while it is.
    """

    def __init__(
        self,
        plan: Plan,
        trainers: TrainerGroup,
        enter_phase: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._plan = plan
        self._enter_phase = enter_phase
        self._trainers = trainers
        self._objective = build_objective(plan)
        self._value_objective = build_value_objective(plan)
        gpu = plan.cluster.gpu if plan.trainer.device == "cuda" else None
        self._rank_flops_per_s = None if gpu is None else gpu.bf16_flops_per_s
        # A critic gives one number where the policy gives one for each token of the vocabulary.
        self._critic_flops_per_token = compute_flops_per_token(plan.model.shapes.model_copy(update={"vocab_size": 1}))

    async def train_groups(self, groups: Sequence[Group], *, step: int, weight_version: int) -> dict[str, float]:
        """RL on the groups of one step.

        Args:
            groups: in order; consecutive ones share a train step.
            step: completed before this one; the critic's warm-up counts them.
            weight_version: of the trainer now; staleness counts back from it.

        Returns:
            Metrics of the catalogue.

        Raises:
            TrainerError: a rank died, its numbers are not finite, or trainer and engine disagree too much.
        """
        algo = self._algo
        size = self._plan.batch.prompts_per_train_step
        parts = [[s for g in groups[i : i + size] for s in to_samples(g)] for i in range(0, len(groups), size)]
        parts = [part for part in parts if part]  # a train step whose rollouts all failed has nothing to learn from
        bounds = np.cumsum([0] + [len(part) for part in parts])
        samples = [sample for part in parts for sample in part]
        if not samples:
            raise _nothing_to_train()
        started_s = time.monotonic()
        if algo.off_policy.staleness_power:
            samples = [_with_staleness(sample, weight_version) for sample in samples]
        with self._enter_phase("logprobs"):
            samples = await self._with_logprobs(samples)
        logprobs_s = time.monotonic() - started_s
        parts, extra = [], []
        for first, end in zip(bounds, bounds[1:], strict=False):
            part, metrics = assign_credit(
                samples[first:end], algo, max_new_tokens=self._plan.rollout.max_generated_tokens
            )
            parts.append(part)
            extra.append(metrics)
        is_critic_warming_up = algo.critic is not None and step < algo.critic.num_warmup_steps
        with self._enter_phase("train"):
            metrics = await self._train(parts, should_move_policy=not is_critic_warming_up)
        check_agreement(algo, metrics)
        means = {name: fmean(m[name] for m in extra) for name in extra[0]}
        return metrics | means | {"time/logprobs_s": logprobs_s}

    async def train_samples(self, samples: Sequence[Sample]) -> dict[str, float]:
        """SFT on the samples of one step.

        Args:
            samples: as many as prompts_per_step.

        Returns:
            Metrics of the catalogue.
        """
        size = self._plan.batch.prompts_per_train_step
        with self._enter_phase("train"):
            metrics = await self._train([samples[i : i + size] for i in range(0, len(samples), size)])
        return metrics | {
            "sft/loss": metrics.pop("train/nll"),
            "sft/num_tokens": float(sum(sum(s.loss_mask) for s in samples)),
        }

    @property
    def _algo(self) -> RlConfig:
        if not isinstance(self._plan.algo, RlConfig):
            raise TypeError("the recipe is not one of RL")
        return self._plan.algo

    def _grid(self, samples: Sequence[Sample]) -> list[list[MicroBatch]]:
        trainer = self._plan.trainer
        return build_grid(
            samples,
            num_ranks=trainer.data_parallel_size,
            max_tokens=trainer.max_micro_batch_tokens,
            sample_multiple=trainer.sample_multiple,
            pad_to_multiple=trainer.micro_batch_multiple,
            num_micro_batches_multiple=trainer.num_micro_batches_multiple,
        )

    def _per_rank(self, *grids: Sequence[Sequence[MicroBatch]]) -> list[tuple[Sequence[MicroBatch], ...]]:
        """A row of each grid for every rank, in rank order: TP is fastest, then CP, then DP, then PP."""
        trainer = self._plan.trainer
        inner, dp = trainer.tensor_model_parallel_size * trainer.context_parallel_size, trainer.data_parallel_size
        return [tuple(grid[rank // inner % dp] for grid in grids) for rank in range(trainer.num_ranks)]

    async def _with_logprobs(self, samples: list[Sample]) -> list[Sample]:
        algo = self._algo
        if algo.old_logprobs == "rollout":
            samples = [
                dataclasses.replace(s, old_logprobs=np.asarray(s.rollout_logprobs, dtype=np.float32)) for s in samples
            ]
        # The only train step of a step starts from the very weights a forward pass before it would use: its own
        # logprobs are the old ones, and the objective takes them where none are given.
        passes = find_logprob_passes(algo, self._plan.batch.num_train_steps)
        if not passes:
            return samples
        teacher = algo.distillation
        has_topk = teacher is not None and teacher.form == "topk"
        fields = {"policy": "old_logprobs", "reference": "ref_logprobs"}
        fields |= {} if has_topk else {"teacher": "teacher_logprobs"}
        grid = self._grid(samples)

        async def read(method: str, *shared: Any) -> list[np.ndarray]:
            outputs = await self._trainers.run(method, *shared, per_rank=self._per_rank(grid))
            # Only TP rank 0 of CP rank 0 of the last pipeline stage answers, once a data-parallel rank.
            return unpack_tokens(grid, [output for output in outputs if output], len(samples))

        found = {fields[name]: await read("compute_logprobs", name) for name in passes if name in fields}
        if "critic" in passes:
            found["old_values"] = await read("compute_values")
        if teacher is not None and has_topk and "teacher" in passes:
            both = await read("compute_teacher_topk", teacher.top_k)
            found["teacher_topk_ids"] = [array[:, : teacher.top_k].astype(np.int64) for array in both]
            found["teacher_topk_logprobs"] = [array[:, teacher.top_k :] for array in both]
        rows: list[dict[str, Any]] = [{name: arrays[i] for name, arrays in found.items()} for i in range(len(samples))]
        return [dataclasses.replace(sample, **row) for sample, row in zip(samples, rows, strict=True)]

    async def _train(self, parts: Sequence[Sequence[Sample]], *, should_move_policy: bool = True) -> dict[str, float]:
        started_s = time.monotonic()
        found: list[Mapping[str, float]] = []
        critic: list[Mapping[str, float]] = []
        num_micro_batches = num_idle_tokens = 0
        num_flops = 0.0
        for part in parts:
            if not any(any(sample.loss_mask) for sample in part):
                continue  # every rollout was left out
            weighted = self._weighted(part)
            if self._value_objective is not None:
                grid = self._grid(weighted)
                rows = self._per_rank(grid)
                critic.append((await self._trainers.run("critic_step", self._value_objective, per_rank=rows))[0])
                num_micro_batches += len(grid[0])
                num_flops += self._critic_flops_per_token * _count_tokens(weighted)
            if not should_move_policy:
                continue
            moving, idle = self._split_by_gradient(weighted)
            grids = self._grid(moving), self._grid(idle) if idle else [[]] * self._plan.trainer.data_parallel_size
            num_micro_batches += sum(len(grid[0]) for grid in grids)
            num_idle_tokens += _count_tokens(idle)
            # A forward pass is a third of forward and backward.
            num_flops += self._plan.model.flops_per_token * (_count_tokens(moving) + _count_tokens(idle) / 3)
            results = await self._trainers.run("train_step", self._objective, per_rank=self._per_rank(*grids))
            found.append(next(result for result in results if result))
        if not found and not critic:
            raise _nothing_to_train()
        metrics = self._summarise(found, parts, time.monotonic() - started_s, num_idle_tokens)
        peak_flops = await self._peak_flops_per_s()
        if peak_flops is not None:
            metrics["train/mfu_fraction"] = num_flops / metrics["train/time_s"] / peak_flops
        metrics |= {f"critic/{name}": value for name, value in _combine(critic).items()}
        return metrics | {"train/num_micro_batches": float(num_micro_batches)}

    def _split_by_gradient(self, samples: Sequence[Sample]) -> tuple[Sequence[Sample], Sequence[Sample]]:
        """Samples that move the weights, and those that cannot: all advantages 0, and nothing else in the loss.

        Groups whose rollouts all got one reward are such. When there are no others, all count as moving: a train step
        without gradient still moves what the optimizer remembers.
        """
        algo = self._plan.algo
        if not isinstance(algo, RlConfig) or not _is_advantage_all(algo):
            return samples, []
        parts: tuple[list[Sample], list[Sample]] = ([], [])
        for sample in samples:
            parts[sample.advantages is not None and not sample.advantages.any()].append(sample)
        return parts if parts[0] else (samples, [])

    def _weighted(self, samples: Sequence[Sample]) -> list[Sample]:
        algo = self._plan.algo
        divisor = None
        if isinstance(algo, RlConfig):
            divisor = algo.aggregation_divisor or self._plan.rollout.max_generated_tokens
        weights = compute_loss_weights(
            mode=algo.aggregation,
            loss_masks=to_masks(samples),
            rollout_ids=[(sample.prompt_index, sample.sibling) for sample in samples],
            prompt_ids=[sample.prompt_index for sample in samples],
            divisor=divisor,
        )
        return [
            dataclasses.replace(sample, loss_weights=weight.numpy().astype(np.float32))
            for sample, weight in zip(samples, weights, strict=True)
        ]

    def _summarise(
        self,
        found: Sequence[Mapping[str, float]],
        parts: Sequence[Sequence[Sample]],
        duration_s: float,
        num_idle_tokens: int,
    ) -> dict[str, float]:
        num_tokens = sum(_count_tokens(part) for part in parts)
        return {f"train/{name}": value for name, value in _combine(found).items()} | {
            "train/num_tokens": float(num_tokens),
            "train/num_train_steps": float(len(found)),
            "train/forward_only_fraction": num_idle_tokens / num_tokens,
            "train/time_s": duration_s,
            "train/tokens_per_s": num_tokens / duration_s,
        }

    async def _peak_flops_per_s(self) -> float | None:
        """What the devices of all ranks multiply at best; None of GPUs that the Plan does not know."""
        if self._rank_flops_per_s is None and self._plan.trainer.device == "cpu":
            self._rank_flops_per_s = max(await self._trainers.run("measure_peak_flops"))
        return None if self._rank_flops_per_s is None else self._rank_flops_per_s * self._plan.trainer.num_ranks


def _count_tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.token_ids) for sample in samples)


def build_objective(plan: Plan) -> Objective:
    """The loss of the Plan's algorithm, as the trainer ranks call it.

    Args:
        plan: the Plan.
    """
    algo = plan.algo
    if not isinstance(algo, RlConfig):
        return compute_sft_objective
    if ":" in algo.policy_loss:
        function = load_custom(POLICY_LOSS, algo.policy_loss, algo.policy_loss_options)
        return functools.partial(compute_custom_objective, function=function, options=algo.policy_loss_options)
    return functools.partial(
        compute_policy_objective,
        policy_loss=cast("PolicyLoss", algo.policy_loss),
        clip_low=algo.clip_low,
        clip_high=algo.clip_high,
        dual_clip=algo.dual_clip,
        kl_coef_in_loss=algo.kl.coef if algo.kl.placement == "loss" else 0.0,
        kl_estimator=algo.kl.estimator,
        kl_is_unbiased=algo.kl.is_unbiased,
        entropy_coef=algo.entropy_coef,
        off_policy=OffPolicy(**algo.off_policy.model_dump()),
        old_is_rollout=algo.old_logprobs == "rollout",
        distillation_topk_coef=_topk_coef(algo),
    )


def build_value_objective(plan: Plan) -> Objective | None:
    """The critic's loss, as the trainer ranks call it; None without a critic."""
    critic = plan.algo.critic if isinstance(plan.algo, RlConfig) else None
    return None if critic is None else functools.partial(compute_value_objective, value_clip=critic.value_clip)


def check_agreement(algo: RlConfig, metrics: Mapping[str, float]) -> None:
    """Hold a step to the recipe's limits on what trainer and engine may disagree.

    Raises:
        TrainerError: they disagree more.
    """
    limits = algo.logprob_diff_mean_limit, algo.logprob_diff_max_limit
    if limits == (None, None) or "train/rollout_logprob_abs_diff_mean" not in metrics:
        return
    mean_limit, max_limit = (math.inf if limit is None else limit for limit in limits)
    found = {name.removeprefix("train/"): value for name, value in metrics.items()}
    check_logprob_agreement(found, logprob_diff_mean_limit=mean_limit, logprob_diff_max_limit=max_limit)


def _is_advantage_all(algo: RlConfig) -> bool:
    """Whether a token without advantage has no gradient."""
    has_kl = algo.kl.placement == "loss" and algo.kl.coef > 0
    return not (has_kl or algo.entropy_coef or _topk_coef(algo) or ":" in algo.policy_loss)


def _topk_coef(algo: RlConfig) -> float:
    return algo.distillation.coef if algo.distillation is not None and algo.distillation.form == "topk" else 0.0


def _with_staleness(sample: Sample, weight_version: int) -> Sample:
    staleness = np.full(len(sample.token_ids), weight_version - sample.weight_version, dtype=np.float32)
    return dataclasses.replace(sample, staleness=staleness)


def _nothing_to_train() -> TrainerError:
    fix = "see rollout/failed_fraction and the engines' logs"
    return TrainerError("train", "no sample of the step can be trained", fix)


def _combine(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One number a metric for a step out of one per train step."""
    num_tokens = [result["num_tokens"] for result in results]
    names = results[-1] if results else ()
    return {name: _combine_values(name, [result[name] for result in results], num_tokens) for name in names}


def _combine_values(name: str, values: Sequence[float], num_tokens: Sequence[float]) -> float:
    if name.startswith("rollout_logprob_abs_diff"):
        return values[0]  # later train steps have moved away from the weights that the engine had
    if name in ("lr", "num_tokens"):
        return values[-1]
    if name.endswith("_max"):
        return max(values)
    is_of_step = name in ("loss", "grad_norm") or name.endswith("_loss")
    return fmean(values, None if is_of_step else num_tokens)  # what is a mean over tokens stays one
