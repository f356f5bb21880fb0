"""Every refusal of these functions says where it is, what is wrong and how to mend it."""

from functools import partial

import pytest
import torch

from rlrecipes.algos.advantages import compute_group_advantages, compute_zero_variance
from rlrecipes.algos.aggregation import compute_loss_weights
from rlrecipes.algos.agreement import compute_log_ratio_counts
from rlrecipes.algos.distillation import compute_distilled_advantages, compute_topk_reverse_kl
from rlrecipes.algos.kl import compute_kl, compute_kl_loss, compute_kl_penalized_rewards
from rlrecipes.algos.objective import compute_custom_objective, compute_policy_objective, compute_sft_objective
from rlrecipes.algos.off_policy import (
    OffPolicy,
    compute_off_policy_log_ratios,
    compute_off_policy_weights,
    compute_opsm_mask,
    compute_staleness_weights,
)
from rlrecipes.algos.policy_loss import (
    compute_cispo_policy_loss,
    compute_clipped_policy_loss,
    compute_gspo_policy_loss,
)
from rlrecipes.algos.returns import (
    compute_discounted_returns,
    compute_gae,
    compute_token_advantages,
    compute_token_rewards,
    compute_whitened_advantages,
)
from rlrecipes.algos.reward_shaping import compute_overlong_penalties
from rlrecipes.algos.segments import compute_sample_sums
from rlrecipes.algos.value_loss import (
    compute_clipped_value_loss,
    compute_explained_variance,
    compute_value_objective,
)
from rlrecipes.errors import ContractError

ONE, TWO = torch.zeros(1), torch.zeros(2)
MASK, IDS = ONE == 0, torch.zeros(1, dtype=torch.int64)
ROW = {"loss_masks": [MASK]}
GAE = {"gamma": 1.0, "gae_lambda": 1.0}
SHAPES = "give one entry per token (or per rollout) in each of them"
FINITE = "make the reward function return a finite number for every rollout"
NAN = torch.tensor([torch.nan])
MODES = "use per_sequence, per_rollout, per_token or constant, or per_prompt with prompt_ids"
ESTIMATORS = "use k1, k2, k3 or k3_clamped, or k1_straight_through without old_logprobs"
LEVELS = "use group_mean or leave_one_out, or none without normalize_std"
kl = partial(compute_kl, estimator="k2")
value_loss = partial(compute_clipped_value_loss, value_clip=None)
CLIPS = {"clip_low": 0.2, "clip_high": 0.2}
LOGPROBS = ("logprobs", "old_logprobs", "advantages")
SEGMENTS = {"loss_mask": MASK, "sample_index": IDS}
OFF_POLICY = {"old_logprobs": ONE, "rollout_logprobs": ONE, "loss_mask": MASK, "sample_index": None}
BOUNDS = {"low": 0.0, "high": 2.0, "veto": None}
TEACHER = ("advantages", "old_logprobs", "teacher_logprobs", "loss_mask")
BATCH = {"loss_mask": MASK, "advantages": ONE, "old_logprobs": ONE}
TOPK = {"topk_logprobs": torch.zeros(1, 2), "teacher_topk_logprobs": torch.zeros(1, 2)}
POLICY_LOSSES = "use clipped or gspo, or cispo without a dual clip"


def objective(batch=BATCH, entropy=None, **options):
    plain = CLIPS | {"dual_clip": None, "kl_coef_in_loss": 0.0, "kl_estimator": "k3", "entropy_coef": 0.0}
    return partial(compute_policy_objective, batch, ONE, entropy, **plain | options)


def return_another_length(batch, logprobs, entropy):
    return logprobs, {"metric": TWO}


def differing(function, where, names, **others):
    """The call refused, one time for each of the arguments that must be alike."""
    for name in names:
        alike = {key: MASK if key == "loss_mask" else ONE for key in names}
        other = TWO == 0 if name == "loss_mask" else TWO
        shapes = ", ".join(f"{key}=[{2 if key == name else 1}]" for key in names)
        yield partial(function, **others | alike | {name: other}), where, f"shapes differ: {shapes}", SHAPES


