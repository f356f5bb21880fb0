"""What is minimised: policy loss, KL, corrections for samples of another policy."""

from __future__ import annotations

from collections.abc import Iterator

from rlrecipes.config.schema import OffPolicyConfig, RlConfig, RunConfig
from rlrecipes.custom import Role, check_custom
from rlrecipes.plan.rules.rule import Found, rl_rule
from rlrecipes.suggest import did_you_mean

POLICY_LOSSES = ("clipped", "gspo", "cispo")
POLICY_LOSS = Role("algo.policy_loss", "algo.policy_loss_options", ("batch", "logprobs", "entropy"))
"""A policy loss of the user's own; see ``algos.objective.CustomLoss``."""
_NO_CORRECTION = OffPolicyConfig(correction="none", low=0.0, high=2.0, veto=None, opsm_delta=None, staleness_power=0.0)


def _is_custom(algo: RlConfig) -> bool:
    return ":" in algo.policy_loss


@rl_rule(
    "algo.policy_loss",
    "algo.policy_loss_options",
    "algo.policy_loss_options.<name>",
    fix="write package.module:function, of (batch, logprobs, entropy, *, your options)",
)
def custom_loss_fits(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """A loss of one's own is found, takes what it is called with and every option it is given."""
    for problem in check_custom(POLICY_LOSS, algo.policy_loss, algo.policy_loss_options) if _is_custom(algo) else ():
        yield Found(problem.where, problem.problem, problem.fix)


@rl_rule("algo.policy_loss", fix="compute them in it, and set them to their neutral values")
def custom_loss_is_all_the_loss(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """What would be added to a loss of ours is not added to one of your own."""
    if _is_custom(algo) and (algo.off_policy != _NO_CORRECTION or algo.entropy_coef or algo.kl.placement == "loss"):
        problem = "of your own is all the loss there is: off_policy, entropy_coef and a KL in the loss are not added"
        yield Found("algo.policy_loss", problem)


@rl_rule("algo.policy_loss", fix="choose a policy loss, or write module:function")
def policy_loss_is_known(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """A loss is one of ours by name, or one of your own by import path."""
    if not _is_custom(algo) and algo.policy_loss not in POLICY_LOSSES:
        fix = did_you_mean(algo.policy_loss, [*POLICY_LOSSES, "module:function"])
        yield Found("algo.policy_loss", f"there is no policy loss {algo.policy_loss!r}", fix)


@rl_rule("algo.policy_loss_options", fix="set it to {}; clip_low and the others are keys of algo")
def loss_options_have_a_reader(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """Our losses read the keys of algo; options beside them would reach nobody."""
    if not _is_custom(algo) and algo.policy_loss_options:
        yield Found("algo.policy_loss_options", f"{algo.policy_loss} has no options of its own")


@rl_rule("algo.clip_low", fix="use < 1")
def clip_bound_is_positive(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """A ratio is never negative: a lower bound of 0 or less clips nothing. Only cispo may have none."""
    if not _is_custom(algo) and algo.clip_low >= 1 and algo.policy_loss != "cispo":
        yield Found("algo.clip_low", f"is {algo.clip_low}: the lower bound 1 - clip_low is not positive")


@rl_rule("algo.dual_clip", fix="set it to null")
def dual_clip_has_a_loss_to_clip(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """Cispo clips its weight, not its loss, so a second bound of the loss would do nothing."""
    if algo.dual_clip is not None and algo.policy_loss == "cispo":
        yield Found("algo.dual_clip", "cispo has none: its weight is clipped, not its loss")


@rl_rule("algo.aggregation_divisor", fix="set it to null, or aggregation=constant")
def divisor_is_used(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """Only aggregation constant divides by a constant."""
    if algo.aggregation_divisor is not None and algo.aggregation != "constant":
        yield Found("algo.aggregation_divisor", f"aggregation {algo.aggregation} divides by no constant")


@rl_rule("algo.kl.coef", fix="set kl.placement=loss or reward")
def kl_coefficient_has_a_place(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """A KL that is placed nowhere acts nowhere, whatever its coefficient."""
    if algo.kl.placement == "none" and algo.kl.coef > 0:
        yield Found("algo.kl.coef", f"is {algo.kl.coef} but kl.placement is none")


@rl_rule("algo.kl.estimator", fix="use k1_straight_through, k2 or k3, or kl.is_unbiased=true")
def kl_in_the_loss_has_a_gradient(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """The gradient of k1 is 0 in expectation: the KL would be noise."""
    if algo.kl.placement == "loss" and algo.kl.estimator == "k1" and not algo.kl.is_unbiased:
        yield Found("algo.kl.estimator", "k1 in the loss has no gradient in expectation")


@rl_rule("algo.kl.is_unbiased", fix="set it false, or kl.placement=loss")
def kl_weight_is_in_the_loss(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """The importance weight belongs to a KL whose gradient is taken."""
    if algo.kl.is_unbiased and algo.kl.placement != "loss":
        yield Found("algo.kl.is_unbiased", f"weights a KL in the loss; placement is {algo.kl.placement}")


@rl_rule("algo.kl.estimator", fix="use k1, k2 or k3")
def weighted_kl_is_no_straight_through(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """A weight with a gradient and a value whose gradient is another one do not multiply to a KL."""
    if algo.kl.is_unbiased and algo.kl.estimator == "k1_straight_through":
        yield Found("algo.kl.estimator", "k1_straight_through cannot be weighted")


@rl_rule("algo.kl.placement", fix="use reward")
def kl_of_summed_rewards_is_in_them(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """Estimators that sum token rewards take the KL of each token there; beside the advantage it is not summed."""
    if algo.kl.placement == "advantage" and algo.estimator != "group":
        problem = f"estimator {algo.estimator} sums token rewards: the KL belongs into these"
        yield Found("algo.kl.placement", problem)


@rl_rule("algo.off_policy.low", fix="lower it")
def correction_bounds_are_in_order(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """Nothing lies between a lower bound and a smaller upper one."""
    if algo.off_policy.low > algo.off_policy.high:
        yield Found("algo.off_policy.low", f"is {algo.off_policy.low}, above high={algo.off_policy.high}")


@rl_rule("algo.off_policy.correction", fix="use algo.old_logprobs=recompute")
def correction_compares_two_policies(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """Where old logprobs are the rollout's, the weight of a correction is 1 everywhere."""
    if algo.off_policy.correction != "none" and algo.old_logprobs == "rollout":
        problem = f"{algo.off_policy.correction} compares old with rollout logprobs, which are the same"
        yield Found("algo.off_policy.correction", problem)


@rl_rule("algo.off_policy.veto", fix="choose a correction, or set it to null")
def veto_has_a_correction(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """The veto looks at the weights of a correction."""
    if algo.off_policy.veto is not None and algo.off_policy.correction == "none":
        yield Found("algo.off_policy.veto", "is part of a correction; there is none")


@rl_rule("algo.off_policy.staleness_power", fix="set it to 0")
def staleness_can_occur(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """With one train step a step the loop trains what its newest weights sampled."""
    if algo.off_policy.staleness_power and config.schedule.num_train_steps == 1:
        yield Found("algo.off_policy.staleness_power", "the loop collects with the newest weights: no sample is stale")


RULES = (
    custom_loss_fits,
    custom_loss_is_all_the_loss,
    policy_loss_is_known,
    loss_options_have_a_reader,
    clip_bound_is_positive,
    dual_clip_has_a_loss_to_clip,
    divisor_is_used,
    kl_coefficient_has_a_place,
    kl_in_the_loss_has_a_gradient,
    kl_weight_is_in_the_loss,
    weighted_kl_is_no_straight_through,
    kl_of_summed_rewards_is_in_them,
    correction_bounds_are_in_order,
    correction_compares_two_policies,
    veto_has_a_correction,
    staleness_can_occur,
)
