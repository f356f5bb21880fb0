"""What the policy talks to between its answers. Owns what an environment sees and says, and the one that comes along.

An environment is a function of an Episode and of its own options: a coroutine function, or a plain one that is quick,
for it runs on the event loop. It returns what the policy is shown next, or None when the episode is over, and keeps
nothing between calls: an Episode holds all that was said, so that a resumed run repeats it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rlrecipes.errors import RunError
from rlrecipes.rollout.protocols import Reward
from rlrecipes.types import Group, Rollout, RolloutStatus

type Judge = Callable[[Rollout], Awaitable[float]]
"""Reward of a rollout as it stands, by the recipe's own verifier; raises RunError where that fails."""
type Environment = Callable[[Episode], str | None | Awaitable[str | None]]
"""Gives the text that the policy is shown next; None: the episode is over."""


@dataclass(frozen=True, slots=True)
class Episode:
    """A rollout as its environment sees it, after an answer that ended by itself.

    Attributes:
        rollout: so far; ``rollout.text`` is the last answer, ``rollout.prompt`` has label and metadata.
        answers: of every turn, as text.
        observations: shown between them, as text; one fewer.
        judge: the recipe's reward, for whoever wants to know it of the last answer.
    """

    rollout: Rollout
    answers: tuple[str, ...]
    observations: tuple[str, ...]
    judge: Judge


def build_judge(reward: Reward) -> Judge:
    """The recipe's reward as environments may ask it.

    Args:
        reward: of groups; a judged rollout is a group of one.
    """

    async def judge(rollout: Rollout) -> float:
        (judged,) = (await reward.reward_group(Group(rollout.prompt, (rollout,)))).rollouts
        if judged.status is RolloutStatus.FAILED:
            raise RunError("reward", judged.reason, "mend the verifier, or the data it reads")
        return judged.reward or 0.0

    return judge


async def retry(episode: Episode, *, feedback: str) -> str | None:
    """Environment that asks again while the answer is wrong.

    Args:
        episode: so far.
        feedback: shown after a wrong answer; ``{prompt}`` in it stands for the prompt.

    Returns:
        The feedback; None once the reward is 1 or more.
    """
    if await episode.judge(episode.rollout) >= 1.0:
        return None
    return feedback.replace("{prompt}", episode.rollout.prompt.text)
