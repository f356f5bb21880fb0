"""A run that goes on, or a saved plan that runs, finds the model and the data it began with, or says what changed."""

from __future__ import annotations

import os

import pytest

from rlrecipes.config.compose import compose
from rlrecipes.errors import ConfigError
from rlrecipes.plan.lock import Lock, build_lock, check_lock, compute_fingerprint, read_lock, to_lock_path, write_lock
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.resolve import resolve

HOSTS = (HostNode(name="here", num_cpus=2, num_gpus=0, memory_bytes=1 << 34),)
LARGE = 5 << 20


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "a"}\n')
    recipe = compose([f"data.train_path={tmp_path / 'train.jsonl'}", f"data.eval_path={tmp_path / 'eval.jsonl'}"])
    return resolve(recipe.config, HOSTS, recipe.origins)


def test_a_lock_comes_back_as_it_was_written(plan, tmp_path):
    lock = build_lock(plan)
    assert lock.plan_hash == plan.hash
    assert {"python", "torch", "megatron-core", "rlrecipes"} <= lock.versions.keys()
    assert list(lock.data) == [str(tmp_path / "train.jsonl")]  # what will be made is not there yet
    write_lock(lock, tmp_path / "plan.yaml")
    assert read_lock(tmp_path / "plan.yaml") == lock
    assert sorted(path.name for path in tmp_path.glob("plan*")) == ["plan.lock.yaml"]
    assert read_lock(tmp_path / "other.yaml") is None


def test_changed_data_is_refused_by_name(plan, tmp_path):
    lock = build_lock(plan)
    (tmp_path / "train.jsonl").write_text('{"question": "b"}\n')
    with pytest.raises(ConfigError) as caught:
        check_lock(lock, build_lock(plan), to_lock_path(tmp_path / "plan.yaml"))
    (problem,) = caught.value.problems
    assert (problem.where, "train.jsonl is not the file it was" in problem.problem) == ("data", True)
    assert "plan.lock.yaml" in problem.fix and "since then" not in problem.problem
    older = lock.model_copy(update={"versions": lock.versions | {"reasoning-gym": "0.0.1"}})
    with pytest.raises(ConfigError, match=r"not the file it was; since then reasoning-gym 0\.0\.1 is \S+ now"):
        check_lock(older, build_lock(plan), to_lock_path(tmp_path / "plan.yaml"))


def test_data_that_appeared_since_is_no_change(plan, tmp_path):
    lock = build_lock(plan)
    (tmp_path / "eval.jsonl").write_text("{}\n")
    assert check_lock(lock, build_lock(plan), tmp_path / "plan.lock.yaml") == []


def test_other_versions_are_told(plan, tmp_path):
    now = build_lock(plan)
    saved = now.model_copy(update={"versions": now.versions | {"torch": "1.0", "gone": "2"}})
    told = check_lock(saved, now, tmp_path / "plan.lock.yaml")
    assert [line.split(" is ")[0] for line in told] == ["gone", "torch"]
    assert "gone is absent" in told[0]


@pytest.mark.parametrize("text", ["[", "plan_hash: 3\n", "\x00", "other: x\n"])
def test_a_damaged_lock_is_one_clear_line(tmp_path, text):
    to_lock_path(tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_lock(tmp_path / "plan.yaml")
    assert "is not a lock" in caught.value.problems[0].problem


@pytest.mark.parametrize("moved", [slice(0, 1), slice(1000, 1001), slice(LARGE - 1, LARGE), slice(0, LARGE, 1 << 15)])
def test_weights_that_moved_have_another_fingerprint(tmp_path, moved):
    path = tmp_path / "model.safetensors"
    content = bytearray(os.urandom(LARGE))
    path.write_bytes(content)
    before = compute_fingerprint(path)
    assert compute_fingerprint(path) == before
    content[moved] = bytes(byte ^ 1 for byte in content[moved])
    path.write_bytes(content)
    assert compute_fingerprint(path) != before
    path.write_bytes(content[:-1])
    shorter = compute_fingerprint(path)
    path.write_bytes(content + b"x")
    assert len({before, shorter, compute_fingerprint(path)}) == 3


def test_locks_are_closed():
    with pytest.raises(ValueError):
        Lock(plan_hash="x", versions={}, model={}, data={}, more={})
