"""Text of growing answers, with characters that span tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlrecipes.engines.embedded.tokenizer import TextStream, Tokenizer

TEXT = "the quick brown fox jumps over 12 dogs, naïve café, 日本語のテキスト, 🙂🙃 family 👨‍👩‍👧 done. "


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bytes")
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet)
    fast.train_from_iterator([TEXT], trainer)
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<eos>").save_pretrained(path)
    return path


def test_encodes_and_decodes_as_transformers(tokenizer_path: Path) -> None:
    ours, theirs = Tokenizer(tokenizer_path), AutoTokenizer.from_pretrained(tokenizer_path)
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    assert ours.eos_token_id == theirs.eos_token_id == 0
    ids = [*ours.encode(TEXT), 0, 5]
    for skip in (False, True):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("seed", range(5))
def test_a_stream_grows_without_broken_characters_and_ends_as_the_whole(tokenizer_path: Path, seed: int) -> None:
    tokenizer, source = Tokenizer(tokenizer_path), random.Random(seed)
    prompt, ids = tokenizer.encode("the dogs"), tokenizer.encode(TEXT * 3)
    stream = TextStream(tokenizer, prompt, True)
    shown, start = "", 0
    while start < len(ids):
        stop = min(len(ids), start + source.randrange(1, 4))
        text = stream.extend(ids[start:stop], is_last=stop == len(ids))
        assert text.startswith(shown) and "\ufffd" not in text
        shown, start = text, stop
    assert shown == TEXT * 3


def test_an_answer_cut_inside_a_character_says_so_at_its_end_only(tokenizer_path: Path) -> None:
    tokenizer = Tokenizer(tokenizer_path)
    ids = tokenizer.encode("a🙂")[:-1]
    stream = TextStream(tokenizer, [], True)
    assert stream.extend(ids, is_last=False) == "a"
    assert stream.extend([], is_last=True) == tokenizer.decode(ids)
