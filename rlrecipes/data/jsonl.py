"""Prompts of a JSON-lines file as an endless stream. Owns the file's rows; the cursor is the collector's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlrecipes.data.encoding import PromptEncoder
from rlrecipes.data.order import RowStream
from rlrecipes.data.rows import ProblemList, Row, RowKeys, build_rows, run_checked, to_field
from rlrecipes.types import Prompt


@dataclass(frozen=True, slots=True)
class _PromptRow:
    token_ids: tuple[int, ...]
    text: str
    label: str
    metadata: Mapping[str, Any]


class JsonlPromptSource(RowStream[_PromptRow]):
    """Prompts of one file, epoch after epoch, each epoch in its own order.

    ``prompt(index)`` is a pure function of the file, the seed and the index, so that whoever keeps an index keeps the
    whole state. The file is read, checked and tokenized once, when built.

    Args:
        path: JSONL; each line an object.
        encoder: renders and tokenizes prompts.
        keys: where the prompt, the label and the metadata stand in a row; metadata may be absent, labels not.
        seed: of the run; decides the order.
        should_shuffle: False keeps the file's order.
        max_rows: only the first so many rows; None takes all.
        name: of the dataset, for metrics.

    Raises:
        DataError: the file is missing, empty, or has bad lines (all reported together).
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
        name: str = "",
    ) -> None:
        self._name = name
        problems = ProblemList(Path(path))
        rows = build_rows(problems.path, problems)[:max_rows]
        texts = encoder.to_texts(rows, keys.prompt, problems)
        token_ids = encoder.to_token_ids(texts, problems)

        def convert(row: Row, problems: ProblemList) -> _PromptRow | None:
            label = to_field(row, keys.label, (str, int, float), "a string or a number", problems)
            metadata = (
                to_field(row, keys.metadata, (dict,), "an object", problems) if keys.metadata in row.fields else {}
            )
            if row.line not in token_ids or label is None or metadata is None:
                return None
            return _PromptRow(token_ids[row.line], texts[row.line], str(label), metadata)

        converted = [row for _, row in run_checked(rows, convert, problems)]
        super().__init__(converted, seed=seed, should_shuffle=should_shuffle)

    def prompt(self, index: int) -> Prompt:
        """Prompt at a position of the endless stream.

        Args:
            index: 0 or more; ``index // num_rows`` is the epoch.
        """
        row = self.row(index)
        return Prompt(index, row.token_ids, row.text, row.label, row.metadata, self._name)
