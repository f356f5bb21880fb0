"""What a rollout is worth beside the others: groups, baselines, critic, length, teacher, filters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlrecipes.config.schema import ModelShapes, RlConfig, RunConfig
from rlrecipes.plan.rules.rule import Found, rl_rule, shape_rule


def _has_baseline(algo: RlConfig) -> bool:
    return algo.estimator == "group" and algo.baseline != "none"


@rl_rule("algo.group_size", fix="use 2 or more, or algo.baseline=none")
def group_has_a_baseline(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """A group of one equals its own mean and has no others: every advantage would be 0."""
    is_alone = algo.distillation is not None and algo.distillation.is_alone
    if _has_baseline(algo) and algo.group_size == 1 and not is_alone:
        yield Found("algo.group_size", "is 1: a group of one has no baseline, every advantage is 0")


@rl_rule("algo.baseline", fix="use none")
def baseline_has_a_group(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """Returns and GAE look at one rollout alone."""
    if algo.estimator != "group" and algo.baseline != "none":
        yield Found("algo.baseline", f"estimator {algo.estimator} compares with no group")


@rl_rule("algo.normalize_std", fix="set it false")
def deviation_has_a_group(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """A standard deviation is a group's, around its baseline."""
    if algo.normalize_std and not _has_baseline(algo):
        yield Found("algo.normalize_std", "there is no group to take a standard deviation of")


@rl_rule("algo.critic", fix="use algo=ppo, or set critic to null")
def critic_fits_the_estimator(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """GAE compares with a critic's values; no other estimator reads them."""
    if algo.estimator == "gae" and algo.critic is None:
        yield Found("algo.critic", "estimator gae needs a critic")
    if algo.estimator != "gae" and algo.critic is not None:
        yield Found("algo.critic", f"estimator {algo.estimator} asks no critic")


@rl_rule("algo.critic.num_warmup_steps", fix="lower it")
def policy_learns_after_the_critic(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """Steps in which only the critic learns must leave some for the policy."""
    if algo.critic is not None and algo.critic.num_warmup_steps >= config.schedule.num_steps:
        problem = f"is {algo.critic.num_warmup_steps}; the run has {config.schedule.num_steps} steps, the policy none"
        yield Found("algo.critic.num_warmup_steps", problem)


@rl_rule("algo.critic.path", fix="name an HF directory of the policy's shapes, or null")
def critic_path_holds_a_model(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """A path that is not there must not become a critic that starts from the policy."""
    path = algo.critic.path if algo.critic is not None else None
    if path is not None and not (Path(path) / "config.json").is_file():
        yield Found("algo.critic.path", f"{path} holds no config.json")


@rl_rule("rollout.filters", fix="use a larger algo.group_size, or no filter")
def filter_can_keep_a_group(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """A group of one has no variance: all would be dropped, and nothing left to train."""
    if "nonzero_variance" in config.rollout.filters and algo.group_size == 1:
        yield Found("rollout.filters", "nonzero_variance drops every group of one")


@rl_rule("algo.overlong.buffer_tokens", fix="lower it, usually to a fifth of max_new_tokens")
def overlong_buffer_fits_the_response(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """The reward cannot fall over more tokens than a response has."""
    limit = config.rollout.max_generated_tokens
    if algo.overlong is not None and algo.overlong.buffer_tokens > limit:
        problem = f"is {algo.overlong.buffer_tokens}; a response has at most {limit} tokens"
        yield Found("algo.overlong.buffer_tokens", problem)


@rl_rule("algo.distillation.teacher_path", fix="name an HF directory of the policy's shapes, or a teacher_model")
def distillation_has_a_teacher(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """On-policy distillation learns from one teacher: weights that are there, or a served model."""
    if algo.distillation is None:
        return
    path, model = algo.distillation.teacher_path, algo.distillation.teacher_model
    if path is None and model is None:
        yield Found("algo.distillation.teacher_path", "is null, as teacher_model is: there is nobody to learn from")
    elif path is not None and model is not None:
        problem = f"is given beside teacher_model={model}: there can be one teacher"
        yield Found("algo.distillation.teacher_path", problem, "set one of them null")
    elif path is not None and not (Path(path) / "config.json").is_file():
        yield Found("algo.distillation.teacher_path", f"{path} holds no config.json")


@rl_rule("algo.distillation.form", fix="use sampled, or top_p=1.0 and top_k=-1")
def topk_distillation_sees_whole_distributions(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """A KL over the vocabulary is not that of a distribution that sampling cut."""
    sampling = config.rollout.sampling
    is_cut = sampling.top_p < 1 or sampling.top_k != -1
    if algo.distillation is not None and algo.distillation.form == "topk" and is_cut:
        yield Found("algo.distillation.form", "topk compares whole distributions; rollout.sampling cuts them")


@shape_rule("algo.distillation.top_k", fix="lower it")
def teacher_has_so_many_tokens(config: RunConfig, shapes: ModelShapes) -> Iterator[Found]:
    """The teacher's likeliest tokens are among those of its vocabulary."""
    distillation = config.algo.distillation if isinstance(config.algo, RlConfig) else None
    if distillation is not None and distillation.top_k > shapes.vocab_size:
        problem = f"is {distillation.top_k}; the vocabulary has {shapes.vocab_size} tokens"
        yield Found("algo.distillation.top_k", problem)


RULES = (
    group_has_a_baseline,
    baseline_has_a_group,
    deviation_has_a_group,
    critic_fits_the_estimator,
    policy_learns_after_the_critic,
    critic_path_holds_a_model,
    filter_can_keep_a_group,
    overlong_buffer_fits_the_response,
    distillation_has_a_teacher,
    topk_distillation_sees_whole_distributions,
    teacher_has_so_many_tokens,
)
