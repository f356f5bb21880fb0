"""The only file of the suite that names rlrecipes: point these at another implementation to check that one.

Each function takes the ``inputs`` of a case in golden/ by keyword and returns values to compare with ``expected``.
"""

import torch

from rlrecipes.algos.advantages import compute_group_advantages, compute_zero_variance
from rlrecipes.algos.aggregation import compute_loss_weights
from rlrecipes.algos.kl import compute_kl, compute_kl_penalized_rewards
from rlrecipes.algos.objective import compute_policy_objective, compute_sft_objective
from rlrecipes.algos.policy_loss import compute_clipped_policy_loss, compute_sft_loss


def real(values):
    return torch.tensor(values, dtype=torch.float64)


def mask(values):
    return torch.tensor(values, dtype=torch.bool)


def with_gradient(function, logprobs):
    leaf = real(logprobs).requires_grad_()
    loss, others = function(leaf)
    loss.sum().backward()
    return {"loss": loss.tolist(), "gradient": leaf.grad.tolist()} | others


def group_advantages(rewards, group_ids, **options):
    groups = torch.tensor(group_ids)
    return {
        "advantages": compute_group_advantages(rewards=real(rewards), group_ids=groups, **options).tolist(),
        "zero_variance": compute_zero_variance(rewards=real(rewards), group_ids=groups).tolist(),
    }


def kl(logprobs, ref_logprobs, estimator):
    return with_gradient(
        lambda leaf: (compute_kl(logprobs=leaf, ref_logprobs=real(ref_logprobs), estimator=estimator), {}), logprobs
    )


def kl_penalized_rewards(rewards, token_kls, loss_masks, rollout_indices, kl_coef):
    penalized = compute_kl_penalized_rewards(
        rewards=real(rewards),
        token_kls=[real(row) for row in token_kls],
        loss_masks=[mask(row) for row in loss_masks],
        rollout_indices=rollout_indices,
        kl_coef=kl_coef,
    )
    return {"rewards": penalized.tolist()}


def clipped_policy_loss(logprobs, old_logprobs, advantages, **options):
    def run(leaf):
        loss, is_clipped, ratio = compute_clipped_policy_loss(
            logprobs=leaf, old_logprobs=real(old_logprobs), advantages=real(advantages), **options
        )
        return loss, {"clipped": is_clipped.tolist(), "ratio": ratio.tolist()}

    return with_gradient(run, logprobs)


def sft_loss(logprobs):
    return with_gradient(lambda leaf: (compute_sft_loss(logprobs=leaf), {}), logprobs)


def aggregated_loss(mode, losses, loss_masks, rollout_ids):
    weights = compute_loss_weights(mode=mode, loss_masks=[mask(row) for row in loss_masks], rollout_ids=rollout_ids)
    return {"loss": sum(float((w * real(row)).sum()) for w, row in zip(weights, losses, strict=True))}


def policy_objective(batch, logprobs, entropy, **options):
    tensors = {name: mask(values) if name == "loss_mask" else real(values) for name, values in batch.items()}
    return with_gradient(
        lambda leaf: (compute_policy_objective(tensors, leaf, real(entropy), **options)[0], {}), logprobs
    )


def sft_objective(batch, logprobs):
    return with_gradient(
        lambda leaf: (compute_sft_objective({"loss_mask": mask(batch["loss_mask"])}, leaf, None)[0], {}), logprobs
    )