def lacking(name, batch=BATCH, **options):
    problem = f"the loss asks for {name}, but there is no {name}"
    return objective(batch, **options), "compute_policy_objective", problem, f"compute {name}"


REFUSALS = [
    *differing(compute_clipped_policy_loss, "compute_clipped_policy_loss", LOGPROBS, **CLIPS),
    *differing(compute_cispo_policy_loss, "compute_cispo_policy_loss", LOGPROBS, **CLIPS),
    *differing(compute_gspo_policy_loss, "compute_gspo_policy_loss", LOGPROBS, **SEGMENTS, **CLIPS),
    *differing(compute_opsm_mask, "compute_opsm_mask", LOGPROBS, **SEGMENTS, delta=0.1),
    *differing(compute_sample_sums, "compute_sample_sums", ("values", "loss_mask", "sample_index")),
    *differing(compute_log_ratio_counts, "compute_log_ratio_counts", ("log_ratios", "loss_mask")),
    *differing(compute_distilled_advantages, "compute_distilled_advantages", TEACHER, distillation_coef=1.0),
    *differing(compute_topk_reverse_kl, "compute_topk_reverse_kl", ("topk_logprobs", "teacher_topk_logprobs")),
    *differing(
        compute_off_policy_log_ratios,
        "compute_off_policy_log_ratios",
        ("old_logprobs", "rollout_logprobs", "loss_mask"),
        sample_index=None,
        level="token",
    ),
    (
        partial(
            compute_distilled_advantages,
            **{name: MASK if name == "loss_mask" else ONE for name in TEACHER} | {"teacher_logprobs": NAN},
            distillation_coef=1.0,
        ),
        "compute_distilled_advantages",
        "a trained token has no finite log probability under student or teacher",
        "give the teacher the sampled token ids, and no top_p or top_k below which its probability is 0",
    ),
    (
        partial(compute_off_policy_log_ratios, **OFF_POLICY, level="sequence"),
        "compute_off_policy_log_ratios.sample_index",
        "a sequence ratio needs to know which sample a token belongs to",
        "give sample_index, or choose a correction of tokens",
    ),
    (
        partial(compute_off_policy_weights, **OFF_POLICY, **BOUNDS, correction="tis"),
        "compute_off_policy_weights.correction",
        "unknown correction 'tis'",
        "use none, token_tis, sequence_tis, token_mis, sequence_mis, geometric_mis, icepop, decoupled",
    ),
    (
        partial(compute_off_policy_weights, **OFF_POLICY, **BOUNDS | {"veto": 0.1}, correction="token_mis"),
        "compute_off_policy_weights.veto",
        "a veto needs to know which sample a token belongs to",
        "give sample_index, or leave the veto out",
    ),
    *(
        (
            partial(compute_staleness_weights, staleness=ages, power=power),
            "compute_staleness_weights",
            f"power must not be negative (it is {power}) and ages must be floats (they are {ages.dtype})",
            "give a power of 0 or more, and ages as floating-point numbers",
        )
        for ages, power in ((ONE, -1.0), (IDS, 1.0))
    ),
    (
        objective(BATCH | {"ref_logprobs": TWO}),
        "objective",
        "shapes differ: loss_mask=[1], advantages=[1], old_logprobs=[1], ref_logprobs=[2], logprobs=[1]",
        SHAPES,
    ),
    (
        objective(BATCH | TOPK | {"topk_logprobs": torch.zeros(2, 2)}),
        "objective",
        "shapes differ: loss_mask=[1], topk_logprobs=[2], teacher_topk_logprobs=[1]",
        SHAPES,
    ),
    (
        partial(compute_sft_objective, {"loss_mask": MASK}, ONE, TWO),
        "objective",
        "shapes differ: loss_mask=[1], logprobs=[1], entropy=[2]",
        SHAPES,
    ),
    (
        partial(compute_custom_objective, BATCH, ONE, None, function=return_another_length, options={}),
        "compute_custom_objective",
        "shapes differ: logprobs=[1], loss=[1], metric=[2]",
        SHAPES,
    ),
    lacking("ref_kl", kl_coef_in_loss=0.1),
    lacking("entropy", entropy_coef=0.1),
    lacking("teacher_topk_kl", distillation_topk_coef=0.1),
    lacking("sample_index", policy_loss="gspo"),
    lacking("sample_index", off_policy=OffPolicy(opsm_delta=0.1)),
    lacking("staleness", off_policy=OffPolicy(staleness_power=1.0)),
    lacking("rollout_logprobs", off_policy=OffPolicy(correction="token_tis")),
    *(
        (
            objective(policy_loss=kind, dual_clip=dual_clip),
            "compute_policy_objective.policy_loss",
            f"there is no policy loss {kind!r} with dual_clip={dual_clip}",
            POLICY_LOSSES,
        )
        for kind, dual_clip in (("ppo", None), ("cispo", 3.0))
    ),
    (
        partial(compute_group_advantages, rewards=ONE, group_ids=IDS, normalize_std=False, baseline="mean"),
        "compute_group_advantages.baseline",
        "no algorithm has baseline 'mean' with normalize_std=False",
        LEVELS,
    ),
    (
        partial(compute_zero_variance, rewards=NAN, group_ids=IDS),
        "compute_zero_variance.rewards",
        "rewards must be finite floats, these are torch.float32: [nan]",
        FINITE,
    ),
    (
        partial(compute_zero_variance, rewards=ONE, group_ids=IDS, is_counted=TWO == 0),
        "compute_zero_variance",
        "shapes differ: rewards=[1], group_ids=[1], is_counted=[2]",
        SHAPES,
    ),
    (
        partial(compute_token_rewards, rewards=NAN, **ROW),
        "compute_token_rewards.rewards",
        "rewards must be finite floats, these are torch.float32: [nan]",
        FINITE,
    ),
    (
        partial(compute_token_rewards, rewards=ONE, token_kls=[TWO], **ROW),
        "compute_token_rewards",
        "shapes differ: token_kls=[2], loss_masks=[1]",
        SHAPES,
    ),
    (
        partial(compute_token_advantages, advantages=ONE, token_kls=[TWO], **ROW),
        "compute_token_advantages",
        "shapes differ: token_kls=[2], loss_masks=[1]",
        SHAPES,
    ),
    (
        partial(compute_discounted_returns, token_rewards=[TWO], gamma=1.0, **ROW),
        "compute_discounted_returns",
        "shapes differ: token_rewards=[2], loss_masks=[1]",
        SHAPES,
    ),
    (
        partial(compute_discounted_returns, token_rewards=[ONE], gamma=1.5, **ROW),
        "compute_discounted_returns.gamma",
        "1.5 is outside [0, 1]",
        "give a fraction",
    ),
    (
        partial(compute_gae, token_rewards=[TWO], values=[ONE], **ROW, **GAE),
        "compute_gae",
        "shapes differ: token_rewards=[2], loss_masks=[1]",
        SHAPES,
    ),
    (
        partial(compute_gae, token_rewards=[ONE], values=[TWO], **ROW, **GAE),
        "compute_gae",
        "shapes differ: values=[2], loss_masks=[1]",
        SHAPES,
    ),
    (
        partial(compute_gae, token_rewards=[ONE], values=[ONE], **ROW, **GAE | {"gamma": -0.5}),
        "compute_gae.gamma",
        "-0.5 is outside [0, 1]",
        "give a fraction",
    ),
    (
        partial(compute_gae, token_rewards=[ONE], values=[ONE], **ROW, **GAE | {"gae_lambda": 2.0}),
        "compute_gae.gae_lambda",
        "2.0 is outside [0, 1]",
        "give a fraction",
    ),
    (
        partial(compute_whitened_advantages, advantages=[TWO], **ROW),
        "compute_whitened_advantages",
        "shapes differ: advantages=[2], loss_masks=[1]",
        SHAPES,
    ),
    (
        partial(kl, logprobs=ONE, ref_logprobs=TWO),
        "compute_kl",
        "shapes differ: logprobs=[1], ref_logprobs=[2]",
        SHAPES,
    ),
    (
        partial(kl, logprobs=ONE, ref_logprobs=ONE, old_logprobs=TWO),
        "compute_kl",
        "shapes differ: logprobs=[1], ref_logprobs=[1], old_logprobs=[2]",
        SHAPES,
    ),
    (
        partial(compute_kl, logprobs=ONE, ref_logprobs=ONE, estimator="k4"),
        "compute_kl.estimator",
        "unknown estimator 'k4', weighted: False",
        ESTIMATORS,
    ),
    (
        partial(compute_kl, logprobs=ONE, ref_logprobs=ONE, old_logprobs=ONE, estimator="k1_straight_through"),
        "compute_kl.estimator",
        "unknown estimator 'k1_straight_through', weighted: True",
        ESTIMATORS,
    ),
    (
        partial(compute_kl_loss, logprobs=ONE, ref_logprobs=ONE, estimator="k1"),
        "compute_kl_loss.estimator",
        "k1 as a loss has no gradient in expectation: it adds noise and pulls nowhere",
        "use k1_straight_through, k2 or k3, or weight it with old_logprobs",
    ),
    (
        partial(compute_kl_penalized_rewards, rewards=ONE, token_kls=[TWO], rollout_indices=[0], kl_coef=1.0, **ROW),
        "compute_kl_penalized_rewards",
        "shapes differ: token_kls=[2], loss_masks=[1]",
        SHAPES,
    ),
    (
        partial(compute_loss_weights, mode="constant", rollout_ids=[0], divisor=0.0, **ROW),
        "compute_loss_weights.divisor",
        "constant cannot divide by 0.0",
        "give a divisor above 0",
    ),
    (
        partial(compute_loss_weights, mode="per_prompt", rollout_ids=[0], **ROW),
        "compute_loss_weights.mode",
        "'per_prompt' is unknown, or its prompt_ids are missing",
        MODES,
    ),
    *(
        (
            partial(value_loss, **{"values": ONE, "old_values": ONE, "returns": ONE} | {name: TWO}),
            "compute_clipped_value_loss",
            "shapes differ: "
            + ", ".join(f"{key}=[{2 if key == name else 1}]" for key in ("values", "old_values", "returns")),
            SHAPES,
        )
        for name in ("values", "old_values", "returns")
    ),
    (
        partial(compute_value_objective, {"loss_mask": MASK, "old_values": ONE, "returns": ONE}, TWO, value_clip=None),
        "compute_value_objective",
        "shapes differ: loss_mask=[1], values=[2], old_values=[1], returns=[1]",
        SHAPES,
    ),
    (
        partial(
            compute_value_objective, {"loss_mask": TWO == 0, "old_values": ONE, "returns": ONE}, ONE, value_clip=None
        ),
        "compute_value_objective",
        "shapes differ: loss_mask=[2], values=[1], old_values=[1], returns=[1]",
        SHAPES,
    ),
    *(
        (
            partial(
                compute_explained_variance,
                **{"values": [ONE], "returns": [ONE], "loss_masks": [MASK]} | {name: [other]},
            ),
            "compute_explained_variance",
            "shapes differ: "
            + ", ".join(f"{key}=[{2 if key == name else 1}]" for key in ("values", "returns", "loss_masks")),
            SHAPES,
        )
        for name, other in (("values", TWO), ("returns", TWO), ("loss_masks", TWO == 0))
    ),
    (
        partial(compute_overlong_penalties, num_tokens=IDS, max_tokens=10, buffer_tokens=11),
        "compute_overlong_penalties.buffer_tokens",
        "a buffer of 11 tokens does not lie inside 10",
        "choose 1 <= buffer_tokens <= max_tokens",
    ),
    (
        partial(compute_overlong_penalties, num_tokens=ONE, max_tokens=10, buffer_tokens=1),
        "compute_overlong_penalties.num_tokens",
        "lengths are torch.float32",
        "count tokens as integers",
    ),
]


@pytest.mark.parametrize(("call", "where", "problem", "fix"), REFUSALS)
def test_a_refusal_says_where_what_and_how_to_mend_it(call, where, problem, fix):
    with pytest.raises(ContractError) as caught:
        call()
    (found,) = caught.value.problems
    assert (found.where, found.problem, found.fix) == (f"algos.{where}", problem, fix)
