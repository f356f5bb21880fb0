"""The only file of the suite that names rlrecipes: point these at another implementation to check that one.

Each function takes the ``inputs`` of a case in golden/ by keyword and returns values to compare with ``expected``.
"""

import asyncio
import json
from dataclasses import replace

import torch

from rlrecipes.algos.advantages import compute_group_advantages, compute_zero_variance
from rlrecipes.algos.aggregation import compute_loss_weights
from rlrecipes.algos.agreement import compute_effective_sample_fraction
from rlrecipes.algos.distillation import compute_distilled_advantages, compute_topk_reverse_kl
from rlrecipes.algos.kl import compute_kl, compute_kl_penalized_rewards
from rlrecipes.algos.objective import compute_policy_objective, compute_sft_objective
from rlrecipes.algos.off_policy import (
    OffPolicy,
    compute_off_policy_weights,
    compute_opsm_mask,
    compute_staleness_weights,
)
from rlrecipes.algos.policy_loss import (
    compute_cispo_policy_loss,
    compute_clipped_policy_loss,
    compute_gspo_policy_loss,
    compute_sft_loss,
)
from rlrecipes.algos.returns import (
    compute_discounted_returns,
    compute_gae,
    compute_token_advantages,
    compute_token_rewards,
    compute_whitened_advantages,
)
from rlrecipes.algos.reward_shaping import compute_filtered_loss_masks, compute_overlong_penalties
from rlrecipes.algos.value_loss import (
    compute_clipped_value_loss,
    compute_explained_variance,
    compute_value_objective,
)
from rlrecipes.batching.grid import build_grid
from rlrecipes.data.records import to_group, to_record
from rlrecipes.rollout.generate import Policy, SingleTurn
from rlrecipes.rollout.samples import to_samples
from rlrecipes.types import Completion, Group, Prompt, Rollout, RolloutStatus, SamplingParams, Turn


def real(values):
    return torch.tensor(values, dtype=torch.float64)


def mask(values):
    return torch.tensor(values, dtype=torch.bool)


def reals(rows):
    return [real(row) for row in rows]


def masks(rows):
    return [mask(row) for row in rows]


def lists(tensors):
    return [tensor.tolist() for tensor in tensors]


def with_gradient(function, logprobs):
    leaf = real(logprobs).requires_grad_()
    loss, others = function(leaf)
    loss.sum().backward()
    return {"loss": loss.tolist(), "gradient": leaf.grad.flatten().tolist()} | others


def group_advantages(rewards, group_ids, is_counted=None, **options):
    some = {"rewards": real(rewards), "group_ids": torch.tensor(group_ids)}
    some["is_counted"] = None if is_counted is None else mask(is_counted)
    return {
        "advantages": compute_group_advantages(**some, **options).tolist(),
        "zero_variance": compute_zero_variance(**some).tolist(),
    }


def reinforce_plus_plus(rewards, token_kls, loss_masks, kl_coef, gamma):
    trained = masks(loss_masks)
    token_rewards = compute_token_rewards(
        rewards=real(rewards), loss_masks=trained, token_kls=reals(token_kls), kl_coef=kl_coef
    )
    returns = compute_discounted_returns(token_rewards=token_rewards, loss_masks=trained, gamma=gamma)
    return {"returns": lists(returns)}


def token_advantages(advantages, loss_masks, token_kls=None, **options):
    kls = None if token_kls is None else reals(token_kls)
    got = compute_token_advantages(advantages=real(advantages), loss_masks=masks(loss_masks), token_kls=kls, **options)
    return {"advantages": lists(got)}


def gae(token_rewards, values, loss_masks, **options):
    advantages, returns = compute_gae(
        token_rewards=reals(token_rewards), values=reals(values), loss_masks=masks(loss_masks), **options
    )
    return {"advantages": lists(advantages), "returns": lists(returns)}


def whitened_advantages(advantages, loss_masks, **options):
    got = compute_whitened_advantages(advantages=reals(advantages), loss_masks=masks(loss_masks), **options)
    return {"advantages": lists(got)}


def kl(logprobs, ref_logprobs, estimator, old_logprobs=None):
    options = {"ref_logprobs": real(ref_logprobs), "estimator": estimator}
    options["old_logprobs"] = None if old_logprobs is None else real(old_logprobs)
    return with_gradient(lambda leaf: (compute_kl(logprobs=leaf, **options), {}), logprobs)


