"""Checkpoints appear whole or not at all, older ones survive a failure, and another recipe is refused."""

from __future__ import annotations

import asyncio
import errno

import pytest

from rlrecipes.config.compose import compose
from rlrecipes.errors import CheckpointError, ConfigError
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.resolve import resolve
from rlrecipes.runner.checkpoint import CheckpointStore, RunState, check_same_recipe
from rlrecipes.runner.faults import RunLock

HOSTS = (HostNode(name="here", num_cpus=2, num_gpus=0, memory_bytes=1 << 34),)


def plan_of(*overrides):
    recipe = compose(overrides)
    return resolve(recipe.config, HOSTS, recipe.origins)


def state_at(step):
    return RunState(
        step=step,
        is_evaluation_due=False,
        weight_version=step,
        mlflow_run_id=None,
        plan_hash="x",
        plan={},
        collector={"next": step},
    )


async def write_weights(path):
    (path / "weights").write_text("w")


async def fill_disk(path):
    (path / "weights").write_text("half")
    raise OSError(errno.ENOSPC, "No space left on device")


def refuse_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def save(store, step, write=write_weights):
    return asyncio.run(store.save(state_at(step), write))


def test_the_latest_is_found_and_old_ones_go(tmp_path):
    store = CheckpointStore(tmp_path, num_kept=2)
    assert store.find_latest() is None
    for step in (2, 4, 10):
        save(store, step)
    assert store.find_latest().name == "step_00000010"
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_00000004", "step_00000010"]
    assert store.read_state(store.find_latest()) == state_at(10)


def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_draft(tmp_path):
    store = CheckpointStore(tmp_path, num_kept=1)
    kept = save(store, 1)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        save(store, 2, fill_disk)
    assert str(kept) in caught.value.problems[0].fix
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
    assert (kept / "weights").read_text() == "w"


def test_a_draft_left_by_a_killed_process_is_no_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, num_kept=2)
    save(store, 1)
    draft = tmp_path / "checkpoints" / ".draft_step_00000002"
    draft.mkdir()
    (draft / "state.json").write_text(state_at(2).model_dump_json())
    assert store.find_latest().name == "step_00000001"
    save(store, 2)
    assert not draft.exists()


@pytest.mark.parametrize("step", [3, 2])  # an earlier one goes, or the one that is replaced
def test_a_death_while_one_is_removed_leaves_no_half_of_it(tmp_path, monkeypatch, step):
    store = CheckpointStore(tmp_path, num_kept=2)
    save(store, 1)
    save(store, 2)

    def die(path, **_):
        (path / "weights").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("rlrecipes.runner.checkpoint.shutil.rmtree", die)
        save(store, step)
    checkpoints = tmp_path / "checkpoints"
    assert store.find_latest().name == f"step_{step:08d}"
    assert all((path / "weights").exists() for path in checkpoints.glob("step_*"))
    save(store, 4)
    assert not list(checkpoints.glob(".*"))


def test_a_damaged_state_says_where(tmp_path):
    store = CheckpointStore(tmp_path, num_kept=2)
    path = save(store, 1)
    (path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        store.read_state(path)


def test_an_evaluation_is_noted_without_touching_the_rest(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, num_kept=2)
    due = state_at(1).model_copy(update={"is_evaluation_due": True})
    path = asyncio.run(store.save(due, write_weights))
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="No space left"):
        patch.setattr("rlrecipes.tracking.log.os.fsync", refuse_disk)
        store.confirm_evaluated(1)
    assert store.read_state(path) == due
    store.confirm_evaluated(1)
    assert store.read_state(path) == state_at(1)
    assert sorted(file.name for file in path.iterdir()) == ["state.json", "weights"]


def test_the_same_step_can_be_saved_again(tmp_path):
    store = CheckpointStore(tmp_path, num_kept=2)
    save(store, 1)
    assert save(store, 1).name == "step_00000001"


@pytest.mark.parametrize(
    "override", ["schedule.num_steps=40", "parallel=tp2", "parallel=pp2", "weight_sync=disk", "tracking=local"]
)
def test_how_and_how_long_may_change(tmp_path, override):
    check_same_recipe(plan_of().to_data(), plan_of(override), tmp_path)


@pytest.mark.parametrize(
    "override",
    ["optim.lr=2e-6", "algo.group_size=4", "seed=1", "data.tasks.seed=9", "rollout.sampling.temperature=0.9"],
)
def test_what_is_learned_may_not_change_unseen(tmp_path, override):
    with pytest.raises(ConfigError) as caught:
        check_same_recipe(plan_of().to_data(), plan_of(override), tmp_path)
    assert override.partition("=")[0].rpartition(".")[2] in str(caught.value)
    check_same_recipe(plan_of().to_data(), plan_of(override, "resume=accept_changes"), tmp_path)


def test_a_run_directory_may_move_and_be_spelt_otherwise(tmp_path):
    saved = plan_of("recipe=quickstart_sft").to_data()
    check_same_recipe(saved, plan_of("recipe=quickstart_sft", f"runs_dir={tmp_path}/elsewhere"), tmp_path)


def test_another_algorithm_is_never_gone_on_with(tmp_path):
    with pytest.raises(ConfigError):
        check_same_recipe(plan_of("algo=sft").to_data(), plan_of("resume=accept_changes"), tmp_path)


def test_one_process_a_run_directory(tmp_path):
    with RunLock(tmp_path), pytest.raises(ConfigError, match="another process"), RunLock(tmp_path):
        pass
    with RunLock(tmp_path):
        pass
