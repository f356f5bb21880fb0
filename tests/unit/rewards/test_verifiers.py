import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrecipes.rewards.choices import build_choice_verifier, find_choice
from rlrecipes.rewards.extraction import extract_answer
from rlrecipes.rewards.math_answers import build_math_verifier, is_same_answer
from rlrecipes.rewards.reasoning_gym import build_reasoning_gym_verifier
from rlrecipes.types import Prompt, Rollout, RolloutStatus


def answer(text, label=None, metadata=None):
    return Rollout(Prompt(0, (1,), "?", label, metadata or {}), 0, (), text, RolloutStatus.COMPLETED)


@pytest.mark.parametrize(
    ("text", "extraction", "expected"),
    [
        (" 42\n", "whole", "42"),
        ("So.\nAnswer: 7\nAnswer: 42 \nDone", "after_marker", "42"),
        ("no mark", "after_marker", None),
        (r"\boxed{1} then \boxed{\frac{1}{2}}.", "last_boxed", r"\frac{1}{2}"),
        (r"\boxed{1", "last_boxed", None),
        ("none", "last_boxed", None),
    ],
)
def test_answers_are_found(text, extraction, expected):
    assert extract_answer(text, extraction=extraction, marker="Answer:") == expected


@pytest.mark.parametrize(
    ("given_answer", "label", "is_same"),
    [
        ("42", "42", True),
        ("42.0", "42", True),
        ("$1,234,567$", "1234567", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"\dfrac{3}{4}", "3/4", True),
        ("1e3", "1000", True),
        (r"50\%", "0.5", True),
        ("x + 1", "x+1", True),
        ("0.1", "1/10", True),
        ("0.3333", "1/3", False),
        ("42", "43", False),
        ("", "0", False),
        ("1/0", "1/0", True),
        ("1/0", "2/0", False),
        ("1e9999999999", "1", False),
        ("(1, 2)", "(1,2)", True),
        ("12", "1,2", False),
    ],
)
def test_math_answers_are_compared_by_value(given_answer, label, is_same):
    assert is_same_answer(given_answer, label) is is_same
    verify = build_math_verifier(extraction="last_boxed")
    assert verify(answer(rf"It is \boxed{{{given_answer}}}", label)) == float(is_same)


@settings(deadline=None)
@given(value=st.integers(-(10**9), 10**9), denominator=st.integers(1, 1000))
def test_a_number_equals_itself_however_written(value, denominator):
    assert is_same_answer(f"{value:,}", str(value))
    assert is_same_answer(f"{value}/{denominator}", f"{2 * value}/{2 * denominator}")
    assert not is_same_answer(f"{value}/{denominator}", f"{value + 1}/{denominator}")


def test_math_needs_a_label():
    with pytest.raises(ValueError, match="no label"):
        build_math_verifier()(answer("1"))


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("B", "B"),
        ("(C)", "C"),
        ("A is wrong. The answer is (D).", "D"),
        ("Answer: B because A is not", "B"),
        (r"Answer: A, no: \boxed{C}", "C"),
        ("**Answer:** **B**", "B"),
        ("Between A and B it is B.", "B"),
        ("I don't know", None),
        ("Apples", None),
        ("E", None),
    ],
)
def test_choices_are_found(text, choice):
    assert find_choice(text, "ABCD") == choice


def test_choices_are_judged():
    verify = build_choice_verifier()
    assert (verify(answer("B", "(b)")), verify(answer("A", "B")), verify(answer("?", "B"))) == (1.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="none of ABCD"):
        verify(answer("B", "7"))


def test_reasoning_gym_judges_its_own_tasks():
    entry = {"question": "1 + 2 =", "answer": "3", "metadata": {}}
    metadata = {"dataset": "basic_arithmetic", "entry": entry}
    strict = build_reasoning_gym_verifier(extraction="whole")
    partial = build_reasoning_gym_verifier(extraction="whole", should_give_partial=True)
    assert strict(answer(" 3\n", metadata=metadata)).value == 1.0
    assert strict(answer("4", metadata=metadata)).value == 0.0
    # The task's own score of a text that merely contains the answer: its share of the length.
    wordy = answer("2 or 3", metadata=metadata)
    assert strict(wordy).value == 0.0
    assert partial(wordy).value == strict(wordy).parts["task_reward"] == pytest.approx(1 / 6)
    marked = build_reasoning_gym_verifier(extraction="after_marker", marker="=")
    assert marked(answer("1+2=3", metadata=metadata)).value == 1.0
    assert marked(answer("3", metadata=metadata)).value == 0.0
    with pytest.raises(ValueError, match="lacks dataset and entry"):
        strict(answer("3"))
