from pathlib import Path

import orjson
import pytest

from rlrecipes.data.encoding import PromptEncoder
from rlrecipes.data.tokenizer import build_char_tokenizer

CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer():
    return build_char_tokenizer(extra_special_tokens=["<|user|>", "<|system|>", "<|assistant|>"], chat_template=CHAT)


@pytest.fixture
def encoder(tokenizer):
    return PromptEncoder(tokenizer, apply_chat_template=False, max_prompt_tokens=50)


@pytest.fixture
def write_rows(tmp_path):
    def write(*rows, name="prompts.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(b"".join((row if isinstance(row, bytes) else orjson.dumps(row)) + b"\n" for row in rows))
        return path

    return write
