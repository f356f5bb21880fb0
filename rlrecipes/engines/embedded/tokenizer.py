"""Text to tokens and back. Owns the tokenizer of the model directory; refuses to import transformers before it must.

``tokenizer.json`` is read by the tokenizers library alone, which starts in milliseconds; only chat templates, and
directories without that file, need transformers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from rlrecipes.errors import EngineError

CONTEXT_TOKENS = 5
"""Prompt tokens that an answer is decoded together with, because some tokenizers write a leading space only inside."""

INCOMPLETE = "\ufffd"


class Tokenizer:
    """The tokenizer of one model directory.

    Args:
        path: the directory.

    Raises:
        EngineError: there is none, or it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._transformers_tokenizer: Any = None
        try:
            file = path / "tokenizer.json"
            self._fast = FastTokenizer.from_file(str(file)) if file.is_file() else self._full._tokenizer
        except Exception as error:  # the library raises bare Exception
            raise EngineError(
                str(path),
                f"its tokenizer cannot be read: {error}",
                "save the tokenizer beside the model, or start with --skip-tokenizer-init",
            ) from error
        self._fast.no_truncation()
        self._fast.no_padding()
        self.eos_token_id = self._read_eos_token_id()

    @property
    def _full(self) -> Any:
        if self._transformers_tokenizer is None:
            from transformers import AutoTokenizer

            self._transformers_tokenizer = AutoTokenizer.from_pretrained(self._path)
        return self._transformers_tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Give the token ids of a text."""
        ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Give the text of token ids; ids outside the vocabulary are nothing."""
        text: str = self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def render_chat(self, messages: list[dict[str, Any]], settings: dict[str, Any]) -> list[int]:
        """Apply the model's chat template.

        Args:
            messages: with role and content.
            settings: further variables of the template.

        Raises:
            ValueError: the model has none, or it refuses the messages.
        """
        try:
            text = self._full.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **settings)
        except Exception as error:  # jinja raises its own tree, templates raise what they like
            raise ValueError(f"the chat template failed: {error}") from error
        return self.encode(text, add_special_tokens=False)

    def _read_eos_token_id(self) -> int | None:
        file = self._path / "tokenizer_config.json"
        content = json.loads(file.read_text()) if file.is_file() else {}
        token = content.get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        token_id: int | None = self._fast.token_to_id(token) if token else None
        return token_id


class TextStream:
    """The text of a growing answer, without cutting characters in half.

    Args:
        tokenizer: decodes.
        prompt_ids: of the request; the last few give context.
        skip_special_tokens: leave them out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_ids[-CONTEXT_TOKENS:])
        self._context_start, self._read_end = 0, len(self._ids)
        self._text = ""

    def extend(self, ids: Sequence[int], is_last: bool) -> str:
        """Add tokens and give the whole text so far; an unfinished character waits unless ``is_last``."""
        self._ids.extend(ids)
        context = self._decode(self._ids[self._context_start : self._read_end])
        fresh = self._decode(self._ids[self._context_start :])[len(context) :]
        if is_last or not fresh.endswith(INCOMPLETE):
            self._text += fresh
            self._context_start, self._read_end = self._read_end, len(self._ids)
            return self._text
        return self._text + fresh.rstrip(INCOMPLETE)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)
