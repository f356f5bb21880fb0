"""Rollouts of several turns: who runs them, who answers the policy, and what bounds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlrecipes.config.schema import EnvironmentConfig, RunConfig
from rlrecipes.custom import Role, check_custom
from rlrecipes.plan.rules.rule import Found, rule
from rlrecipes.suggest import did_you_mean

GENERATE = Role("rollout.generate.name", "rollout.generate.options", ("policy", "prompt", "sibling"))
"""A generate function of the user's own; see ``rollout.registry.CustomGenerate``."""
ENVIRONMENT = Role("rollout.generate.environment.name", "rollout.generate.environment.options", ("episode",))
"""What the policy talks to; see ``rollout.environments``."""
ENVIRONMENTS: Mapping[str, str] = {"retry": "rlrecipes.rollout.environments:retry"}
"""Name -> import path; judged by its source, as those of the user's own are."""
_SINGLE, _MULTI = "single_turn", "multi_turn"
_BOUNDS = ("rollout.generate.max_turns", "rollout.generate.max_observation_tokens")


@rule(GENERATE.where, fix="use single_turn or multi_turn, or write module:function")
def generate_function_is_known(config: RunConfig) -> Iterator[Found]:
    """A generate function is one of ours by name, or one of your own by import path."""
    name = config.rollout.generate.name
    if ":" not in name and name not in (_SINGLE, _MULTI):
        fix = did_you_mean(name, [_SINGLE, _MULTI, "module:function"])
        yield Found(GENERATE.where, f"there is no generate function {name!r}", fix)


@rule(
    GENERATE.where,
    GENERATE.options,
    f"{GENERATE.options}.<name>",
    fix="write package.module:function, of (policy, prompt, sibling, *, your options)",
)
def generate_function_fits(config: RunConfig) -> Iterator[Found]:
    """A generate function takes what it is called with and every option it is given; ours have none."""
    name, options = config.rollout.generate.name, config.rollout.generate.options
    if ":" in name:
        for problem in check_custom(GENERATE, name, options):
            yield Found(problem.where, problem.problem, problem.fix)
    elif options:
        yield Found(GENERATE.options, f"{name} has no options of its own", "set it to {}")


@rule(*_BOUNDS, fix="use multi_turn, or max_turns=1 and max_observation_tokens=0")
def single_turn_is_one_turn(config: RunConfig) -> Iterator[Found]:
    """Room for turns that never come is taken from every micro-batch and cache."""
    generate = config.rollout.generate
    if generate.name == _SINGLE and generate.max_turns > 1:
        yield Found(_BOUNDS[0], f"is {generate.max_turns}; single_turn has one")
    if generate.name == _SINGLE and generate.max_observation_tokens:
        yield Found(_BOUNDS[1], f"is {generate.max_observation_tokens}; single_turn shows nothing after the prompt")


@rule(*_BOUNDS, fix="raise it, or use single_turn")
def multi_turn_has_room_for_turns(config: RunConfig) -> Iterator[Found]:
    """With one turn the environment is never asked; of no token it can show nothing."""
    generate = config.rollout.generate
    if generate.name == _MULTI and generate.max_turns == 1:
        yield Found(_BOUNDS[0], "is 1: the environment would never be asked")
    if generate.name == _MULTI and not generate.max_observation_tokens:
        yield Found(_BOUNDS[1], "is 0: the environment could show nothing")


@rule("rollout.generate.environment", fix="name one, or use single_turn")
def environment_has_a_reader(config: RunConfig) -> Iterator[Found]:
    """Only multi_turn asks an environment, and it cannot do without."""
    generate = config.rollout.generate
    if generate.name == _MULTI and generate.environment is None:
        yield Found("rollout.generate.environment", "is null: nobody answers the policy")
    if generate.name != _MULTI and generate.environment is not None:
        yield Found("rollout.generate.environment", f"{generate.name} asks none", "set it to null, or use multi_turn")


@rule("rollout.generate.observation_role", fix="use user, or data.apply_chat_template=true")
def observation_role_has_a_template(config: RunConfig) -> Iterator[Found]:
    """Without a chat template nobody has a role."""
    if config.rollout.generate.observation_role != "user" and not config.data.apply_chat_template:
        problem = f"is {config.rollout.generate.observation_role}; data.apply_chat_template is false"
        yield Found("rollout.generate.observation_role", problem)


@rule(
    ENVIRONMENT.where,
    ENVIRONMENT.options,
    f"{ENVIRONMENT.options}.<name>",
    fix="use retry, or write package.module:function, of (episode, *, your options)",
)
def environment_fits(config: RunConfig) -> Iterator[Found]:
    """An environment is found, takes an episode and every option it is given."""
    environment = config.rollout.generate.environment
    if environment is not None:
        yield from _judge_environment(environment)


def _judge_environment(environment: EnvironmentConfig) -> Iterator[Found]:
    name, options = environment.name, environment.options
    if ":" not in name and name not in ENVIRONMENTS:
        fix = did_you_mean(name, [*ENVIRONMENTS, "module:function"])
        yield Found(ENVIRONMENT.where, f"there is no environment {name!r}", fix)
        return
    for problem in check_custom(ENVIRONMENT, ENVIRONMENTS.get(name, name), options):
        yield Found(problem.where, problem.problem, problem.fix)
    feedback = options.get("feedback", "-")
    if name == "retry" and not (isinstance(feedback, str) and feedback):
        yield Found(f"{ENVIRONMENT.options}.feedback", f"is {feedback!r}, not a text", "say what to show")


RULES = (
    generate_function_is_known,
    generate_function_fits,
    single_turn_is_one_turn,
    multi_turn_has_room_for_turns,
    environment_has_a_reader,
    observation_role_has_a_template,
    environment_fits,
)
