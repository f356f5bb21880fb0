"""Prompts as token ids. Owns the chat template and the length rule; refuses files and order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlrecipes.data.rows import ProblemList, Row, to_field

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """Turns the prompts of a file into what an engine receives.

    Without the chat template a prompt is encoded as an engine encodes plain text (with the tokenizer's own special
    tokens, such as a first BOS). With it, a string counts as one user message, and the template alone decides.

    Attributes:
        tokenizer: a transformers tokenizer.
        apply_chat_template: whether prompts go through its chat template.
        max_prompt_tokens: a longer prompt is an error of the data.
    """

    tokenizer: PreTrainedTokenizerFast
    apply_chat_template: bool
    max_prompt_tokens: int

    def to_texts(self, rows: Sequence[Row], key: str, problems: ProblemList) -> dict[int, str]:
        """Render the prompt of each row.

        Args:
            rows: of the file.
            key: of the prompt: a string, or a list of messages with ``role`` and ``content``.
            problems: where bad rows are noted.

        Returns:
            Line number -> text, without the bad rows.
        """
        texts = {row.line: self._render(row, key, problems) for row in rows}
        return {line: text for line, text in texts.items() if text is not None}

    def to_token_ids(self, texts: dict[int, str], problems: ProblemList) -> dict[int, tuple[int, ...]]:
        """Encode all prompts in bulk.

        Args:
            texts: line number -> rendered prompt.
            problems: where empty, unknown and over-long prompts are noted.

        Returns:
            Line number -> token ids, without the bad rows.
        """
        if not texts:
            return {}
        encoded = self.tokenizer(list(texts.values()), add_special_tokens=not self.apply_chat_template)["input_ids"]
        token_ids = {line: tuple(ids) for line, ids in zip(texts, encoded, strict=True)}
        return {line: ids for line, ids in token_ids.items() if self._is_usable(line, ids, problems)}

    def _render(self, row: Row, key: str, problems: ProblemList) -> str | None:
        prompt = to_field(row, key, (str, list), "a string or a list of chat messages", problems)
        if prompt is None:
            return None
        if isinstance(prompt, list) and not _is_chat(prompt):
            problems.add(
                row.line, f"{key!r} is a list but not of chat messages", 'write [{"role": ..., "content": ...}]'
            )
            return None
        if isinstance(prompt, str) and not self.apply_chat_template:
            return prompt
        if not self.apply_chat_template:
            problems.add(row.line, f"{key!r} holds chat messages", "set apply_chat_template=true, or give a string")
            return None
        return self._render_chat(
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, row, problems
        )

    def _render_chat(self, messages: list[dict[str, Any]], row: Row, problems: ProblemList) -> str | None:
        from jinja2 import TemplateError

        try:
            text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            problems.add(row.line, f"the chat template refuses it: {error}", "mend the messages, or the template")
            return None
        return text

    def _is_usable(self, line: int, ids: tuple[int, ...], problems: ProblemList) -> bool:
        if not ids:
            problems.add(line, "the prompt is empty", "give it at least one token")
        elif len(ids) > self.max_prompt_tokens:
            fix = f"shorten it, or raise max_prompt_tokens to {len(ids)}"
            problems.add(
                line, f"the prompt has {len(ids)} tokens, more than max_prompt_tokens={self.max_prompt_tokens}", fix
            )
        elif (unknown := self.tokenizer.unk_token_id) is not None and unknown in ids:
            problems.add(line, "the prompt has text that the tokenizer does not know", "use the characters it knows")
        else:
            return True
        return False


def _is_chat(messages: list[Any]) -> bool:
    return bool(messages) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
        for message in messages
    )
