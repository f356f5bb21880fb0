import pytest

from rlrecipes.data.encoding import PromptEncoder
from rlrecipes.data.rows import RowKeys
from rlrecipes.data.sft import SftSource
from rlrecipes.data.tokenizer import build_char_tokenizer
from rlrecipes.errors import DataError


def build(path, encoder, **changes):
    options = {"keys": RowKeys(), "seed": 0, "should_shuffle": False, "max_sample_tokens": 20} | changes
    return SftSource(path, encoder=encoder, **options)


def test_the_response_and_its_end_are_trained(write_rows, encoder, tokenizer):
    source = build(write_rows({"prompt": "1+1=", "response": "2"}, {"prompt": "a", "response": "bc"}), encoder)
    sample = source.sample(2)
    assert tokenizer.decode(sample.token_ids) == "1+1=2<eos>"
    assert sample.token_ids[-1] == tokenizer.eos_token_id
    assert sample.loss_mask == (False,) * 4 + (True,) * 2
    assert (sample.prompt_index, sample.rollout_logprobs, source.num_rows) == (2, None, 2)
    assert source.sample(1).loss_mask == (False, True, True, True)


def test_the_prompt_is_the_one_a_rollout_would_see(write_rows, tokenizer):
    encoder = PromptEncoder(tokenizer, apply_chat_template=True, max_prompt_tokens=50)
    sample = build(write_rows({"prompt": "1+1", "response": "2"}), encoder).sample(0)
    assert tokenizer.decode(sample.token_ids) == "<|user|>1+1<eos><|assistant|>2<eos>"
    assert sum(sample.loss_mask) == 2


def test_bad_lines_are_named(write_rows, encoder):
    path = write_rows({"prompt": "1"}, {"prompt": "1", "response": 2}, {"prompt": "1", "response": "2" * 19})
    with pytest.raises(DataError) as caught:
        build(path, encoder)
    assert [problem.where for problem in caught.value.problems] == [f"{path}:{line}" for line in (1, 2, 3)]
    assert "21 tokens, more than 20" in caught.value.problems[2].problem


def test_text_outside_the_alphabet_is_named(write_rows):
    encoder = PromptEncoder(build_char_tokenizer(alphabet="0123456789+="), False, 50)
    path = write_rows({"prompt": "1+1=", "response": "two"}, {"prompt": "one", "response": "2"})
    with pytest.raises(DataError) as caught:
        build(path, encoder)
    assert [problem.where for problem in caught.value.problems] == [f"{path}:1", f"{path}:2"]
    assert all("does not know" in problem.problem for problem in caught.value.problems)


def test_only_the_first_rows_are_taken_when_asked(write_rows, encoder):
    path = write_rows(*({"prompt": letter, "response": letter} for letter in "abcd"))
    source = build(path, encoder, max_rows=2)
    assert source.num_rows == 2
    assert [source.sample(index).token_ids[0] for index in range(4)] == [
        source.sample(i % 2).token_ids[0] for i in range(4)
    ]
