"""Rewards by name. Owns the table of verifiers and the check of options before a run starts."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rlrecipes.errors import ConfigError, Problem
from rlrecipes.rewards.choices import build_choice_verifier
from rlrecipes.rewards.math_answers import build_math_verifier
from rlrecipes.rewards.reasoning_gym import build_reasoning_gym_verifier
from rlrecipes.rewards.scoring import VerifierReward
from rlrecipes.rewards.verifiers import Verifier

VERIFIERS: Mapping[str, Callable[..., Verifier]] = {
    "reasoning_gym": build_reasoning_gym_verifier,
    "math": build_math_verifier,
    "choice": build_choice_verifier,
}
"""Name -> function that builds the verifier from its options."""

_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def build_reward(name: str, *, timeout_s: float, options: Mapping[str, Any]) -> VerifierReward:
    """Build the reward of a recipe.

    Args:
        name: one of ``VERIFIERS``, or ``module:function`` of your own: a plain or coroutine function whose first
            parameter is the rollout and whose keyword parameters are options; it returns a number or RewardResult.
        timeout_s: longest time for one rollout; then it counts as failed.
        options: keyword arguments of the verifier.

    Raises:
        ConfigError: unknown name or options, a function that cannot be imported or does not fit.
    """
    if ":" in name:
        return VerifierReward(_load_custom(name, options), name=name, timeout_s=timeout_s)
    if name not in VERIFIERS:
        problem = f"there is no verifier {name!r}"
        raise ConfigError("reward.name", problem, _suggest(name, [*VERIFIERS, "module:function"]))
    build = VERIFIERS[name]
    _check_options(options, list(inspect.signature(build).parameters))
    return VerifierReward(build(**options), name=name, timeout_s=timeout_s)


def _load_custom(path: str, options: Mapping[str, Any]) -> Verifier:
    where = "reward.name"
    if not _IMPORT_PATH.fullmatch(path):
        raise ConfigError(where, f"{path!r} is not an import path", "write package.module:function")
    module_name, _, function_name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where a user's module lies; a console script does not look there
    try:
        module = importlib.import_module(module_name)
    # The module is a user's: importing it may raise anything, and all of it means that it cannot be imported.
    except Exception as error:
        problem = f"{module_name!r} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(where, problem, "check the spelling, and that it is on PYTHONPATH") from error
    verify = getattr(module, function_name, None)
    if not callable(verify):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(
            where, f"{module_name!r} has no function {function_name!r}", _suggest(function_name, functions)
        )
    _check_signature(path, verify, options)
    return _bind(verify, options)


def _bind(verify: Callable[..., Any], options: Mapping[str, Any]) -> Verifier:
    if inspect.iscoroutinefunction(verify):

        async def verify_async(rollout: Any) -> Any:
            return await verify(rollout, **options)

        return verify_async
    return lambda rollout: verify(rollout, **options)


def _check_signature(path: str, verify: Callable[..., Any], options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(verify).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    if not positional:
        problem = f"{path} takes no positional argument for the rollout"
        raise ConfigError("reward.name", problem, "define it as verify(rollout, *, your_option=...)")
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        _check_options(options, [p.name for p in parameters if p is not positional[0]])
    try:
        inspect.signature(verify).bind(None, **options)
    except TypeError as error:
        fix = "give it in reward.options, or give the parameter a default"
        raise ConfigError("reward.options", f"{path}: {error}", fix) from error


def _check_options(options: Mapping[str, Any], known: list[str]) -> None:
    problems = [
        Problem(f"reward.options.{name}", f"there is no option {name!r}", _suggest(name, known))
        for name in options
        if name not in known
    ]
    if problems:
        raise ConfigError.from_problems(problems)


def _suggest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else "use one of: " + (", ".join(known) or "(none)")
