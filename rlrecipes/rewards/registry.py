"""Rewards by name. Owns the table of verifiers and the check of names and options before a run starts."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError, create_model

from rlrecipes.config.schema import Section
from rlrecipes.config.validation import to_problems
from rlrecipes.custom import Role, check_custom, load_custom
from rlrecipes.errors import ConfigError, Problem
from rlrecipes.rewards.choices import build_choice_verifier
from rlrecipes.rewards.math_answers import build_math_verifier
from rlrecipes.rewards.reasoning_gym import build_reasoning_gym_verifier, run_import
from rlrecipes.rewards.served_classifier import build_classifier
from rlrecipes.rewards.served_judge import ServedModels, build_judge
from rlrecipes.rewards.verifiers import Verifier
from rlrecipes.suggest import did_you_mean

if TYPE_CHECKING:
    from rlrecipes.rewards.verifier_reward import VerifierReward

VERIFIERS: Mapping[str, Callable[..., Verifier]] = {
    "reasoning_gym": build_reasoning_gym_verifier,
    "math": build_math_verifier,
    "choice": build_choice_verifier,
}
"""Name -> function that builds the verifier from its options; cheap, so that a Plan can be told what it refuses."""

SERVED: Mapping[str, Callable[..., Callable[[ServedModels], Verifier]]] = {
    "served_judge": build_judge,
    "served_classifier": build_classifier,
}
"""The same for verifiers that ask a served model, the one that their option ``model`` names."""

_BUILDERS: Mapping[str, Callable[..., object]] = {**VERIFIERS, **SERVED}
_IMPORTS: Mapping[str, Callable[[], None]] = {"reasoning_gym": run_import}
"""What is slow to import before the first rollout, which would otherwise wait for it."""

_ROLE = Role("reward.name", "reward.options", ("rollout",))


def check_reward(name: str, options: Mapping[str, Any], served_models: Collection[str]) -> list[Problem]:
    """Judge a recipe's choice without importing a task's package or running anybody's code.

    Args:
        name: one of ``VERIFIERS`` or ``SERVED``, or ``module:function`` of your own.
        options: keyword arguments of the verifier.
        served_models: their names.
    """
    if ":" in name:
        return check_custom(_ROLE, name, options)
    if name not in _BUILDERS:
        problem = f"there is no verifier {name!r}"
        return [Problem("reward.name", problem, did_you_mean(name, [*_BUILDERS, "module:function"]))]
    build = _BUILDERS[name]
    model = _to_section(f"{name} reward", build)
    try:
        model.model_validate(options)
        build(**options)
    except ValidationError as error:
        found = to_problems(error, options, {}, model)
        return [replace(problem, where=f"reward.options.{problem.where}") for problem in found]
    except ConfigError as error:
        return list(error.problems)
    if name in SERVED and options["model"] not in served_models:
        problem = f"there is no served model {options['model']!r}"
        return [Problem("reward.options.model", problem, did_you_mean(options["model"], served_models))]
    return []


def build_reward(
    name: str,
    *,
    timeout_s: float,
    options: Mapping[str, Any],
    models: ServedModels = MappingProxyType({}),
) -> VerifierReward:
    """Build the reward of a recipe.

    Args:
        name: one of ``VERIFIERS`` or ``SERVED``, or ``module:function`` of your own: a plain or coroutine function
            whose first parameter is the rollout and whose keyword parameters are options; it returns a number or
            RewardResult.
        timeout_s: longest time for one rollout; then it counts as failed.
        options: keyword arguments of the verifier.
        models: the ways to served models; names are known now, clients when the first rollout is judged.

    Raises:
        ConfigError: unknown name or options, a function that cannot be imported or does not fit.
    """
    from rlrecipes.rewards.verifier_reward import VerifierReward  # asyncio, which a Plan has no use for

    problems = check_reward(name, options, models)
    if problems:
        raise ConfigError.from_problems(problems)
    if name in SERVED:
        verify = SERVED[name](**options)(models)
    else:
        verify = _bind(load_custom(_ROLE, name, options), options) if ":" in name else VERIFIERS[name](**options)
    if name in _IMPORTS:
        _IMPORTS[name]()
    return VerifierReward(verify, name=name, timeout_s=timeout_s)


def _to_section(title: str, build: Callable[..., object]) -> type[Section]:
    """The options of a verifier as a section of a recipe: closed, and as strict about types."""
    hints = typing.get_type_hints(build)
    fields: dict[str, Any] = {
        parameter.name: (hints[parameter.name], ... if parameter.default is parameter.empty else parameter.default)
        for parameter in inspect.signature(build).parameters.values()
    }
    return create_model(title, __base__=Section, **fields)


def _bind(verify: Callable[..., Any], options: Mapping[str, Any]) -> Verifier:
    if inspect.iscoroutinefunction(verify):

        async def verify_async(rollout: Any) -> Any:
            return await verify(rollout, **options)

        return verify_async
    return lambda rollout: verify(rollout, **options)
