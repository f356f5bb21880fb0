"""One turn, and the rollout that has no other. Owns seeds, request ids and how engine answers become statuses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from rlrecipes.errors import EngineError
from rlrecipes.rollout.protocols import GenerateClient, Tokenizer
from rlrecipes.types import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_STOP,
    Completion,
    Prompt,
    Rollout,
    RolloutStatus,
    SamplingParams,
    Turn,
)

_STATUSES = {
    FINISH_STOP: RolloutStatus.COMPLETED,
    FINISH_LENGTH: RolloutStatus.TRUNCATED,
    FINISH_ABORT: RolloutStatus.ABORTED,
}


def compute_rollout_seed(run_seed: int, prompt_index: int, sibling: int, turn: int = 0) -> int:
    """Seed of one turn of one rollout: the same in every run, process and release.

    Args:
        run_seed: of the run.
        prompt_index: ``Prompt.index``.
        sibling: ``Rollout.sibling``.
        turn: 0 is the first.

    Returns:
        A number in [0, 2**31), the range every engine takes.
    """
    name = f"{run_seed}/{prompt_index}/{sibling}" + (f"/{turn}" if turn else "")
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "big") >> 1


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy as rollouts ask it.

    Attributes:
        client: the way to its engines.
        tokenizer: decodes answers for verifiers and environments; special tokens are left out.
        sampling: how to sample; the seed of each request is its turn's own.
        seed: of the run.
        run_id: first part of every request id, ``{run_id}-{prompt index}-{sibling}.``, with ``-{turn}`` before the dot
            from the second turn on.
    """

    client: GenerateClient
    tokenizer: Tokenizer
    sampling: SamplingParams
    seed: int
    run_id: str

    async def extend(self, rollout: Rollout, observation_ids: Sequence[int]) -> Rollout:
        """Show the policy an observation and append its answer as a turn; token ids so far are sent as they are.

        Args:
            rollout: so far, without turns at first; one that did not end its last answer by itself is over.
            observation_ids: what it is shown next: the prompt in the first turn.

        Returns:
            The rollout with one more turn and the answer's text, without reward; one that is over as it is. FAILED,
            with the reason, when no engine answered or the answer cannot be trained: no token, a log probability that
            is not finite, an unknown finish reason.
        """
        if rollout.status is not RolloutStatus.COMPLETED:
            return rollout
        prompt, sibling, number = rollout.prompt, rollout.sibling, len(rollout.turns)
        key = f"{self.run_id}-{prompt.index}"
        try:
            completion = await self.client.generate(
                input_ids=(*rollout.token_ids, *observation_ids),
                sampling=replace(self.sampling, seed=compute_rollout_seed(self.seed, prompt.index, sibling, number)),
                # SGLang aborts every request whose id begins with the one it is given: the dot ends it.
                request_id=f"{key}-{sibling}-{number}." if number else f"{key}-{sibling}.",
                # Siblings share their prompt, turns what came before: one engine has it in its prefix cache.
                routing_key=key,
            )
        except EngineError as error:
            reason = str(error.problems[0].problem)
            return replace(rollout, text="", status=RolloutStatus.FAILED, reason=reason)
        turns = (*rollout.turns, Turn(tuple(observation_ids), completion))
        problem = _find_problem(completion)
        if problem:
            return replace(rollout, turns=turns, text="", status=RolloutStatus.FAILED, reason=problem)
        text = self.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
        status = _STATUSES[completion.finish_reason]
        reason = "the engine aborted it" if status is RolloutStatus.ABORTED else ""
        return replace(rollout, turns=turns, text=text, status=status, reason=reason)


def start_rollout(prompt: Prompt, sibling: int) -> Rollout:
    """A rollout before its first turn.

    Args:
        prompt: what to ask.
        sibling: number within the group.
    """
    return Rollout(prompt, sibling, (), "", RolloutStatus.COMPLETED)


class SingleTurn:
    """Generate function: one prompt, one answer.

    Args:
        policy: who is asked.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    async def __call__(self, prompt: Prompt, sibling: int) -> Rollout:
        """Run one rollout.

        Args:
            prompt: what to ask.
            sibling: number within the group.

        Returns:
            As :meth:`Policy.extend`.
        """
        return await self._policy.extend(start_rollout(prompt, sibling), prompt.token_ids)


def _find_problem(completion: Completion) -> str:
    if completion.finish_reason not in _STATUSES:
        return f"the engine gave the unknown finish reason {completion.finish_reason!r}"
    if not completion.token_ids and completion.finish_reason != FINISH_ABORT:
        return "the engine gave no token"
    if not all(map(math.isfinite, completion.rollout_logprobs)):
        return "the engine gave a log probability that is not finite"
    return ""
