"""Groups as samples. Owns which tokens of a rollout are trained."""

from __future__ import annotations

import numpy as np

from rlrecipes.errors import ContractError
from rlrecipes.rollout.groups import is_answered
from rlrecipes.types import Group, Rollout, Sample


def to_samples(group: Group) -> list[Sample]:
    """Flatten the rollouts of a group, one sample each.

    What the model generated is trained, in every turn; what it was shown (prompt, tool answers) is not. FAILED and
    ABORTED rollouts give no sample: their reward says nothing about their tokens. They are counted in the metrics.

    Args:
        group: rewarded.

    Returns:
        At most one sample per rollout, in order of siblings.

    Raises:
        ContractError: a rollout has no reward.
    """
    return [_to_sample(rollout) for rollout in group.rollouts if is_answered(rollout)]


def _to_sample(rollout: Rollout) -> Sample:
    if rollout.reward is None:
        name = f"{rollout.prompt.index}-{rollout.sibling}"
        raise ContractError("rollout.samples", f"rollout {name} has no reward", "score groups before training them")
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    rollout_logprobs: list[float] = []
    for turn in rollout.turns:
        num_observed, completion = len(turn.observation_ids), turn.completion
        token_ids += [*turn.observation_ids, *completion.token_ids]
        loss_mask += [False] * num_observed + [True] * len(completion.token_ids)
        rollout_logprobs += [0.0] * num_observed + list(completion.rollout_logprobs)
    return Sample(
        token_ids=tuple(token_ids),
        loss_mask=tuple(loss_mask),
        rollout_logprobs=tuple(rollout_logprobs),
        prompt_index=rollout.prompt.index,
        sibling=rollout.sibling,
        reward=rollout.reward,
        weight_version=min(turn.completion.weight_version for turn in rollout.turns),
        status=rollout.status,
        **_gather_scores(rollout),
    )


def _gather_scores(rollout: Rollout) -> dict[str, np.ndarray]:
    """What a served reference or teacher said, 0 where nothing is trained."""
    arrays: dict[str, list[np.ndarray]] = {}
    for turn in rollout.turns:
        completion = turn.completion
        named = {
            "ref_logprobs": completion.reference and completion.reference.logprobs,
            "teacher_logprobs": completion.teacher and completion.teacher.logprobs,
            "teacher_topk_ids": completion.teacher and completion.teacher.topk_ids,
            "teacher_topk_logprobs": completion.teacher and completion.teacher.topk_logprobs,
        }
        for name, values in named.items():
            if values:
                array = np.asarray(values, dtype=np.int64 if name == "teacher_topk_ids" else np.float32)
                shown = np.zeros((len(turn.observation_ids), *array.shape[1:]), dtype=array.dtype)
                arrays[name] = [*arrays.get(name, []), shown, array]
    return {name: np.concatenate(parts) for name, parts in arrays.items()}
