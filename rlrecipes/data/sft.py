"""Prompts with the response to imitate, as an endless stream of samples. Owns the loss mask of SFT."""

from __future__ import annotations

import re
from pathlib import Path

from rlrecipes.data.encoding import PromptEncoder
from rlrecipes.data.order import RowStream
from rlrecipes.data.rows import ProblemList, Row, RowKeys, build_rows, run_checked, to_field
from rlrecipes.errors import DataError
from rlrecipes.types import Sample

_LAST_TAG = re.compile(r"<[^<>\s]+>(?=\s*$)")
"""What a chat template may leave open for the answer, such as <think>."""


class SftSource(RowStream[tuple[tuple[int, ...], tuple[int, ...]]]):
    """Samples of one file, epoch after epoch, each epoch in its own order.

    The prompt is encoded exactly as for a rollout, the response by itself, and the end-of-sequence token follows: what
    is imitated is, token by token, what an engine would have had to generate. Response and end are trained.

    Args:
        path: JSONL; each line an object.
        encoder: renders and tokenizes prompts; its tokenizer also encodes responses.
        keys: where the prompt and the response stand in a row.
        seed: of the run; decides the order.
        should_shuffle: False keeps the file's order.
        max_rows: only the first so many rows; None takes all.
        max_sample_tokens: a longer prompt and response together are an error of the data.

    Raises:
        DataError: the file is missing, empty, or has bad lines (all reported together), or the tokenizer has no
            end-of-sequence token.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        encoder: PromptEncoder,
        keys: RowKeys,
        seed: int,
        should_shuffle: bool,
        max_rows: int | None = None,
        max_sample_tokens: int,
    ) -> None:
        self._encoder = encoder
        self._max_sample_tokens = max_sample_tokens
        if encoder.tokenizer.eos_token_id is None:
            raise DataError("tokenizer", "has no end-of-sequence token, so no response can end", "give it an eos_token")
        problems = ProblemList(Path(path))
        rows = build_rows(problems.path, problems)[:max_rows]
        texts = encoder.to_texts(rows, keys.prompt, problems)
        prompt_ids = encoder.to_token_ids(texts, problems)

        def convert(row: Row, problems: ProblemList) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
            response = to_field(row, keys.response, (str,), "a string", problems)
            if response is None or row.line not in prompt_ids:
                return None
            last_tag = _LAST_TAG.search(texts[row.line]) if encoder.apply_chat_template else None
            if last_tag and response.lstrip().startswith(last_tag[0]):
                problem = f"the response begins with {last_tag[0]}, with which the chat template has ended the prompt"
                problems.add(row.line, problem, "leave it out of the response: an engine would not generate it again")
                return None
            return self._join(prompt_ids[row.line], response, row.line, problems)

        converted = [row for _, row in run_checked(rows, convert, problems)]
        super().__init__(converted, seed=seed, should_shuffle=should_shuffle)

    def _join(
        self, prompt_ids: tuple[int, ...], response: str, line: int, problems: ProblemList
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        tokenizer = self._encoder.tokenizer
        own_ids = tokenizer(response, add_special_tokens=False)["input_ids"]
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in own_ids:
            problems.add(line, "the response has text that the tokenizer does not know", "use the characters it knows")
            return None
        response_ids = (*own_ids, tokenizer.eos_token_id)
        num_tokens = len(prompt_ids) + len(response_ids)
        if num_tokens > self._max_sample_tokens:
            problem = f"prompt and response have {num_tokens} tokens, more than {self._max_sample_tokens}"
            problems.add(line, problem, "shorten the response, or raise the limit")
            return None
        return prompt_ids, response_ids

    def sample(self, index: int) -> Sample:
        """Sample at a position of the endless stream.

        Args:
            index: 0 or more; ``index // num_rows`` is the epoch.
        """
        prompt_ids, response_ids = self.row(index)
        return Sample(
            token_ids=prompt_ids + response_ids,
            loss_mask=(False,) * len(prompt_ids) + (True,) * len(response_ids),
            rollout_logprobs=None,
            prompt_index=index,
            sibling=0,
        )
