import pytest
from scripted_parts import NumberSource, make_rollout

from rlrecipes.errors import ContractError
from rlrecipes.rollout.samples import to_samples
from rlrecipes.types import Completion, Group, RolloutStatus, Turn

PROMPT = NumberSource().prompt(5)


def test_a_single_turn_becomes_one_sample():
    (sample,) = to_samples(Group(PROMPT, (make_rollout(PROMPT, 3, reward=0.5, status=RolloutStatus.TRUNCATED),)))
    assert sample.token_ids == (5, 0, 1)
    assert sample.loss_mask == (False, True, True)
    assert sample.rollout_logprobs == (0.0, -0.5, -0.5)
    assert (sample.prompt_index, sample.sibling, sample.reward, sample.weight_version) == (5, 3, 0.5, 1)
    assert sample.status is RolloutStatus.TRUNCATED


def test_what_the_model_was_shown_is_masked_in_every_turn():
    turns = (
        Turn((5, 6), Completion((7, 8), (-0.1, -0.2), "stop", 4)),
        Turn((9,), Completion((10,), (-0.3,), "stop", 3)),
    )
    (sample,) = to_samples(Group(PROMPT, (make_rollout(PROMPT, 0, turns=turns),)))
    assert sample.token_ids == (5, 6, 7, 8, 9, 10)
    assert sample.loss_mask == (False, False, True, True, False, True)
    assert sample.rollout_logprobs == (0.0, 0.0, -0.1, -0.2, 0.0, -0.3)
    assert sample.weight_version == 3


def test_failed_and_aborted_rollouts_give_no_sample():
    statuses = (RolloutStatus.FAILED, RolloutStatus.COMPLETED, RolloutStatus.ABORTED, RolloutStatus.TRUNCATED)
    group = Group(PROMPT, tuple(make_rollout(PROMPT, i, status=status) for i, status in enumerate(statuses)))
    assert [sample.sibling for sample in to_samples(group)] == [1, 3]


def test_an_unscored_group_is_refused():
    with pytest.raises(ContractError, match="5-0 has no reward"):
        to_samples(Group(PROMPT, (make_rollout(PROMPT, 0, reward=None),)))
