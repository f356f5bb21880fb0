"""What this project adds composes with what is installed, and its reward gives what it should."""

from __future__ import annotations

from pathlib import Path

from rewards import count_vowels

from rlrecipes.config.compose import compose
from rlrecipes.runner.resolution import resolve_recipe
from rlrecipes.types import Prompt, Rollout, RolloutStatus


def test_every_recipe_resolves():
    for file in Path("conf/recipe").glob("*.yaml"):
        plan = resolve_recipe(compose([f"recipe={file.stem}"], Path("conf")))
        assert plan.name == file.stem


def test_the_recipe_says_what_it_is_meant_to():
    plan = resolve_recipe(compose(["recipe=vowels", "algo.group_size=4"], Path("conf")))
    assert (plan.algo.name, plan.batch.group_size) == ("grpo", 4)
    assert (plan.reward.name, plan.data.train_path) == ("rewards:count_vowels", "prompts.jsonl")


def test_the_reward():
    def judge(text: str, **options: str) -> float:
        return count_vowels(Rollout(Prompt(0, (1,), "sun"), 0, (), text, RolloutStatus.FAILED), **options)

    assert (judge("aeio"), judge("xxaa"), judge("xyz"), judge("")) == (1.0, 0.5, 0.0, 0.0)
    assert judge("xxaa", vowels="x") == 0.5
