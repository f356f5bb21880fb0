import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrecipes.data.tokenizer import build_char_tokenizer, load_tokenizer
from rlrecipes.errors import DataError

ALPHABET = "0123456789+-= \n"


@pytest.fixture(scope="session")
def loaded(tmp_path_factory):
    """Both kinds, written into model directories and loaded the way every other part loads them."""

    def write(alphabet):
        path = tmp_path_factory.mktemp("model")
        (path / "config.json").write_bytes(orjson.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
        build_char_tokenizer(alphabet=alphabet, chat_template="{{ messages[0].content }}").save_pretrained(path)
        return load_tokenizer(path)

    return {"bytes": write(None), "alphabet": write(ALPHABET)}


@settings(deadline=None)
@given(text=st.text())
def test_any_text_survives_bytes(loaded, text):
    ids = loaded["bytes"](text)["input_ids"]
    assert loaded["bytes"].decode(ids) == text


@settings(deadline=None)
@given(text=st.text(alphabet=ALPHABET))
def test_any_text_of_the_alphabet_survives_and_takes_one_token_per_character(loaded, text):
    ids = loaded["alphabet"](text)["input_ids"]
    assert ids == [ALPHABET.index(char) for char in text]
    assert loaded["alphabet"].decode(ids) == text


def test_special_tokens_come_back_from_disk(loaded):
    for tokenizer, first in ((loaded["bytes"], 256), (loaded["alphabet"], len(ALPHABET) + 1)):
        assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (first, first + 1, first + 2)
        assert tokenizer("1<eos>")["input_ids"][-1] == first
        assert tokenizer.decode([first], skip_special_tokens=True) == ""
        assert tokenizer.apply_chat_template([{"role": "user", "content": "1"}], tokenize=False) == "1"
    assert loaded["alphabet"]("x")["input_ids"] == [loaded["alphabet"].unk_token_id]


def test_a_bad_path_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="not a directory"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(DataError, match="no tokenizer can be loaded"):
        load_tokenizer(tmp_path)
