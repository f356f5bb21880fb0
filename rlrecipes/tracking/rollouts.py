"""Rollouts kept for people: a few of every step and of every evaluation, and why others failed. Owns rollouts.jsonl.

No run depends on it: a disk that refuses costs a warning.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rlrecipes.tracking.log import write_atomically
from rlrecipes.tracking.upload_state import LOGGER, shorten
from rlrecipes.types import Group, Rollout, RolloutStatus

ROLLOUTS_FILE = "rollouts.jsonl"
TABLE_FILE = "rollouts.json"
MAX_TEXT_CHARACTERS = 8000
MAX_TABLE_ROWS = 500

Purpose = Literal["train", "eval"]
Pick = Literal["first", "best", "worst"]
_NUM_KEPT = {"train": 1, "eval": 3}
"""Purpose -> rollouts of each pick: three of them a step, nine an evaluation."""


@dataclass(frozen=True, slots=True)
class KeptRollout:
    """One rollout, as text.

    Attributes:
        pick: why it was kept: of the first prompts, of the highest or of the lowest rewards.
        prompt_index: ``Prompt.index``.
        prompt, response: what was asked and the last turn's answer; cut visibly.
        label: what a verifier compares with; empty where there is none.
        reward: its reward.
        status, reason: how it ended, and why where it failed.
        num_turns, num_response_tokens: generated.
    """

    pick: Pick
    prompt_index: int
    prompt: str
    response: str
    label: str
    reward: float
    status: str
    reason: str
    num_turns: int
    num_response_tokens: int


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """What one step or one evaluation leaves: a line of rollouts.jsonl.

    Attributes:
        step: completed when it was logged.
        purpose: training or evaluation.
        dataset: that was asked.
        num_rollouts: of the collection, those of dropped groups included.
        failures: reason -> of these, those that failed or were aborted for it.
        filtered: reason -> groups dropped for it.
        kept: a few of those that no filter dropped.
    """

    step: int
    purpose: Purpose
    dataset: str
    num_rollouts: int
    failures: Mapping[str, int]
    filtered: Mapping[str, int]
    kept: tuple[KeptRollout, ...]


def build_record(
    step: int,
    purpose: Purpose,
    dataset: str,
    groups: Sequence[Group],
    filtered: Mapping[str, int] | None = None,
    dropped: Sequence[Group] = (),
) -> RolloutRecord:
    """Choose what is kept of a collection: the first rollouts, then of the others the best, then the worst.

    Args:
        step: completed.
        purpose: training or evaluation.
        dataset: that was asked.
        groups: rewarded; one or more.
        filtered: reason -> groups dropped for it.
        dropped: these groups: their failures count too.
    """
    rollouts = [rollout for group in (*groups, *dropped) for rollout in group.rollouts]
    bad = [r for r in rollouts if r.status in (RolloutStatus.FAILED, RolloutStatus.ABORTED)]
    failures = Counter(shorten(r.reason or str(r.status), 500, "cut") for r in bad)
    return RolloutRecord(
        step, purpose, dataset, len(rollouts), dict(failures), dict(filtered or {}), tuple(_choose(groups, purpose))
    )


def _choose(groups: Sequence[Group], purpose: Purpose) -> Iterator[KeptRollout]:
    num = _NUM_KEPT[purpose]
    first = [group.rollouts[0] for group in groups[:num]]
    rest = [rollout for group in groups for rollout in group.rollouts if not any(rollout is f for f in first)]
    ranked = sorted(rest, key=lambda rollout: -(rollout.reward or 0.0))
    best, worst = ranked[:num], ranked[num:][-num:]
    picks: tuple[tuple[Pick, Sequence[Rollout]], ...] = (("first", first), ("best", best), ("worst", worst))
    for pick, chosen in picks:
        yield from (_to_kept(pick, rollout) for rollout in chosen)


def _to_kept(pick: Pick, rollout: Rollout) -> KeptRollout:
    return KeptRollout(
        pick=pick,
        prompt_index=rollout.prompt.index,
        prompt=shorten(rollout.prompt.text, MAX_TEXT_CHARACTERS, "cut"),
        response=shorten(rollout.text, MAX_TEXT_CHARACTERS, "cut"),
        label=shorten(rollout.prompt.label or "", MAX_TEXT_CHARACTERS, "cut"),
        reward=rollout.reward or 0.0,
        status=str(rollout.status),
        reason=shorten(rollout.reason, 500, "cut"),
        num_turns=len(rollout.turns),
        num_response_tokens=rollout.num_response_tokens,
    )


class RolloutLog:
    """The rollouts of one run.

    Args:
        path: the JSONL file; made when something is appended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: RolloutRecord) -> None:
        """Add one line; a disk that refuses costs a warning."""
        try:
            with self.path.open("a", encoding="utf-8", errors="replace") as file:
                file.write(json.dumps(asdict(record)) + "\n")
        except OSError as error:
            LOGGER.warning("%s: rollouts of step %d are not kept: %s", self.path, record.step, error.strerror)

    def truncate_after(self, step: int) -> None:
        """Forget later steps, and a line that a kill tore: a resumed run logs them again."""
        if not self.path.exists():
            return
        lines = [json.dumps(asdict(record)) + "\n" for record in read_rollouts(self.path) if record.step <= step]
        try:
            write_atomically(self.path, "".join(lines).encode(errors="replace"))
        except OSError as error:
            LOGGER.warning("%s: rollouts after step %d stay: %s", self.path, step, error.strerror)


def read_rollouts(path: Path) -> list[RolloutRecord]:
    """Read a log of rollouts; lines that are none, as a kill leaves them, are left out.

    Args:
        path: the JSONL file; may be missing.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = (_to_record(line) for line in lines)
    return [record for record in found if record is not None]


def _to_record(line: str) -> RolloutRecord | None:
    try:
        fields: dict[str, Any] = json.loads(line)
        kept = tuple(KeptRollout(**rollout) for rollout in fields.pop("kept"))
        return RolloutRecord(**fields, kept=kept)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def to_mlflow_table(records: Sequence[RolloutRecord]) -> tuple[str, str]:
    """The rollouts of evaluations as MLflow's tables are: pandas' split form.

    Args:
        records: of a run, oldest first.

    Returns:
        The JSON, and what it leaves out in words (empty where it has all); the newest rows are kept.
    """
    columns = ["step", "dataset", *KeptRollout.__dataclass_fields__]
    rows = [
        [record.step, record.dataset, *asdict(kept).values()]
        for record in records
        if record.purpose == "eval"
        for kept in record.kept
    ]
    left_out = len(rows) - MAX_TABLE_ROWS
    note = f"the newest {MAX_TABLE_ROWS} of {len(rows)} rows; all are in {ROLLOUTS_FILE}" if left_out > 0 else ""
    return json.dumps({"columns": columns, "data": rows[-MAX_TABLE_ROWS:]}), note
