"""Generate functions by name. Owns the table, and the check of what a function of the user's own returns."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rlrecipes.config.schema import RolloutConfig
from rlrecipes.custom import load_custom
from rlrecipes.plan.rules.turns import ENVIRONMENT, ENVIRONMENTS, GENERATE
from rlrecipes.rollout.environments import Judge
from rlrecipes.rollout.generate import Policy, SingleTurn
from rlrecipes.rollout.groups import is_answered
from rlrecipes.rollout.multi_turn import MultiTurn, describe
from rlrecipes.rollout.protocols import GenerateFunction, ObservationEncoder
from rlrecipes.types import Prompt, Rollout, RolloutStatus

type GenerateBuilder = Callable[[Policy], GenerateFunction]
"""Training and evaluation ask the policy in ways of their own, and run rollouts in the same."""


@dataclass(frozen=True, slots=True)
class CustomGenerate:
    """A generate function of the user's own; what it raises, or returns against its contract, is data.

    Attributes:
        function: of (policy, prompt, sibling).
        name: for reasons.
        policy: who answers.
        max_response_tokens: longest rollout without its prompt.
    """

    function: Callable[[Policy, Prompt, int], Awaitable[object]]
    name: str
    policy: Policy
    max_response_tokens: int

    async def __call__(self, prompt: Prompt, sibling: int) -> Rollout:
        """Run one rollout.

        Args:
            prompt: what to ask.
            sibling: number within the group.

        Returns:
            What the function gave, or a FAILED rollout that says what was wrong with it.
        """
        try:
            rollout = await self.function(self.policy, prompt, sibling)
            if not isinstance(rollout, Rollout):
                raise TypeError(f"gave {rollout!r}, not a Rollout")
            problem = self._find_problem(rollout, prompt, sibling)
            if not problem:
                return rollout
        # As with an environment: it speaks of this one rollout.
        except Exception as error:
            problem = describe(error)
        return Rollout(prompt, sibling, (), "", RolloutStatus.FAILED, reason=f"{self.name}: {problem}")

    def _find_problem(self, rollout: Rollout, prompt: Prompt, sibling: int) -> str:
        if (rollout.prompt, rollout.sibling) != (prompt, sibling):
            return "gave the rollout of another prompt or sibling"
        if is_answered(rollout) and not rollout.num_response_tokens:
            return "gave an answered rollout without a generated token"
        num_tokens = len(rollout.token_ids) - len(prompt.token_ids)
        if num_tokens > self.max_response_tokens:
            return f"gave {num_tokens} tokens after the prompt; rollout.generate allows {self.max_response_tokens}"
        return ""


def build_generate(config: RolloutConfig, *, judge: Judge, encoder: ObservationEncoder) -> GenerateBuilder:
    """Find the generate function of a recipe, and everything that can be wrong with it before a run starts.

    Args:
        config: the recipe's section, which ``plan/rules/turns.py`` accepts.
        judge: what environments may ask.
        encoder: observations as token ids.

    Raises:
        ConfigError: a function cannot be imported or does not fit, or the chat template rewrites answers.
    """
    generate = config.generate
    if ":" in generate.name:
        function = load_custom(GENERATE, generate.name, generate.options)
        bound = functools.partial(function, **generate.options)
        return lambda policy: CustomGenerate(
            bound, generate.name, policy, generate.compute_response_tokens(policy.sampling.max_new_tokens)
        )
    if generate.environment is None:
        return SingleTurn
    encoder.check()
    name, options = generate.environment.name, generate.environment.options
    environment = functools.partial(load_custom(ENVIRONMENT, ENVIRONMENTS.get(name, name), options), **options)
    return lambda policy: MultiTurn(
        policy,
        environment,
        name=name,
        judge=judge,
        encoder=encoder,
        max_turns=generate.max_turns,
        max_observation_tokens=generate.max_observation_tokens,
        timeout_s=config.request_timeout_s,
    )
