import asyncio
import sys

import pytest

from rlrecipes.errors import ConfigError
from rlrecipes.rewards.registry import build_reward, check_reward
from rlrecipes.types import Group, Prompt, Rollout, RolloutStatus

CUSTOM = """
def plain(rollout, *, weight=1.0):
    return weight * len(rollout.text)

async def later(rollout, weight):
    return weight * len(rollout.text)

def nothing():
    return 0.0

number = 3
"""


@pytest.fixture(autouse=True)
def my_module(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(CUSTOM)
    (tmp_path / "my_broken_rewards.py").write_text("def x(rollout):\n    return 0\n\nraise RuntimeError('sorry')")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_rewards", None)


def score(reward, text, label="2"):
    prompt = Prompt(0, (1,), "?", label)
    rollout = Rollout(prompt, 0, (), text, RolloutStatus.COMPLETED)
    return asyncio.run(reward.reward_group(Group(prompt, (rollout,)))).rollouts[0].reward


@pytest.mark.parametrize(
    ("name", "options", "text", "expected"),
    [
        ("math", {"extraction": "whole"}, "2.0", 1.0),
        ("choice", {"letters": "ABCDE"}, "2", 0.0),
        ("my_rewards:plain", {}, "abc", 3.0),
        ("my_rewards:plain", {"weight": 0.5}, "abc", 1.5),
        ("my_rewards:later", {"weight": 2}, "abc", 6.0),
    ],
)
def test_rewards_are_built_by_name(name, options, text, expected):
    assert score(build_reward(name, timeout_s=30, options=options), text) == expected


@pytest.mark.parametrize(
    ("name", "options", "where", "message"),
    [
        ("maths", {}, "reward.name", "did you mean 'math'?"),
        ("zzz", {}, "reward.name", "allowed: choice, math, module:function, reasoning_gym, served_classifier"),
        ("math", {"extracton": "whole"}, "reward.options.extracton", "did you mean 'extraction'?"),
        ("math", {"extraction": "boxed"}, "reward.options.extraction", "did you mean 'last_boxed'?"),
        ("math", {"extraction": "after_marker"}, "reward.options.marker", "needs a marker"),
        ("reasoning_gym", {"marke": "x"}, "reward.options.marke", "did you mean 'marker'?"),
        ("choice", {"letters": "abc"}, "reward.options.letters", "upper-case"),
        ("choice", {"letters": 3}, "reward.options.letters", "valid string"),
        ("reasoning_gym", {"should_give_partial": "yes"}, "reward.options.should_give_partial", "valid boolean"),
        ("my_reward:plain", {}, "reward.name", "there is no module 'my_reward'"),
        ("my_broken_rewards:x", {}, "reward.name", "RuntimeError: sorry"),
        ("my_rewards:plan", {}, "reward.name", "did you mean 'plain'?"),
        ("my_rewards:number", {}, "reward.name", "has no function 'number'"),
        ("my_rewards:", {}, "reward.name", "not an import path"),
        ("my_rewards:nothing", {}, "reward.name", "takes 0 positional arguments"),
        ("my_rewards:plain", {"wieght": 1}, "reward.options.wieght", "did you mean 'weight'?"),
        ("my_rewards:later", {}, "reward.options", "missing a required argument: 'weight'"),
    ],
)
def test_what_cannot_be_built_is_a_config_error(name, options, where, message):
    with pytest.raises(ConfigError) as caught:
        build_reward(name, timeout_s=30, options=options)
    assert caught.value.problems[0].where == where
    assert message in str(caught.value)


def test_all_wrong_options_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        build_reward("math", timeout_s=30, options={"a": 1, "b": 2})
    assert len(caught.value.problems) == 2


UNIMPORTABLE = """
import functools
import no_such_package
from elsewhere import borrowed

def many(rollout, /, weight=1.0, *rest, limit, **more): ...

if borrowed:
    def chosen(rollout): ...
else:
    chosen = None

try:
    with open("x") as file:
        async def nested(rollout, *, limit=3): ...
except OSError:
    pass

@functools.cache
def decorated(): ...

made = functools.partial(chosen, limit=3)
number: int = 3
raise SystemExit
"""


@pytest.mark.parametrize(
    ("path", "options", "where"),
    [
        ("pack.age.unimportable:many", {"limit": 1, "anything": 2}, None),
        ("pack.age.unimportable:many", {}, "reward.options"),
        ("pack.age.unimportable:chosen", {"limit": 1}, None),
        ("pack.age.unimportable:nested", {"limit": 1}, None),
        ("pack.age.unimportable:nested", {"limits": 1}, "reward.options.limits"),
        ("pack.age.unimportable:borrowed", {"limit": 1}, None),
        ("pack.age.unimportable:decorated", {"limit": 1}, None),
        ("pack.age.unimportable:made", {"limit": 1}, None),
        ("pack.age.unimportable:number", {}, "reward.name"),
        ("pack.age.unimportable:nestd", {}, "reward.name"),
        ("pack.age.missing:nested", {}, "reward.name"),
        ("pack.age.unimportable.deeper:nested", {}, "reward.name"),
        ("pack.age.broken:verify", {}, "reward.name"),
        ("math:isqrt", {}, None),
        ("open_ended:anything", {}, None),
    ],
)
def test_a_plan_reads_the_source_and_runs_none_of_it(tmp_path, monkeypatch, path, options, where):
    package = tmp_path / "pack" / "age"
    package.mkdir(parents=True)
    for directory in (package, package.parent):
        (directory / "__init__.py").write_text("raise SystemExit")
    (package / "unimportable.py").write_text(UNIMPORTABLE)
    (package / "broken.py").write_text("def verify(rollout)\n")
    (tmp_path / "open_ended.py").write_text("from pack import *\nraise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    problems = check_reward(path, options, ())
    assert [problem.where for problem in problems] == ([] if where is None else [where])
    assert set(sys.modules) == before
    if path.endswith("nestd"):
        assert "did you mean 'nested'?" in problems[0].fix
