import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrecipes.data.encoding import PromptEncoder
from rlrecipes.data.jsonl import JsonlPromptSource
from rlrecipes.data.order import compute_row_number
from rlrecipes.data.rows import MAX_REPORTED_PROBLEMS, RowKeys
from rlrecipes.errors import DataError


def build(path, encoder, **changes):
    options = {"keys": RowKeys(), "seed": 3, "should_shuffle": True, "name": "sums"} | changes
    return JsonlPromptSource(path, encoder=encoder, **options)


def test_a_prompt_carries_its_row(write_rows, encoder, tokenizer):
    source = build(write_rows({"prompt": "1+1=", "label": 2, "metadata": {"level": [1, {"deep": True}]}}), encoder)
    prompt = source.prompt(5)
    assert (prompt.index, prompt.text, prompt.label, prompt.source) == (5, "1+1=", "2", "sums")
    assert tokenizer.decode(prompt.token_ids) == "1+1="
    assert prompt.metadata == {"level": [1, {"deep": True}]}


def test_keys_can_be_renamed_and_metadata_may_be_absent(write_rows, encoder):
    source = build(write_rows({"q": "1+1=", "a": "2"}), encoder, keys=RowKeys(prompt="q", label="a"))
    assert source.prompt(0).text == "1+1=" and source.prompt(0).metadata == {}


def test_the_chat_template_speaks_for_messages_and_strings(write_rows, tokenizer):
    encoder = PromptEncoder(tokenizer, apply_chat_template=True, max_prompt_tokens=50)
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}]
    path = write_rows({"prompt": messages, "label": "2"}, {"prompt": "1+1", "label": "2"})
    source = build(path, encoder, should_shuffle=False)
    assert source.prompt(0).text == "<|system|>add<eos><|user|>1+1<eos><|assistant|>"
    assert source.prompt(1).text == "<|user|>1+1<eos><|assistant|>"
    assert source.prompt(1).token_ids == tuple(
        tokenizer.convert_tokens_to_ids(["<|user|>", "1", "+", "1", "<eos>", "<|assistant|>"])
    )


@settings(deadline=None)
@given(num_rows=st.integers(1, 40), seed=st.integers(0, 2**31), epoch=st.integers(0, 5))
def test_every_epoch_holds_each_row_once(num_rows, seed, epoch):
    rows = [
        compute_row_number(epoch * num_rows + i, num_rows=num_rows, seed=seed, should_shuffle=True)
        for i in range(num_rows)
    ]
    assert sorted(rows) == list(range(num_rows))


def test_the_order_depends_on_seed_and_epoch_alone(write_rows, encoder):
    path = write_rows(*({"prompt": f"{i}=", "label": str(i)} for i in range(30)))
    first, second = build(path, encoder), build(path, encoder)
    backwards = [second.prompt(i).text for i in reversed(range(90))]
    forwards = [first.prompt(i).text for i in range(90)]
    assert forwards == backwards[::-1]
    assert forwards[:30] != forwards[30:60]
    assert forwards != [build(path, encoder, seed=4).prompt(i).text for i in range(90)]
    in_file_order = build(path, encoder, should_shuffle=False)
    assert [in_file_order.prompt(i).label for i in range(60)] == [str(i % 30) for i in range(60)]
    assert len(first) == first.num_rows == 30


GOOD = {"prompt": "1+1=", "label": "2"}


@pytest.mark.parametrize(
    ("bad", "problem", "fix"),
    [
        (b'{"prompt": "1+1=", ', "not JSON", "one JSON object per line"),
        (b'{"prompt": "\xff", "label": "2"}', "not JSON", "UTF-8"),
        (b"[1]", "is a list, not an object", "one JSON object per line"),
        ({"promt": "1+1=", "label": "2"}, "has no key 'prompt'", "'promt'"),
        ({"prompt": "1+1="}, "has no key 'label'", "name the right key"),
        ({"prompt": 7, "label": "2"}, "'prompt' is a number", "a string or a list of chat messages"),
        ({"prompt": "1", "label": None}, "'label' is a null", "a string or a number"),
        ({"prompt": "1", "label": True}, "'label' is a boolean", "a string or a number"),
        ({"prompt": "1", "label": "2", "metadata": "x"}, "'metadata' is a string", "an object"),
        ({"prompt": [], "label": "2"}, "not of chat messages", "role"),
        ({"prompt": [{"role": "user", "content": "x"}], "label": "2"}, "holds chat messages", "apply_chat_template"),
        ({"prompt": "", "label": "2"}, "is empty", "at least one token"),
        ({"prompt": "x" * 51, "label": "2"}, "has 51 tokens, more than max_prompt_tokens=50", "to 51"),
    ],
)
def test_a_bad_line_is_named(write_rows, encoder, bad, problem, fix):
    path = write_rows(GOOD, b"", bad, GOOD)
    with pytest.raises(DataError) as caught:
        build(path, encoder)
    (found,) = caught.value.problems
    assert found.where == f"{path}:3"
    assert problem in found.problem and fix in found.fix
    assert caught.value.exit_code == 2


def test_a_template_that_refuses_is_the_lines_fault(write_rows, tokenizer):
    encoder = PromptEncoder(tokenizer, apply_chat_template=True, max_prompt_tokens=50)
    path = write_rows({"prompt": [{"role": "user", "content": "x"}], "label": "2"})
    tokenizer.chat_template, kept = "{{ raise_exception('no user here') }}", tokenizer.chat_template
    try:
        with pytest.raises(DataError, match="no user here"):
            build(path, encoder)
    finally:
        tokenizer.chat_template = kept


def test_all_bad_lines_are_reported_together_up_to_a_limit(write_rows, encoder):
    bad = [b"{", {"label": "2"}, {"prompt": "x" * 60, "label": "2"}] * 10
    path = write_rows(*bad)
    with pytest.raises(DataError) as caught:
        build(path, encoder)
    *listed, rest = caught.value.problems
    assert [problem.where for problem in listed] == [f"{path}:{i}" for i in range(1, MAX_REPORTED_PROBLEMS + 1)]
    assert rest.problem == "10 more lines are bad"


def test_a_missing_or_empty_file_is_an_error(tmp_path, write_rows, encoder):
    for path, problem in (
        (tmp_path / "no.jsonl", "No such file"),
        (tmp_path, "directory"),
        (write_rows(b" "), "empty"),
    ):
        with pytest.raises(DataError, match=problem):
            build(path, encoder)


def test_only_the_first_rows_are_taken_when_asked(write_rows, encoder):
    path = write_rows(*({"prompt": letter, "label": letter} for letter in "abcd"))
    source = build(path, encoder, should_shuffle=False, max_rows=3)
    assert source.num_rows == 3
    assert [source.prompt(index).text for index in range(4)] == ["a", "b", "c", "a"]