def softmax_kl(logits, ref_logits, estimator, old_logits=None):
    """Expectation over every token of a small vocabulary, drawn from the policy, or from the old one when given."""
    leaf = real(logits).requires_grad_()
    logprobs = leaf.log_softmax(0)
    old_logprobs = None if old_logits is None else real(old_logits).log_softmax(0)
    drawn = (logprobs.detach() if old_logprobs is None else old_logprobs).exp()
    estimates = compute_kl(
        logprobs=logprobs,
        ref_logprobs=real(ref_logits).log_softmax(0),
        estimator=estimator,
        old_logprobs=old_logprobs,
    )
    (drawn * estimates).sum().backward()
    return {"value": float((drawn * estimates.detach()).sum()), "gradient": leaf.grad.tolist()}


def kl_penalized_rewards(rewards, token_kls, loss_masks, rollout_indices, kl_coef):
    penalized = compute_kl_penalized_rewards(
        rewards=real(rewards),
        token_kls=[real(row) for row in token_kls],
        loss_masks=[mask(row) for row in loss_masks],
        rollout_indices=rollout_indices,
        kl_coef=kl_coef,
    )
    return {"rewards": penalized.tolist()}


def ratio_loss(function, logprobs, old_logprobs, advantages, **options):
    def run(leaf):
        loss, is_clipped, ratio = function(
            logprobs=leaf, old_logprobs=real(old_logprobs), advantages=real(advantages), **options
        )
        return loss, {"clipped": is_clipped.tolist(), "ratio": ratio.tolist()}

    return with_gradient(run, logprobs)


def clipped_policy_loss(**inputs):
    return ratio_loss(compute_clipped_policy_loss, **inputs)


def cispo_policy_loss(**inputs):
    return ratio_loss(compute_cispo_policy_loss, **inputs)


def gspo_policy_loss(loss_mask, sample_index, **inputs):
    segments = {"loss_mask": mask(loss_mask), "sample_index": torch.tensor(sample_index)}
    return ratio_loss(compute_gspo_policy_loss, **segments, **inputs)


def sft_loss(logprobs):
    return with_gradient(lambda leaf: (compute_sft_loss(logprobs=leaf), {}), logprobs)


def aggregated_loss(losses, loss_masks, **options):
    weights = compute_loss_weights(loss_masks=masks(loss_masks), **options)
    return {"loss": sum(float((w * real(row)).sum()) for w, row in zip(weights, losses, strict=True))}


def clipped_value_loss(values, old_values, returns, value_clip):
    def run(leaf):
        loss, is_clipped = compute_clipped_value_loss(
            values=leaf, old_values=real(old_values), returns=real(returns), value_clip=value_clip
        )
        return loss, {"clipped": is_clipped.tolist()}

    return with_gradient(run, values)


def value_objective(batch, values, value_clip):
    tensors = {name: mask(row) if name == "loss_mask" else real(row) for name, row in batch.items()}
    return with_gradient(lambda leaf: (compute_value_objective(tensors, leaf, value_clip=value_clip)[0], {}), values)


def explained_variance(values, returns, loss_masks):
    explained = compute_explained_variance(values=reals(values), returns=reals(returns), loss_masks=masks(loss_masks))
    return {"explained": explained}


def overlong_penalties(num_tokens, **options):
    return {"penalties": compute_overlong_penalties(num_tokens=torch.tensor(num_tokens), **options).tolist()}


def filtered_loss_masks(loss_masks, is_rejected):
    got = compute_filtered_loss_masks(loss_masks=masks(loss_masks), is_rejected=mask(is_rejected))
    return {"loss_masks": lists(got)}


def policy_objective(batch, logprobs, entropy, off_policy=None, **options):
    kinds = {"loss_mask": mask, "sample_index": torch.tensor}
    tensors = {name: kinds.get(name, real)(values) for name, values in batch.items()}
    options |= {"off_policy": OffPolicy(**off_policy or {})}
    return with_gradient(
        lambda leaf: (compute_policy_objective(tensors, leaf, real(entropy), **options)[0], {}), logprobs
    )


