"""What a run finds in its directory: nothing of another run is lost, and nobody else's is touched."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from rlrecipes.config.compose import compose
from rlrecipes.errors import ConfigError
from rlrecipes.plan.lock import build_lock
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.resolve import resolve
from rlrecipes.runner import preparation, run
from rlrecipes.runner.checkpoint import CheckpointStore
from rlrecipes.runner.faults import RunLock
from rlrecipes.runner.preparation import run_preparation
from rlrecipes.tracking.log import MetricLog

HOSTS = (HostNode(name="here", num_cpus=2, num_gpus=0, memory_bytes=1 << 34),)


@pytest.fixture
def plan(tmp_path):
    recipe = compose(["name=mine", f"runs_dir={tmp_path}"])
    return resolve(recipe.config, HOSTS, recipe.origins)


def find_resume_point(plan, tmp_path):
    return run._find_resume_point(plan, CheckpointStore(tmp_path / "mine", num_kept=2))


def test_a_run_whose_checkpoints_are_gone_keeps_its_metrics(plan, tmp_path):
    log = MetricLog(tmp_path / "mine" / "metrics.jsonl")
    log.append(1, {"train/loss": 1.0})
    assert find_resume_point(plan, tmp_path) == (None, None)  # it died before it saved anything
    log.append(2, {"time/checkpoint_s": 1.0})
    log.append(3, {"train/loss": 1.0})
    with pytest.raises(ConfigError, match="metrics to step 3 and no checkpoint any more") as caught:
        find_resume_point(plan, tmp_path)
    assert f"remove {log.path}" in caught.value.problems[0].fix
    log.path.unlink()
    assert find_resume_point(plan, tmp_path) == (None, None)


def test_a_resume_leaves_the_data_that_it_began_with(plan, tmp_path, monkeypatch):
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in ("train_path", "eval_path")}
    plan = plan.model_copy(update={"data": plan.data.model_copy(update=paths)})
    monkeypatch.setattr(preparation, "_write_random_model", lambda *_, **__: None)
    run_preparation(plan, is_new=True)
    lock, began_with = build_lock(plan), Path(paths["train_path"]).read_bytes()

    def prepare_with_another_release():
        with monkeypatch.context() as patch:
            patch.setattr("rlrecipes.data.reasoning_tasks.version", lambda _: "9.9")
            patch.setattr("rlrecipes.data.reasoning_tasks._generate", lambda _: itertools.repeat(b"{}\n"))
            run_preparation(plan, is_new=False, lock=lock)
        return Path(paths["train_path"]).read_bytes()

    assert prepare_with_another_release() == began_with
    Path(paths["eval_path"]).unlink()
    assert prepare_with_another_release() != began_with  # refused then: it is not the file it was


def test_an_evaluation_leaves_a_live_run_alone(plan, tmp_path, monkeypatch):
    for part in ("check_is_ready", "ServedClients", "build_plan_reward", "write_tasks", "build_inputs"):
        monkeypatch.setattr(run, part, lambda *_, **__: None)

    async def evaluate(*_):
        return "evaluated"

    monkeypatch.setattr(run, "_evaluate", evaluate)
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"is_random": False})})
    with RunLock(tmp_path / "mine"), pytest.raises(ConfigError, match="another process runs in .*mine"):
        run.run_held_out_evaluation(plan)
    assert run.run_held_out_evaluation(plan) == "evaluated"
