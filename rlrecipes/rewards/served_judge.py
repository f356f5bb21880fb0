"""A served model that judges answers in words. Owns what it is asked and where its number is found in the reply."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Protocol

from rlrecipes.errors import ConfigError
from rlrecipes.rewards.verifiers import RewardResult, Verifier
from rlrecipes.types import Rollout

_PLACE = re.compile(r"\{(prompt|response|label)\}")
_NUM_SHOWN_CHARACTERS = 200


class ServedClient(Protocol):
    """The way to the engines of one served model (``engines/sglang/serving.py``)."""

    async def chat(self, *, text: str, max_new_tokens: int, request_id: str) -> str:
        """The model's likeliest reply to a message.

        Raises:
            EngineError: no engine answered, or not as it should.
        """

    async def classify(self, *, text: str, request_id: str) -> float:
        """The number that a model with a reward head gives a text.

        Raises:
            EngineError: no engine answered, or not as it should.
        """


type ServedModels = Mapping[str, ServedClient]
"""By name. A reward is built before the routers are up: until then there are names and no clients."""


def build_judge(
    model: str, prompt_template: str, max_new_tokens: int, pattern: str, scale: float = 1.0
) -> Callable[[ServedModels], Verifier]:
    """A verifier that asks a served model.

    Args:
        model: name of the served model.
        prompt_template: the message; ``{prompt}``, ``{response}`` and ``{label}`` are replaced, other braces stay.
        max_new_tokens: most tokens of its reply, at least 1.
        pattern: regular expression whose first group is the number; the last match counts.
        scale: reward per unit of that number.

    Returns:
        What takes the served models and gives the verifier.

    Raises:
        ConfigError: the template has no place for the response, or the pattern no group.
    """
    check_template(prompt_template)
    if max_new_tokens < 1:
        raise ConfigError("reward.options.max_new_tokens", f"is {max_new_tokens}", "use at least 1")
    try:
        number = re.compile(pattern)
    except re.error as error:
        fix = r"write one such as 'Score: *(\d+)'"
        raise ConfigError("reward.options.pattern", f"{pattern!r} is no regular expression: {error}", fix) from error
    if not number.groups:
        raise ConfigError("reward.options.pattern", f"{pattern!r} has no group", "put the number in parentheses")

    def bind(models: ServedModels) -> Verifier:
        async def judge(rollout: Rollout) -> RewardResult:
            reply = await models[model].chat(
                text=fill_template(prompt_template, rollout),
                max_new_tokens=max_new_tokens,
                request_id=f"judge-{rollout.prompt.index}-{rollout.sibling}.",
            )
            found = [match[1] for match in number.finditer(reply) if match[1]]
            if not found:
                shown = reply[-_NUM_SHOWN_CHARACTERS:]
                raise ValueError(f"{model} gave no number that {pattern!r} finds; it ended with {shown!r}")
            return RewardResult(scale * float(found[-1]))

        return judge

    return bind


def check_template(template: str) -> None:
    """Refuse a text that would be the same for every answer.

    Args:
        template: as given in ``reward.options.prompt_template``.

    Raises:
        ConfigError: it has no place for the response.
    """
    if "{response}" not in template:
        problem = "has no {response}: every answer would be judged alike"
        raise ConfigError("reward.options.prompt_template", problem, "write {response} where the answer belongs")


def fill_template(template: str, rollout: Rollout) -> str:
    """The text that a model is shown.

    Args:
        template: ``{prompt}``, ``{response}`` and ``{label}`` are replaced, other braces stay.
        rollout: to be judged.
    """
    places = {"prompt": rollout.prompt.text, "response": rollout.text, "label": rollout.prompt.label or ""}
    return _PLACE.sub(lambda place: places[place[1]], template)