def sft_objective(batch, logprobs):
    return with_gradient(
        lambda leaf: (compute_sft_objective({"loss_mask": mask(batch["loss_mask"])}, leaf, None)[0], {}), logprobs
    )


def off_policy_weights(
    old_logprobs, rollout_logprobs, loss_mask, sample_index, low=0.0, high=2.0, veto=None, **options
):
    weights, is_changed, log_ratios = compute_off_policy_weights(
        old_logprobs=real(old_logprobs),
        rollout_logprobs=real(rollout_logprobs),
        loss_mask=mask(loss_mask),
        sample_index=torch.tensor(sample_index),
        low=low,
        high=high,
        veto=veto,
        **options,
    )
    return {"weights": weights.tolist(), "changed": is_changed.tolist(), "log_ratios": log_ratios.tolist()}


def opsm_mask(logprobs, old_logprobs, advantages, loss_mask, sample_index, delta):
    kept = compute_opsm_mask(
        logprobs=real(logprobs),
        old_logprobs=real(old_logprobs),
        advantages=real(advantages),
        loss_mask=mask(loss_mask),
        sample_index=torch.tensor(sample_index),
        delta=delta,
    )
    return {"kept": kept.tolist()}


def staleness_weights(staleness, power):
    return {"weights": compute_staleness_weights(staleness=real(staleness), power=power).tolist()}


def effective_sample_fraction(weights):
    row = real(weights)
    fraction = compute_effective_sample_fraction(
        weight_mean=float(row.mean()), weight_square_mean=float(row.square().mean())
    )
    return {"fraction": fraction}


def distilled_advantages(advantages, old_logprobs, teacher_logprobs, loss_mask, distillation_coef):
    distilled = compute_distilled_advantages(
        advantages=real(advantages),
        old_logprobs=real(old_logprobs),
        teacher_logprobs=real(teacher_logprobs),
        loss_mask=mask(loss_mask),
        distillation_coef=distillation_coef,
    )
    return {"advantages": distilled.tolist()}


def topk_reverse_kl(topk_logprobs, teacher_topk_logprobs):
    leaf = real(topk_logprobs).requires_grad_()
    loss = compute_topk_reverse_kl(topk_logprobs=leaf, teacher_topk_logprobs=real(teacher_topk_logprobs))
    loss.sum().backward()
    return {"loss": loss.tolist(), "gradient": leaf.grad.flatten().tolist()}


class Sampled:
    """An engine that has drawn these tokens."""

    def __init__(self, completion):
        self.completion = completion

    async def generate(self, **request):
        return self.completion


def sampled_turn(prompt_ids, token_ids, rollout_logprobs, tokenizer):
    """One answer through the generate function, which decodes it, to what is trained."""
    completion = Completion(tuple(token_ids), tuple(rollout_logprobs), "stop", 0)
    generate = SingleTurn(
        Policy(
            Sampled(completion), tokenizer=tokenizer, sampling=SamplingParams(max_new_tokens=99), seed=0, run_id="run"
        )
    )
    prompt = Prompt(0, tuple(prompt_ids), tokenizer.decode(prompt_ids), "")
    return train_tokens(asyncio.run(generate(prompt, 0)))


def trained_tokens(turns):
    """The turns of one rollout, as (shown, sampled, logprobs) each, to what is trained."""
    first = tuple(turns[0][0])
    rollout = Rollout(
        prompt=Prompt(0, first, "", ""),
        sibling=0,
        turns=tuple(Turn(tuple(shown), Completion(tuple(ids), tuple(lps), "stop", 0)) for shown, ids, lps in turns),
        text="",
        status=RolloutStatus.COMPLETED,
    )
    return train_tokens(rollout)


def train_tokens(rollout):
    """Through the buffer's records and a micro-batch; a trained position's token stands one further."""
    group = Group(rollout.prompt, (replace(rollout, reward=1.0),))
    restored = to_group(json.loads(json.dumps(to_record(group))))
    ((batch,),) = build_grid(to_samples(restored), num_ranks=1, max_tokens=10_000)
    trained = batch.loss_mask.nonzero()[0]
    return {
        "sequence": batch.token_ids.tolist(),
        "places": (trained + 1).tolist(),
        "trained": batch.target_ids[trained].tolist(),
        "rollout_logprobs": batch.rollout_logprobs[trained].tolist(),
    }
