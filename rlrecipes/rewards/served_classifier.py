"""A served model with a reward head. Owns the text it is shown and the scale of its number."""

from __future__ import annotations

from collections.abc import Callable

from rlrecipes.rewards.served_judge import ServedModels, check_template, fill_template
from rlrecipes.rewards.verifiers import RewardResult, Verifier
from rlrecipes.types import Rollout


def build_classifier(
    model: str, prompt_template: str = "{prompt}{response}", scale: float = 1.0
) -> Callable[[ServedModels], Verifier]:
    """A verifier that asks a served model for the number its reward head gives a text.

    Args:
        model: name of the served model; its engines are started with ``is_embedding``.
        prompt_template: the text, as the model was trained to see it; ``{prompt}``, ``{response}`` and ``{label}`` are
            replaced, other braces stay.
        scale: reward per unit of that number.

    Returns:
        What takes the served models and gives the verifier.

    Raises:
        ConfigError: the template has no place for the response.
    """
    check_template(prompt_template)

    def bind(models: ServedModels) -> Verifier:
        async def classify(rollout: Rollout) -> RewardResult:
            number = await models[model].classify(
                text=fill_template(prompt_template, rollout),
                request_id=f"classify-{rollout.prompt.index}-{rollout.sibling}.",
            )
            return RewardResult(scale * number)

        return classify

    return bind
