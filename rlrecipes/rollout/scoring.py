"""What other served models say of generated tokens. Owns which tokens they are asked about, and what a failure means.

They are asked while the group's rewards are computed. A rollout that one of them could not score is data: it becomes
FAILED with the reason, is counted as failed, and is never trained.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from rlrecipes.errors import EngineError
from rlrecipes.rollout.groups import cancel_all, is_answered, run_together
from rlrecipes.rollout.protocols import Reward, ScoreClient
from rlrecipes.types import Group, Rollout, RolloutStatus, TokenScores, Turn

Role = Literal["reference", "teacher"]


@dataclass(frozen=True, slots=True)
class Scorer:
    """A served model that is asked about tokens.

    Attributes:
        client: the way to it.
        num_top: likeliest tokens that it names at each place; 0 for none.
        vocab_size: of the model; None where it is not known. SGLang's scheduler dies over a token beyond it.
    """

    client: ScoreClient
    num_top: int = 0
    vocab_size: int | None = None


class ScoringReward:
    """Rewards a group and has its tokens scored, side by side.

    Args:
        reward: of the group.
        scorers: who is asked, by what it is to the policy.
        run_id: first part of every request id.
    """

    def __init__(self, reward: Reward, scorers: Mapping[Role, Scorer], *, run_id: str) -> None:
        self._reward = reward
        self._scorers = scorers
        self._run_id = run_id
        self._weight_versions: dict[Role, int] = {}

    async def reward_group(self, group: Group) -> Group:
        """Reward and score.

        Args:
            group: freshly generated.

        Returns:
            The same rollouts in the same order, each with a reward; the answered ones with their scores, or FAILED.
        """
        answered = [rollout for rollout in group.rollouts if is_answered(rollout)]
        rewarding = asyncio.ensure_future(self._reward.reward_group(group))
        asking = asyncio.ensure_future(
            run_together(self._ask(role, rollout) for rollout in answered for role in self._scorers)
        )
        try:
            rewarded, found = await asyncio.gather(rewarding, asking)
        finally:
            await cancel_all([rewarding, asking])
        outcomes = iter(found)
        by_sibling = {rollout.sibling: [next(outcomes) for _ in self._scorers] for rollout in answered}
        rollouts = [self._fill(rollout, by_sibling.get(rollout.sibling, ())) for rollout in rewarded.rollouts]
        return dataclasses.replace(rewarded, rollouts=tuple(rollouts))

    async def _ask(self, role: Role, rollout: Rollout) -> TokenScores | str:
        """Scores of all tokens after the first observation, or why there are none."""
        scorer, prompt = self._scorers[role], rollout.prompt
        ids = rollout.token_ids
        if scorer.vocab_size is not None and max(ids) >= scorer.vocab_size:
            return f"the {role} has no token {max(ids)}: its vocabulary ends at {scorer.vocab_size}"
        try:
            scores = await scorer.client.score(
                input_ids=ids,
                start=len(rollout.turns[0].observation_ids),
                num_top=scorer.num_top,
                request_id=f"{self._run_id}-{role}-{prompt.index}-{rollout.sibling}.",
                routing_key=f"{self._run_id}-{prompt.index}",  # siblings find their prompt in one engine's cache
            )
        except EngineError as error:
            return f"the {role} gave no log probabilities: {error.problems[0].problem}"
        first = self._weight_versions.setdefault(role, scores.weight_version)
        if scores.weight_version != first:
            return f"the {role}'s weights changed from version {first} to {scores.weight_version}"
        return scores

    def _fill(self, rollout: Rollout, outcomes: Sequence[TokenScores | str]) -> Rollout:
        if not is_answered(rollout):  # the reward has failed it meanwhile
            return rollout
        for role, outcome in zip(self._scorers, outcomes, strict=True):
            if isinstance(outcome, str):
                return dataclasses.replace(rollout, status=RolloutStatus.FAILED, reward=0.0, reason=outcome)
            rollout = dataclasses.replace(rollout, turns=_with_scores(rollout.turns, role, outcome))
        return rollout


def _with_scores(turns: Sequence[Turn], role: Role, scores: TokenScores) -> tuple[Turn, ...]:
    """Each turn with the scores of what was generated in it; those of later observations are left out."""
    sizes = [len(turn.observation_ids) + len(turn.completion.token_ids) for turn in turns]
    first = len(turns[0].observation_ids)
    ends = [end - first for end in accumulate(sizes)]
    filled = []
    for turn, end in zip(turns, ends, strict=True):
        part = slice(end - len(turn.completion.token_ids), end)
        own = dataclasses.replace(
            scores,
            logprobs=scores.logprobs[part],
            topk_ids=scores.topk_ids[part],
            topk_logprobs=scores.topk_logprobs[part],
        )
        if role == "teacher":
            completion = dataclasses.replace(turn.completion, teacher=own)
        else:
            completion = dataclasses.replace(turn.completion, reference=own)
        filled.append(dataclasses.replace(turn, completion=completion))
    return tuple(filled)
