"""How prompts become groups (conf/rollout)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlrecipes.config.schema.section import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class SamplingConfig(Section):
    """How engines sample; every field is sent with every request."""

    temperature: NonNegativeFloat
    """Divides the logits; 0 is greedy (evaluation only)."""
    top_p: Annotated[float, Field(gt=0, le=1)]
    """Nucleus; 1 keeps all."""
    top_k: int
    """Most likely tokens kept; -1 keeps all."""
    max_new_tokens: PositiveInt
    """Longest response, tokens."""
    min_new_tokens: NonNegativeInt
    """No stop before so many tokens."""
    stop: tuple[str, ...]
    """Strings that end a response."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end it."""
    ignore_eos: bool
    """Whether the end-of-sequence token does not."""


class EvaluationConfig(Section):
    """Held-out evaluation."""

    num_prompts: PositiveInt
    """The first so many rows of data.eval_path."""
    num_samples_per_prompt: PositiveInt
    """Rollouts per prompt; above 1 also gives pass@k."""
    sampling: SamplingConfig
    """How evaluation samples."""


class RolloutConfig(Section):
    """How prompts become groups (conf/rollout)."""

    sampling: SamplingConfig
    """How training rollouts sample."""
    evaluation: EvaluationConfig
    """How the held-out set is measured."""
    max_concurrent_requests: PositiveInt
    """Requests in flight at once, over all engines."""
    request_timeout_s: PositiveFloat
    """Longest time for one request."""
    filters: tuple[Literal["nonzero_variance"], ...]
    """Groups to drop and replace; each drop is counted."""
    max_failed_fraction: Fraction
    """More failed rollouts than this in a step stop the run."""
