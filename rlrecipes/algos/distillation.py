"""Learning from a teacher's probabilities. Owns the sampled and the top-k form; refuses to serve or run a teacher."""

from __future__ import annotations

from torch import Tensor

from rlrecipes.algos.shapes import check_same_shape
from rlrecipes.errors import ContractError

_LEAST_LOGPROB = -100.0
_LEAST_TAIL = 1e-7


def compute_distilled_advantages(
    *, advantages: Tensor, old_logprobs: Tensor, teacher_logprobs: Tensor, loss_mask: Tensor, distillation_coef: float
) -> Tensor:
    """Take from each token's advantage how much likelier the student was to draw it than the teacher (OPD).

    Formula::

        advantages[t] - distillation_coef * (old_logprobs[t] - teacher_logprobs[t])        where trained

    The expected policy gradient of the subtracted term is that of KL(student || teacher) at each prefix: going down
    the loss goes towards the teacher. Adding it would go away. Apply it before advantages are whitened; with rewards of
    0 it is distillation alone.

    Args:
        advantages: any shape.
        old_logprobs: same shape, nats, of the student that drew the tokens, at the temperature that they were drawn at.
        teacher_logprobs: same shape, nats, of the teacher for the same tokens at the same temperature.
        loss_mask: same shape, bool, True where trained.
        distillation_coef: advantage units per nat.

    Returns:
        Same shape, dtype of ``advantages``; without gradient. Masked entries are those of ``advantages``.

    Raises:
        ContractError: shapes differ, or a trained token has a log probability that is not finite.

    Differs:
        Some texts print a plus sign, which drives the student away from the teacher.

    Source:
        Lu et al. 2025, "On-policy distillation", thinkingmachines.ai/blog/on-policy-distillation (reverse KL as a
        per-token reward); Agarwal et al. 2023 (GKD), arXiv:2306.13649, section 3 with the reverse KL.
    """
    check_same_shape(
        "compute_distilled_advantages",
        advantages=advantages,
        old_logprobs=old_logprobs,
        teacher_logprobs=teacher_logprobs,
        loss_mask=loss_mask,
    )
    distances = (old_logprobs.detach() - teacher_logprobs.detach())[loss_mask]
    if not bool(distances.isfinite().all()):
        raise ContractError(
            "algos.compute_distilled_advantages",
            "a trained token has no finite log probability under student or teacher",
            "give the teacher the sampled token ids, and no top_p or top_k below which its probability is 0",
        )
    distilled = advantages.detach().clone()
    distilled[loss_mask] -= distillation_coef * distances
    return distilled


def compute_topk_reverse_kl(*, topk_logprobs: Tensor, teacher_topk_logprobs: Tensor) -> Tensor:
    """KL(student || teacher) over the teacher's likeliest tokens and one event that stands for all others.

    Formula::

        p_k = exp(topk_logprobs[k])         p_rest = 1 - sum of p_k         q_k, q_rest: the same of the teacher
        kl  = sum over k of p_k * log(p_k / q_k) + p_rest * log(p_rest / q_rest)

        d kl / d topk_logprobs[k] = p_k * (log(p_k / q_k) - log(p_rest / q_rest))

    With all of the vocabulary it is the whole KL; with less it is a lower bound of it.

    Args:
        topk_logprobs: [..., K] nats, of the current policy at the teacher's K likeliest tokens, normalised over the
            whole vocabulary.
        teacher_topk_logprobs: [..., K] nats, of the teacher at the same tokens, normalised likewise and at the same
            temperature.

    Returns:
        [...] nats, at least 0 up to rounding. Gradients reach ``topk_logprobs``.

    Raises:
        ContractError: shapes differ.

    Differs:
        A token's log probability counts as at least -100 nats and the rest's mass as at least 1e-7, so that a tail
        smaller than rounding neither overflows nor pulls.

    Source:
        Agarwal et al. 2023 (GKD), arXiv:2306.13649, section 2; truncated to K tokens and a tail.
    """
    check_same_shape(
        "compute_topk_reverse_kl", topk_logprobs=topk_logprobs, teacher_topk_logprobs=teacher_topk_logprobs
    )
    student = topk_logprobs.clamp(min=_LEAST_LOGPROB)
    teacher = teacher_topk_logprobs.detach().clamp(min=_LEAST_LOGPROB)
    rest, teacher_rest = ((1 - each.exp().sum(-1)).clamp(min=_LEAST_TAIL) for each in (student, teacher))
    return (student.exp() * (student - teacher)).sum(-1) + rest * (rest / teacher_rest).log()
