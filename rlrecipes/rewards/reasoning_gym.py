"""Answers to reasoning-gym tasks, judged by each task's own verifier. Owns nothing but the way there.

Rows must carry what ``data.reasoning_tasks`` writes under metadata: ``dataset`` and ``entry``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

from rlrecipes.rewards.extraction import Extraction, check_extraction, extract_answer
from rlrecipes.rewards.verifiers import RewardResult, Verifier
from rlrecipes.types import Rollout


def run_import() -> None:
    """Import reasoning-gym, which takes about 4 s, so that no rollout's time includes it."""
    with warnings.catch_warnings():
        # One of its dependencies makes Python warn about its syntax, the first time it is compiled.
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym  # noqa: F401


@lru_cache
def _load_task_verifier(dataset: str) -> Callable[..., float]:
    from reasoning_gym import get_score_answer_fn

    return cast("Callable[..., float]", get_score_answer_fn(dataset))


def build_reasoning_gym_verifier(
    *, extraction: Extraction = "whole", marker: str = "", should_give_partial: bool = False
) -> Verifier:
    """Build a verifier that asks the task's own.

    Args:
        extraction: where the answer stands in the response.
        marker: for ``after_marker``.
        should_give_partial: False counts only a full reward (1.0). Many tasks give a part of it for a text that merely
            contains the answer, or even for a wrong one in the right form, which a policy learns to exploit.

    Raises:
        ConfigError: a bad option.
    """
    check_extraction(extraction, marker)

    def verify(rollout: Rollout) -> RewardResult:
        metadata: Any = rollout.prompt.metadata
        if "dataset" not in metadata or "entry" not in metadata:
            raise ValueError("the prompt's metadata lacks dataset and entry, which data.tasks writes")
        answer = extract_answer(rollout.text, extraction=extraction, marker=marker)
        full = float(_load_task_verifier(metadata["dataset"])(answer, metadata["entry"]))
        value = full if should_give_partial else float(full >= 1.0)
        return RewardResult(value, {"task_reward": full})

    return verify
