"""Every refusal of these functions says where it is, what is wrong and how to mend it."""

from functools import partial

import pytest
import torch

from rlrecipes.algos.advantages import compute_group_advantages, compute_zero_variance
from rlrecipes.algos.aggregation import compute_loss_weights
from rlrecipes.algos.kl import compute_kl, compute_kl_loss, compute_kl_penalized_rewards
from rlrecipes.algos.returns import (
    compute_discounted_returns,
    compute_gae,
    compute_token_advantages,
    compute_token_rewards,
    compute_whitened_advantages,
)
from rlrecipes.algos.reward_shaping import compute_overlong_penalties
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

REFUSALS = [
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
