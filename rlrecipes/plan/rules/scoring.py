"""Served models that are asked for something else than rollouts: a teacher, a reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlrecipes.config.schema import RlConfig, RunConfig
from rlrecipes.plan.rules.rule import MODEL, Found, list_models, rl_rule, rule
from rlrecipes.suggest import did_you_mean

_TEACHER, _REFERENCE = "algo.distillation.teacher_model", "algo.kl.reference_model"


def list_scorers(algo: RlConfig) -> Iterator[tuple[str, str]]:
    """Key and name of each served model that scores the rollouts' tokens.

    Args:
        algo: the recipe's section.
    """
    if algo.distillation is not None and algo.distillation.teacher_model is not None:
        yield _TEACHER, algo.distillation.teacher_model
    if algo.kl.reference_model is not None:
        yield _REFERENCE, algo.kl.reference_model


@rl_rule(_TEACHER, _REFERENCE, fix="name one of topology.served_models")
def scoring_model_is_served(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """Only a model of the topology has engines and a router."""
    served = config.topology.served_models
    for where, name in list_scorers(algo):
        if name not in served:
            yield Found(where, f"there is no served model {name!r}", did_you_mean(name, served))


@rl_rule(_TEACHER, _REFERENCE, fix="name a model with is_updated=false")
def scoring_model_is_frozen(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """A teacher or reference that follows the policy is the policy."""
    for where, name in list_scorers(algo):
        model = config.topology.served_models.get(name)
        if model is not None and model.is_updated:
            yield Found(where, f"{name} gets every weight sync")


@rl_rule(_TEACHER, _REFERENCE, fix="give it engines of worker_type regular")
def scoring_model_has_regular_engines(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """It reads a prompt and generates nothing: there is no decoding to take apart."""
    for where, name in list_scorers(algo):
        model = config.topology.served_models.get(name)
        if model is not None and any(group.worker_type == "decode" for group in model.server_groups.values()):
            yield Found(where, f"{name} has prefill and decode engines")


@rl_rule(_TEACHER, _REFERENCE, fix="use temperature=1.0, top_p=1.0 and top_k=-1 in rollout.sampling, or null")
def scores_are_of_the_sampled_distribution(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """SGLang gives the logprobs of a prompt at temperature 1 over the whole vocabulary, whatever a request says."""
    sampling = config.rollout.sampling
    if (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, -1):
        return
    drawn = f"temperature={sampling.temperature:g}, top_p={sampling.top_p:g}, top_k={sampling.top_k}"
    for where, name in list_scorers(algo):
        problem = f"engines of {name} score at temperature 1, uncut; the policy samples with {drawn}"
        yield Found(where, problem)


@rl_rule(_REFERENCE, fix="set algo.kl.placement, or null")
def reference_is_asked_for_a_kl(config: RunConfig, algo: RlConfig) -> Iterator[Found]:
    """Nothing else reads what a reference says."""
    if algo.kl.reference_model is not None and algo.kl.placement == "none":
        yield Found(_REFERENCE, "is given, but kl.placement is none")


@rule("reward.options.model", fix="give its groups engine=sglang and sglang.is_embedding=true")
def classifier_has_engines_that_classify(config: RunConfig) -> Iterator[Found]:
    """Only an SGLang started for it runs a reward head; the embedded engine generates and nothing else."""
    model = config.topology.served_models.get(str(config.reward.options.get("model")))
    if config.reward.name != "served_classifier" or model is None:
        return
    for name, group in model.server_groups.items():
        if group.engine == "embedded" or (group.engine == "sglang" and group.sglang.get("is_embedding") is not True):
            yield Found("reward.options.model", f"engines of group {name} have no reward head to run")


@rule(f"{MODEL}.path", fix="name an HF directory")
def frozen_model_path_holds_a_model(config: RunConfig) -> Iterator[Found]:
    """Engines that the run starts read it here; those of others have it where they are."""
    for where, _, model in list_models(config):
        is_read_here = any(group.engine != "external" for group in model.server_groups.values())
        if model.path is not None and is_read_here and not (Path(model.path) / "config.json").is_file():
            yield Found(f"{where}.path", f"{model.path} holds no config.json")


RULES = (
    scoring_model_is_served,
    scoring_model_is_frozen,
    scoring_model_has_regular_engines,
    scores_are_of_the_sampled_distribution,
    reference_is_asked_for_a_kl,
    classifier_has_engines_that_classify,
    frozen_model_path_holds_a_model,
)
