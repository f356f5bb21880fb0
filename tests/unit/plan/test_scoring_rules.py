"""Served teachers and references: what the Plan makes of them, and what it refuses."""

import pytest

from rlrecipes.config.compose import compose
from rlrecipes.errors import ConfigError
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.resolve import resolve

HOSTS = (HostNode(name="here", num_cpus=2, num_gpus=0, memory_bytes=1 << 34),)
TEACHER = "topology.served_models.teacher"
OPD = ["algo=opd", "algo.distillation.teacher_model=teacher"]
REFERENCE = ["algo.kl.placement=loss", "algo.kl.reference_model=teacher"]


@pytest.fixture
def served(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return ["topology=embedded_teacher", f"{TEACHER}.path={tmp_path}"]


def resolve_words(*words):
    recipe = compose(list(words))
    return resolve(recipe.config, HOSTS, recipe.origins, recipe.problems)


def test_a_served_teacher_and_reference_are_not_held_by_the_trainer(served):
    plan = resolve_words(*served, *OPD, *REFERENCE)
    assert plan.trainer.teacher_path is None
    assert not plan.trainer.needs_reference
    assert [route.served_model for route in plan.sync_routes] == ["policy"]
    assert [model.name for model in plan.served_models] == ["policy", "teacher"]


@pytest.mark.parametrize(
    ("words", "where", "rule"),
    [
        (["algo=opd"], "algo.distillation.teacher_path", "distillation_has_a_teacher"),
        ([*OPD, "algo.distillation.teacher_path=x"], "algo.distillation.teacher_path", "distillation_has_a_teacher"),
        (["algo=opd", "algo.distillation.teacher_model=teachr"], "algo.distillation.teacher_model",
         "scoring_model_is_served"),
        (["algo=opd", "algo.distillation.teacher_model=policy"], "algo.distillation.teacher_model",
         "scoring_model_is_frozen"),
        (["algo.kl.placement=loss", "algo.kl.reference_model=policy"], "algo.kl.reference_model",
         "scoring_model_is_frozen"),
        (["algo.kl.reference_model=teacher"], "algo.kl.reference_model", "reference_is_asked_for_a_kl"),
        ([*OPD, "rollout.sampling.temperature=0.7"], "algo.distillation.teacher_model",
         "scores_are_of_the_sampled_distribution"),
        ([*OPD, "rollout.sampling.top_p=0.9"], "algo.distillation.teacher_model",
         "scores_are_of_the_sampled_distribution"),
        ([*REFERENCE, "rollout.sampling.top_k=5"], "algo.kl.reference_model",
         "scores_are_of_the_sampled_distribution"),
        (["reward.name=served_classifier", "+reward.options.model=teacher"], "reward.options.model",
         "classifier_has_engines_that_classify"),
        ([f"{TEACHER}.path=nowhere"], f"{TEACHER}.path", "frozen_model_path_holds_a_model"),
        ([*OPD, f"{TEACHER}.server_groups.main.worker_type=decode"], "algo.distillation.teacher_model",
         "scoring_model_has_regular_engines"),
    ],
)  # fmt: skip
def test_what_a_scoring_model_cannot_be_is_told(served, words, where, rule):
    with pytest.raises(ConfigError) as caught:
        resolve_words(*served, *words)
    assert (where, rule) in {(problem.where, problem.rule) for problem in caught.value.problems}


def test_engines_of_others_may_have_the_model_elsewhere(served):
    external = [f"{TEACHER}.path=/elsewhere", f"{TEACHER}.server_groups.main.engine=external"]
    urls = [f"{TEACHER}.server_groups.main.urls=[http://far:1]", f"{TEACHER}.server_groups.main.sglang={{}}"]
    assert resolve_words(*served, *OPD, *external, *urls).served_models[1].path == "/elsewhere"


@pytest.mark.parametrize("is_embedding", [True, False])
def test_a_classifier_needs_engines_started_for_it(tmp_path, is_embedding):
    (tmp_path / "config.json").write_text("{}")
    where = "topology.served_models.reward"
    words = [
        f"+served_model@{where}=frozen",
        f"+server_group@{where}.server_groups.main=sglang",
        f"{where}.path={tmp_path}",
    ]
    words += [
        f"{where}.server_groups.main.num_engines=1",
        f"+{where}.server_groups.main.sglang.is_embedding={is_embedding}",
    ]
    words += ["reward.name=served_classifier", "+reward.options.model=reward"]
    if is_embedding:
        assert resolve_words(*words).reward.name == "served_classifier"
    else:
        with pytest.raises(ConfigError, match="have no reward head to run"):
            resolve_words(*words)
