"""Tokens: of prompts and responses, against the model, the micro-batch and the engines' caches."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlrecipes.config.schema import GenerateConfig, ModelShapes, RunConfig
from rlrecipes.plan.inventory import to_count
from rlrecipes.plan.nodes import Plan
from rlrecipes.plan.packing import compute_micro_batch_multiple
from rlrecipes.plan.rules.engines import list_trained
from rlrecipes.plan.rules.rule import GROUP, Found, list_groups, rule, shape_rule
from rlrecipes.plan.rules.sampling import list_sampling

ENGINE_MARGIN_TOKENS = 8
"""SGLang ends an answer 2 tokens before the context is full, and takes no prompt that leaves fewer than 7 there."""


def compute_longest_sample(config: RunConfig) -> int:
    """Tokens of the longest rollout that reaches the trainer, which evaluation's never do.

    Args:
        config: the recipe.
    """
    response = config.rollout.generate.compute_response_tokens(config.rollout.sampling.max_new_tokens)
    return config.data.max_prompt_tokens + response


def compute_longest(config: RunConfig | Plan) -> int:
    """Tokens of the longest rollout that a recipe allows, of training and evaluation.

    Args:
        config: the recipe, or its Plan.
    """
    most_new = max(sampling.max_new_tokens for _, sampling in list_sampling(config))
    return config.data.max_prompt_tokens + config.rollout.generate.compute_response_tokens(most_new)


@shape_rule(
    "rollout.sampling.max_new_tokens",
    "rollout.evaluation.sampling.max_new_tokens",
    fix="lower it, data.max_prompt_tokens, or the turns and observations of rollout.generate",
)
def rollouts_fit_the_model(config: RunConfig, shapes: ModelShapes) -> Iterator[Found]:
    """A model has no positions beyond its longest sequence."""
    prompt, room, generate = config.data.max_prompt_tokens, shapes.max_position_embeddings, config.rollout.generate
    for where, sampling in list_sampling(config):
        if prompt + generate.compute_response_tokens(sampling.max_new_tokens) > room:
            problem = f"{prompt} prompt + {_tell_response(generate, sampling.max_new_tokens)} exceed the model's {room}"
            yield Found(f"{where}.max_new_tokens", problem)


def _tell_response(generate: GenerateConfig, max_new_tokens: int) -> str:
    if generate.max_turns == 1:
        return f"{max_new_tokens} new tokens"
    observations = f"{generate.max_turns - 1} x {generate.max_observation_tokens} observation tokens"
    return f"{generate.max_turns} x {max_new_tokens} new + {observations}"


@shape_rule("rollout.sampling.max_new_tokens", fix="lower it, or data.max_prompt_tokens")
def engines_finish_every_rollout(config: RunConfig, shapes: ModelShapes) -> Iterator[Found]:
    """SGLang ends an answer a few tokens before the context is full, and does not say so."""
    longest, room = compute_longest(config), shapes.max_position_embeddings
    if longest + ENGINE_MARGIN_TOKENS > room >= longest:
        problem = f"{longest} tokens with the prompt; engines cut an answer at {room - ENGINE_MARGIN_TOKENS}, silently"
        yield Found("rollout.sampling.max_new_tokens", problem)


@rule("parallel.max_tokens_per_micro_batch", fix="raise it")
def micro_batch_holds_the_longest_sample(config: RunConfig) -> Iterator[Found]:
    """A sample is never split over micro-batches, nor cut."""
    parallel, longest = config.parallel, compute_longest_sample(config)
    cp = parallel.context_parallel_size
    multiple = compute_micro_batch_multiple(parallel.tensor_model_parallel_size, cp, parallel.sequence_parallel)
    needed = math.ceil(longest / multiple) * multiple // cp  # the multiple is one of CP
    if parallel.max_tokens_per_micro_batch < needed:
        problem = f"is {parallel.max_tokens_per_micro_batch}; the longest sample has {longest} tokens"
        yield Found("parallel.max_tokens_per_micro_batch", problem, f"use at least {needed}")


@rule(f"{GROUP}.sglang.max_total_tokens", f"{GROUP}.sglang.context_length", fix="raise it, or leave it out")
def engines_hold_the_longest_rollout(config: RunConfig) -> Iterator[Found]:
    """An engine cannot finish what its KV cache or its context cannot hold."""
    needed = compute_longest(config) + ENGINE_MARGIN_TOKENS
    for where, _, group in list_groups(config):
        for name in ("max_total_tokens", "context_length"):
            held = to_count(group.sglang.get(name))
            if held is not None and held < needed:
                problem = f"is {held}; one longest rollout has {needed - ENGINE_MARGIN_TOKENS} tokens"
                yield Found(f"{where}.sglang.{name}", problem, f"use at least {needed}")


@shape_rule(f"{GROUP}.sglang.context_length", fix="lower it, or leave it out")
def engine_context_is_the_models(config: RunConfig, shapes: ModelShapes) -> Iterator[Found]:
    """SGLang refuses a context that is longer than the model's."""
    for where, group in list_trained(config):
        held = to_count(group.sglang.get("context_length"))
        if held is not None and held > shapes.max_position_embeddings:
            problem = f"is {held}; the model has {shapes.max_position_embeddings} positions"
            yield Found(f"{where}.sglang.context_length", problem)


RULES = (
    rollouts_fit_the_model,
    engines_finish_every_rollout,
    micro_batch_holds_the_longest_sample,
    engines_hold_the_longest_rollout,
    engine_context_is_the_models,
)
