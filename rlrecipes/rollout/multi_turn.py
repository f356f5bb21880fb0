"""Rollouts of several turns. Owns when they end, and that whatever an environment does wrong is data."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass, replace

from rlrecipes.errors import RecipeError
from rlrecipes.rollout.environments import Environment, Episode, Judge
from rlrecipes.rollout.generate import Policy, start_rollout
from rlrecipes.rollout.protocols import ObservationEncoder
from rlrecipes.types import Prompt, Rollout, RolloutStatus


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Generate function: the policy and an environment take turns.

    A rollout ends COMPLETED when the environment says so or with the last turn allowed; the environment is not asked
    after that one. An answer that is cut or aborted ends it as a single turn's would: what follows such an answer would
    not be what the policy is to learn from.

    Attributes:
        policy: who answers.
        environment: what it talks to.
        name: of the environment, for reasons.
        judge: what environments may ask.
        encoder: observations as token ids.
        max_turns: most answers.
        max_observation_tokens: a longer observation fails the rollout.
        timeout_s: longest time for one call of the environment.
    """

    policy: Policy
    environment: Environment
    name: str
    judge: Judge
    encoder: ObservationEncoder
    max_turns: int
    max_observation_tokens: int
    timeout_s: float

    async def __call__(self, prompt: Prompt, sibling: int) -> Rollout:
        """Run one rollout.

        Args:
            prompt: what to ask.
            sibling: number within the group.

        Returns:
            A rollout without reward; its text is the last answer.
        """
        rollout = await self.policy.extend(start_rollout(prompt, sibling), prompt.token_ids)
        answers: tuple[str, ...] = (rollout.text,)
        observations: tuple[str, ...] = ()
        while rollout.status is RolloutStatus.COMPLETED and len(rollout.turns) < self.max_turns:
            limit = asyncio.timeout(self.timeout_s)
            try:
                async with limit:
                    text = await self._ask(Episode(rollout, answers, observations, self.judge))
                if text is None:
                    return rollout
                observation_ids = self._encode(text, rollout)
            # Whatever an environment (often a user's) raises speaks of this one rollout.
            except Exception as error:
                problem = f"took longer than {self.timeout_s:g} s" if limit.expired() else describe(error)
                return replace(rollout, status=RolloutStatus.FAILED, reason=f"environment {self.name}: {problem}")
            rollout = await self.policy.extend(rollout, observation_ids)
            answers, observations = (*answers, rollout.text), (*observations, text)
        return rollout

    async def _ask(self, episode: Episode) -> str | None:
        said = self.environment(episode)
        text = await said if inspect.isawaitable(said) else said
        if text is not None and not isinstance(text, str):
            raise TypeError(f"gave {text!r}, neither text nor None")
        return text

    def _encode(self, text: str, rollout: Rollout) -> tuple[int, ...]:
        ids = self.encoder.encode(text, rollout.turns[-1].completion.token_ids)
        if len(ids) > self.max_observation_tokens:
            limit = f"rollout.generate.max_observation_tokens={self.max_observation_tokens}"
            raise ValueError(f"its observation has {len(ids)} tokens, more than {limit}")
        return ids


def describe(error: Exception) -> str:
    """An error as the reason of a failed rollout.

    Args:
        error: raised by a part that speaks of one rollout.
    """
    return error.problems[0].problem if isinstance(error, RecipeError) else f"{type(error).__name__}: {error}"
