"""Groups as plain JSON-able data and back, every float exact. Owns the codec; refuses files."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlrecipes.errors import CheckpointError
from rlrecipes.types import Completion, Group, Prompt, Rollout, RolloutStatus, TokenScores, Turn

_RECORD_VERSION = 1


def to_record(group: Group) -> dict[str, Any]:
    """Convert a group to dicts, lists, strings and numbers; JSON text of it gives every float back exactly.

    Args:
        group: its prompt's metadata must itself be JSON-able, as what came from a JSONL file is.
    """
    prompt = group.prompt
    return {
        "version": _RECORD_VERSION,
        "prompt": {
            "index": prompt.index,
            "token_ids": list(prompt.token_ids),
            "text": prompt.text,
            "label": prompt.label,
            "metadata": dict(prompt.metadata),
            "source": prompt.source,
        },
        "rollouts": [_to_rollout_record(rollout) for rollout in group.rollouts],
    }


def _to_rollout_record(rollout: Rollout) -> dict[str, Any]:
    return {
        "sibling": rollout.sibling,
        "turns": [
            {
                "observation_ids": list(turn.observation_ids),
                "token_ids": list(turn.completion.token_ids),
                "rollout_logprobs": list(turn.completion.rollout_logprobs),
                "finish_reason": turn.completion.finish_reason,
                "weight_version": turn.completion.weight_version,
                "num_prompt_tokens": turn.completion.num_prompt_tokens,
                "num_cached_tokens": turn.completion.num_cached_tokens,
                "duration_s": turn.completion.duration_s,
                "reference": _to_scores_record(turn.completion.reference),
                "teacher": _to_scores_record(turn.completion.teacher),
            }
            for turn in rollout.turns
        ],
        "text": rollout.text,
        "status": rollout.status.value,
        "reward": rollout.reward,
        "reason": rollout.reason,
        "reward_parts": dict(rollout.reward_parts),
    }


def _to_scores_record(scores: TokenScores | None) -> dict[str, Any] | None:
    return None if scores is None else dataclasses.asdict(scores)


def to_group(record: dict[str, Any]) -> Group:
    """Convert back what ``to_record`` gave.

    Args:
        record: the record.

    Raises:
        CheckpointError: it is of another version, or not such a record.
    """
    if record.get("version") != _RECORD_VERSION:
        problem = f"a group record has version {record.get('version')!r}, this release reads {_RECORD_VERSION}"
        raise CheckpointError("data.records", problem, "resume with the release that wrote it, or start afresh")
    try:
        prompt = Prompt(**{**record["prompt"], "token_ids": tuple(record["prompt"]["token_ids"])})
        return Group(prompt, tuple(_to_rollout(prompt, rollout) for rollout in record["rollouts"]))
    except (KeyError, TypeError, ValueError) as error:
        problem = f"a group record is damaged: {type(error).__name__}: {error}"
        raise CheckpointError("data.records", problem, "resume from an earlier checkpoint") from error


def _to_rollout(prompt: Prompt, record: dict[str, Any]) -> Rollout:
    fields = dict(record)
    fields["turns"] = tuple(_to_turn(turn) for turn in record["turns"])
    fields["status"] = RolloutStatus(record["status"])
    return Rollout(prompt=prompt, **fields)


def _to_turn(record: dict[str, Any]) -> Turn:
    fields = dict(record)
    observation_ids = tuple(fields.pop("observation_ids"))
    fields["token_ids"] = tuple(record["token_ids"])
    fields["rollout_logprobs"] = tuple(record["rollout_logprobs"])
    for name in ("reference", "teacher"):
        fields[name] = _to_scores(record.get(name))
    return Turn(observation_ids, Completion(**fields))


def _to_scores(record: dict[str, Any] | None) -> TokenScores | None:
    if record is None:
        return None
    topk = {name: tuple(map(tuple, record[name])) for name in ("topk_ids", "topk_logprobs")}
    return TokenScores(tuple(record["logprobs"]), **topk, weight_version=record["weight_version"])
