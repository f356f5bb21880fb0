"""One rollout of a single turn. Owns its seed, its request id and how engine answers become statuses."""

from __future__ import annotations

import math
from dataclasses import replace
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


def compute_rollout_seed(run_seed: int, prompt_index: int, sibling: int) -> int:
    """Seed of one rollout: the same in every run, process and release.

    Args:
        run_seed: of the run.
        prompt_index: ``Prompt.index``.
        sibling: ``Rollout.sibling``.

    Returns:
        A number in [0, 2**31), the range every engine takes.
    """
    name = f"{run_seed}/{prompt_index}/{sibling}".encode()
    return int.from_bytes(blake2b(name, digest_size=4).digest(), "big") >> 1


class SingleTurn:
    """Generate function: one prompt, one answer.

    Args:
        client: the way to the engines.
        tokenizer: decodes the answer for verifiers; special tokens are left out.
        sampling: how to sample; the seed of each request is its rollout's own.
        seed: of the run.
        run_id: first part of every request id, ``{run_id}-{prompt index}-{sibling}.``
    """

    def __init__(
        self, client: GenerateClient, *, tokenizer: Tokenizer, sampling: SamplingParams, seed: int, run_id: str
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._seed = seed
        self._run_id = run_id

    async def __call__(self, prompt: Prompt, sibling: int) -> Rollout:
        """Run one rollout.

        Args:
            prompt: what to ask.
            sibling: number within the group.

        Returns:
            A rollout without reward. FAILED, with the reason, when no engine answered or the answer cannot be trained:
            no token, a log probability that is not finite, an unknown finish reason.
        """
        try:
            completion = await self._client.generate(
                input_ids=prompt.token_ids,
                sampling=replace(self._sampling, seed=compute_rollout_seed(self._seed, prompt.index, sibling)),
                # SGLang aborts every request whose id begins with the one it is given: the dot ends it.
                request_id=f"{self._run_id}-{prompt.index}-{sibling}.",
                # Siblings share their prompt: on one engine, all but the first find it in the prefix cache.
                routing_key=f"{self._run_id}-{prompt.index}",
            )
        except EngineError as error:
            return Rollout(prompt, sibling, (), "", RolloutStatus.FAILED, reason=str(error.problems[0].problem))
        turn = Turn(prompt.token_ids, completion)
        problem = _find_problem(completion)
        if problem:
            return Rollout(prompt, sibling, (turn,), "", RolloutStatus.FAILED, reason=problem)
        text = self._tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
        status = _STATUSES[completion.finish_reason]
        reason = "the engine aborted it" if status is RolloutStatus.ABORTED else ""
        return Rollout(prompt, sibling, (turn,), text, status, reason=reason)


def _find_problem(completion: Completion) -> str:
    if completion.finish_reason not in _STATUSES:
        return f"the engine gave the unknown finish reason {completion.finish_reason!r}"
    if not completion.token_ids and completion.finish_reason != FINISH_ABORT:
        return "the engine gave no token"
    if not all(map(math.isfinite, completion.rollout_logprobs)):
        return "the engine gave a log probability that is not finite"
    return ""
