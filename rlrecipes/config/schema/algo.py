"""Algorithms (conf/algo)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlrecipes.config.schema.optim import OptimConfig
from rlrecipes.config.schema.section import (
    Count,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class KlConfig(Section):
    """Where the KL to the reference acts."""

    placement: Literal["none", "loss", "reward", "advantage"]
    """none: no reference model is kept. loss: coef x KL joins the loss. reward: coef x KL leaves the reward (of the
    rollout before its group's baseline, or of each token where returns are summed over tokens). advantage: coef x a
    token's own KL leaves its advantage, after the baseline."""
    coef: NonNegativeFloat
    """Weight of the KL; 0 with a placement monitors it."""
    estimator: Literal["k1", "k2", "k3", "k3_clamped", "k1_straight_through"]
    """Schulman's estimators. k1 in the loss has no gradient in expectation and is refused, unless is_unbiased;
    k1_straight_through has k1's value and k2's gradient."""
    is_unbiased: bool
    """Whether a KL in the loss is weighted by exp(logprobs - old_logprobs), with its gradient."""
    reference_model: str | None
    """Served model that is the reference, asked through its router; null: the trainer keeps the initial weights."""


class OffPolicyConfig(Section):
    """What is done about samples that another policy drew than the one the loss takes for old."""

    correction: Literal[
        "none", "token_tis", "sequence_tis", "token_mis", "sequence_mis", "geometric_mis", "icepop", "decoupled"
    ]
    """Weight of a token by w = exp(old_logprobs - rollout_logprobs), over the token, its sequence or their geometric
    mean. tis: clipped to [low, high]. mis, icepop: 0 outside of it. decoupled: at most high; the rollout policy is the
    behaviour, the old one the proximal policy."""
    low: NonNegativeFloat
    """Lower bound of w."""
    high: PositiveFloat
    """Upper bound of w."""
    veto: PositiveFloat | None
    """A sample with a token whose w is below it is left out; null: none is."""
    opsm_delta: PositiveFloat | None
    """Samples with negative advantage that moved further than this (mean old_logprobs - logprobs) are left out."""
    staleness_power: NonNegativeFloat
    """A sample whose weights are a versions old weighs max(a, 1) ** -staleness_power; 0: age does not matter."""


class OverlongConfig(Section):
    """What length does to a rollout (DAPO)."""

    buffer_tokens: NonNegativeInt
    """The reward falls over the last so many tokens before max_new_tokens x max_turns; 0: it does not."""
    penalty_coef: NonNegativeFloat
    """How far it falls, in units of the reward."""
    should_filter: bool
    """Whether truncated rollouts are left out of baseline and loss; they still count as rollouts."""


class DistillationConfig(Section):
    """On-policy distillation towards a teacher."""

    form: Literal["sampled", "topk"]
    """sampled: coef x (log student - log teacher) of the drawn token leaves its advantage. topk: coef x the KL to the
    teacher over its likeliest tokens and the rest joins the loss."""
    top_k: PositiveInt
    """Tokens of form topk."""

    teacher_path: str | None
    """HF directory of the teacher, of the policy's shapes; the trainer holds its weights. null: see teacher_model."""
    teacher_model: str | None
    """Served model that is the teacher, of any shapes and the policy's vocabulary, asked through its router; null:
    teacher_path is one."""
    coef: PositiveFloat
    """Units of the advantage (sampled) or of the loss (topk) per nat."""
    is_alone: bool
    """Whether rewards are left out: the teacher is all there is to learn from."""


class CriticConfig(Section):
    """The value model of PPO: the policy's architecture and layout with a scalar head, trained beside it."""

    path: str | None
    """HF directory its layers start from, of the policy's shapes; null: the policy's. The head starts from the seed."""
    optim: OptimConfig
    """Adam and its schedule; its train steps are all those of the run."""
    num_warmup_steps: NonNegativeInt
    """Steps at the start in which only the critic learns."""
    value_clip: PositiveFloat | None
    """The new value is clipped to the old one +- value_clip, and the larger loss counts; null: no clipping."""


class RlConfig(Section):
    """Reinforcement learning from groups of rollouts (conf/algo, all but sft)."""

    kind: Literal["rl"]
    """rl: rollouts, rewards, a policy loss."""
    name: str
    """Name in logs and in run directories."""
    group_size: Count
    """Rollouts per prompt."""
    estimator: Literal["group", "returns", "gae"]
    """Advantages. group: the rollout's reward against its group's baseline, the same for all its tokens. returns: the
    discounted sum of token rewards (REINFORCE++). gae: against the critic's values (PPO)."""
    baseline: Literal["group_mean", "leave_one_out", "none"]
    """What a reward is compared with, for estimator group: the group's mean, the mean of the others, or nothing."""
    normalize_std: bool
    """Whether advantages are divided by the group's standard deviation (false: Dr.GRPO's choice)."""
    whiten_advantages: bool
    """Whether advantages get mean 0 and variance 1 over the trained tokens of a train step."""
    gamma: Fraction
    """Discount per trained token, for estimators returns and gae."""
    gae_lambda: Fraction
    """Trace decay of gae: 1 is return minus value, 0 the one-step difference."""
    policy_loss: str
    """clipped, gspo (one ratio a sequence), cispo (clipped weight, no gradient of it), or `module:function` of your
    own."""
    policy_loss_options: dict[str, Any]
    """Keyword arguments of your own policy loss."""
    clip_low: PositiveFloat
    """The ratio is clipped below at 1 - clip_low; 1 or more only for cispo, which then has no lower bound."""
    clip_high: PositiveFloat
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None
    """Upper bound of ratio x |advantage| for negative advantages; null: none."""
    kl: KlConfig
    """KL to the reference."""
    entropy_coef: NonNegativeFloat
    """Weight of the entropy bonus."""
    aggregation: Literal["per_sequence", "per_rollout", "per_prompt", "per_token", "constant"]
    """Mean over samples, rollouts or prompts of their token means; mean over all trained tokens; or mean over rollouts
    of their token sums / aggregation_divisor."""
    aggregation_divisor: PositiveFloat | None
    """Tokens, for aggregation constant; null: rollout.sampling.max_new_tokens x max_turns."""
    old_logprobs: Literal["recompute", "rollout"]
    """Where the ratio's denominator comes from: the trainer's weights before the update, or the engine. Decoupled PPO
    is recompute with off_policy.correction=decoupled."""
    off_policy: OffPolicyConfig
    """Corrections for the difference between engine and trainer, and for stale samples."""
    overlong: OverlongConfig | None
    """Soft punishment and filtering of long responses; null: none."""
    distillation: DistillationConfig | None
    """A teacher to learn from; null: none."""
    logprob_diff_mean_limit: PositiveFloat | None
    """A step whose mean |logprobs - rollout_logprobs| is larger stops the run; nats; null: it is only measured."""
    logprob_diff_max_limit: PositiveFloat | None
    """The same for the largest one."""
    critic: CriticConfig | None
    """The value model; null: advantages come from groups alone."""


class SftConfig(Section):
    """Supervised fine-tuning on the same trainer (conf/algo/sft.yaml)."""

    kind: Literal["sft"]
    """sft: demonstrations, a log-likelihood loss."""
    name: str
    """Name in logs and in run directories."""
    aggregation: Literal["per_sequence", "per_token"]
    """per_sequence: mean over samples of their token means. per_token: mean over all trained tokens."""
