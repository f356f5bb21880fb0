import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlrecipes.data.buffer import SampleBuffer
from rlrecipes.data.records import to_group, to_record
from rlrecipes.errors import CheckpointError, ContractError
from rlrecipes.types import Completion, Group, Prompt, Rollout, RolloutStatus, TokenScores, Turn

floats = st.floats(allow_nan=False, allow_infinity=False)
ids = st.lists(st.integers(0, 2**31), max_size=4).map(tuple)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | floats | st.text(), st.lists, max_leaves=4
)


@st.composite
def completions(draw):
    token_ids = draw(ids)
    logprobs = draw(st.lists(floats, min_size=len(token_ids), max_size=len(token_ids)).map(tuple))
    counts = st.integers(0, 10**6)
    rows = st.lists(st.lists(floats, max_size=3).map(tuple), max_size=3).map(tuple)
    scores = st.none() | st.builds(TokenScores, st.just(logprobs), st.lists(ids).map(tuple), rows, counts)
    return Completion(
        token_ids, logprobs, draw(st.sampled_from(["stop", "length", "abort"])), draw(counts), draw(counts),
        draw(counts), draw(floats), draw(scores), draw(scores),
    )  # fmt: skip


@st.composite
def groups(draw):
    prompt = Prompt(
        draw(st.integers(0, 10**9)), draw(ids), draw(st.text()), draw(st.none() | st.text()),
        draw(st.dictionaries(st.text(), json_values, max_size=3)), draw(st.text()),
    )  # fmt: skip
    turns = st.lists(st.builds(Turn, ids, completions()), max_size=2).map(tuple)
    rollouts = [
        Rollout(
            prompt, sibling, draw(turns), draw(st.text()),
            draw(st.sampled_from(RolloutStatus)), draw(st.none() | floats), draw(st.text()),
            draw(st.dictionaries(st.text(), floats, max_size=2)),
        )
        for sibling in range(draw(st.integers(1, 3)))
    ]  # fmt: skip
    return Group(prompt, tuple(rollouts))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(group=groups())
def test_a_group_survives_json_exactly(group):
    assert to_group(json.loads(json.dumps(to_record(group)))) == group


def make_group(index):
    prompt = Prompt(index, (1,), "x")
    return Group(prompt, (Rollout(prompt, 0, (), "", RolloutStatus.FAILED, reward=0.0),))


def indices(groups):
    return [group.prompt.index for group in groups]


def test_groups_leave_in_the_order_they_came():
    buffer = SampleBuffer(3)
    for index in (4, 2, 9):
        buffer.put(make_group(index))
    assert indices(buffer.take(2)) == [4, 2]
    assert (len(buffer), buffer.num_free) == (1, 2)


def test_bounds_are_kept():
    buffer = SampleBuffer(1)
    buffer.put(make_group(0))
    with pytest.raises(ContractError, match="1 groups wait already"):
        buffer.put(make_group(1))
    with pytest.raises(ContractError, match="2 groups were asked for, 1 wait"):
        buffer.take(2)
    assert indices(buffer.take(1)) == [0]


def test_taken_groups_survive_a_restart_until_they_are_trained():
    buffer = SampleBuffer(3)
    for index in range(3):
        buffer.put(make_group(index))
    buffer.take(2)
    untrained, restored = json.loads(json.dumps(buffer.state())), SampleBuffer(3)
    buffer.confirm_trained()
    restored.restore(untrained)
    assert indices(restored.take(3)) == [0, 1, 2]
    restored.restore(buffer.state())
    assert indices(restored.take(1)) == [2] and len(restored) == 0


def test_damaged_records_are_refused():
    record = to_record(make_group(0))
    with pytest.raises(CheckpointError, match="version 9"):
        to_group(record | {"version": 9})
    with pytest.raises(CheckpointError, match="damaged"):
        to_group(record | {"rollouts": [{"sibling": 0}]})
