"""How prompts become groups (conf/rollout)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlrecipes.config.schema.section import (
    Count,
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
    """Longest answer of one turn, tokens."""
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
    num_samples_per_prompt: Count
    """Rollouts per prompt; above 1 also gives pass@k."""
    sampling: SamplingConfig
    """How evaluation samples."""


class EnvironmentConfig(Section):
    """What the policy talks to: says what it is shown after each of its answers, or that the episode is over."""

    name: str
    """`retry`, or `module:function` of your own."""
    options: dict[str, Any]
    """Its keyword arguments."""


class GenerateConfig(Section):
    """How one rollout is made of requests; the counts also bound a function of your own."""

    name: str
    """`single_turn`, `multi_turn`, or `module:function` of your own."""
    options: dict[str, Any]
    """Keyword arguments of your own function."""
    max_turns: Count
    """Most answers in a rollout; each has its own max_new_tokens."""
    max_observation_tokens: NonNegativeInt
    """Longest text shown between two answers, tokens, the chat template's own included."""
    observation_role: Literal["user", "tool"]
    """Role of that text under the chat template."""
    environment: EnvironmentConfig | None
    """Says what that text is; null: nothing is shown after the prompt."""

    def compute_response_tokens(self, max_new_tokens: int) -> int:
        """Longest rollout without its prompt: every answer and what is shown between them.

        Args:
            max_new_tokens: of one answer.
        """
        return self.max_turns * max_new_tokens + (self.max_turns - 1) * self.max_observation_tokens


class RolloutConfig(Section):
    """How prompts become groups (conf/rollout)."""

    generate: GenerateConfig
    """How one rollout is made of requests."""
    sampling: SamplingConfig
    """How training rollouts sample."""
    evaluation: EvaluationConfig
    """How the held-out set is measured."""
    max_concurrent_requests: PositiveInt
    """Requests in flight at once, over all engines."""
    request_timeout_s: PositiveFloat
    """Longest time for one request, and for one call of an environment."""
    filters: tuple[Literal["nonzero_variance"], ...]
    """Groups to drop and replace; each drop is counted."""
    max_failed_fraction: Fraction
    """More failed rollouts than this in a step stop the run."""

    @property
    def max_generated_tokens(self) -> int:
        """Most tokens that the policy generates in a training rollout, over all its turns."""
        return self.generate.max_turns * self.sampling.max_new_tokens
