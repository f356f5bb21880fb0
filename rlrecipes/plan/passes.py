"""Which forward passes an algorithm asks of the trainer. Read by the Plan, its predictions, and the learner."""

from __future__ import annotations

from rlrecipes.config.schema import RlConfig


def find_logprob_passes(algo: RlConfig, num_train_steps: int) -> tuple[str, ...]:
    """Which passes a step makes before it trains: policy, reference, teacher, critic.

    The policy's is spared where the only train step of a step starts from the very weights it would use; reference and
    teacher that are served answer while the rollouts are judged.

    Args:
        algo: the algorithm.
        num_train_steps: of a step.
    """
    teacher = algo.distillation
    is_read_before = algo.kl.placement in ("reward", "advantage") or (teacher is not None and teacher.form == "sampled")
    is_spared = num_train_steps == 1 and not is_read_before
    needed = {
        "policy": algo.old_logprobs == "recompute" and not is_spared,
        "reference": algo.kl.placement != "none" and algo.kl.reference_model is None,
        "teacher": teacher is not None and teacher.teacher_model is None,
        "critic": algo.critic is not None,
    }
    return tuple(name for name, is_needed in needed.items() if is_needed)
