"""How rollouts are drawn, and what the trainer can say of it."""

from __future__ import annotations

from collections.abc import Iterator

from rlrecipes.config.schema import RlConfig, RunConfig, SamplingConfig
from rlrecipes.plan.nodes import Plan
from rlrecipes.plan.rules.rule import GROUP, Found, list_groups, rl_rule, rule

_GREEDY_TEMPERATURE = 1e-6
"""Below it SGLang samples greedily."""
_UNSCALED = "SGLANG_RETURN_ORIGINAL_LOGPROB"
_SECTIONS = ("rollout.sampling", "rollout.evaluation.sampling")


def list_sampling(config: RunConfig | Plan) -> Iterator[tuple[str, SamplingConfig]]:
    """Path and section of training's and of evaluation's sampling.

    Args:
        config: the recipe, or its Plan.
    """
    return zip(_SECTIONS, (config.rollout.sampling, config.rollout.evaluation.sampling), strict=True)


@rl_rule(
    "rollout.sampling.temperature",
    "rollout.sampling.top_k",
    fix="use a temperature of 1.0 and top_k=-1; evaluation has a sampling section of its own",
)
def siblings_differ(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """Greedy siblings are equal, so their group teaches nothing."""
    sampling = config.rollout.sampling
    if sampling.temperature < _GREEDY_TEMPERATURE:
        problem = f"is {sampling.temperature:g}: greedy siblings are equal and teach nothing"
        yield Found("rollout.sampling.temperature", problem)
    if sampling.top_k == 1:
        yield Found("rollout.sampling.top_k", "is 1: greedy siblings are equal and teach nothing")


@rl_rule("rollout.sampling.min_new_tokens", fix="use 0; let the reward refuse short answers")
def end_tokens_are_allowed(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """An engine that forbids end tokens draws from another distribution than the trainer's logprobs are of."""
    if config.rollout.sampling.min_new_tokens > 0:
        problem = "forbids end tokens, which the trainer's logprobs allow: their ratios would be wrong"
        yield Found("rollout.sampling.min_new_tokens", problem)


@rl_rule("algo.old_logprobs", fix="use recompute, or top_p=1.0 and top_k=-1")
def old_logprobs_are_of_what_was_kept(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """Engines report logprobs from before top_p and top_k cut; the trainer's are from after."""
    sampling = config.rollout.sampling
    if (sampling.top_p < 1 or sampling.top_k != -1) and algo.old_logprobs == "rollout":
        problem = "is rollout, but engines report logprobs from before top_p and top_k cut: ratios would be wrong"
        yield Found("algo.old_logprobs", problem)


@rl_rule(f"{GROUP}.env.{_UNSCALED}", fix="remove it")
def engines_report_scaled_logprobs(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """The trainer divides its logits by the temperature, as an engine does that has not been told otherwise."""
    for where, _, group in list_groups(config):
        if group.env.get(_UNSCALED, "").lower() in ("1", "true"):
            yield Found(f"{where}.env.{_UNSCALED}", "engines would report logprobs from before the temperature")


@rule(*(f"{section}.top_k" for section in _SECTIONS), fix="use -1 for all, or at least 1")
def top_k_is_a_count(config: RunConfig) -> Iterator[Found]:
    """Engines take -1 for all tokens; 0 and other negative numbers keep none."""
    for where, sampling in list_sampling(config):
        if sampling.top_k == 0 or sampling.top_k < -1:
            yield Found(f"{where}.top_k", f"is {sampling.top_k}")


@rule(*(f"{section}.min_new_tokens" for section in _SECTIONS), fix="lower it")
def shortest_response_is_allowed(config: RunConfig) -> Iterator[Found]:
    """No response is at least as long as one limit and at most as long as a smaller one."""
    for where, sampling in list_sampling(config):
        if sampling.min_new_tokens > sampling.max_new_tokens:
            problem = f"is {sampling.min_new_tokens}, above max_new_tokens={sampling.max_new_tokens}"
            yield Found(f"{where}.min_new_tokens", problem)


RULES = (
    siblings_differ,
    end_tokens_are_allowed,
    old_logprobs_are_of_what_was_kept,
    engines_report_scaled_logprobs,
    top_k_is_a_count,
    shortest_response_is_allowed,
)
