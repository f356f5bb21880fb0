"""Signals: what stops a run in order, and what cuts it short."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from rlrecipes.cli import sweep
from rlrecipes.cli.main import _stop
from rlrecipes.config.compose import compose
from rlrecipes.errors import Interrupted, RunError
from rlrecipes.plan.nodes import HostNode
from rlrecipes.plan.resolve import resolve
from rlrecipes.runner import faults, run
from rlrecipes.runner.faults import StopRequest

HOSTS = (HostNode(name="here", num_cpus=2, num_gpus=0, memory_bytes=1 << 34),)
BOTH = (signal.SIGINT, signal.SIGTERM)


class Exited(BaseException):
    pass


def test_one_stop_that_arrives_twice_is_one_and_a_later_one_cuts_the_run_short(monkeypatch):
    def leave(code):
        raise Exited(code)

    now_s = 100.0
    monkeypatch.setattr(faults.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(faults.os, "_exit", leave)
    stop = StopRequest()
    stop._receive(signal.SIGTERM)
    now_s = 101.9
    stop._receive(signal.SIGINT)
    with pytest.raises(Interrupted) as caught:
        stop.check()
    assert caught.value.signal_number == signal.SIGTERM
    now_s = 102.0
    with pytest.raises(Exited, match="130"):
        stop._receive(signal.SIGINT)


@pytest.fixture
def handlers():
    """As cli/main.py installs them."""
    before = [signal.signal(number, _stop) for number in BOTH]
    yield
    for number, handler in zip(BOTH, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("error", [None, RunError("trainer", "died", "rerun")])
def test_after_a_run_signals_have_the_handlers_that_they_had_before(monkeypatch, tmp_path, handlers, error):
    recipe = compose(["name=mine", f"runs_dir={tmp_path}"])
    plan, given = resolve(recipe.config, HOSTS, recipe.origins), StopRequest()
    parts = ("check_is_ready", "ServedClients", "build_plan_reward", "build_objective", "run_preparation")
    for part in (*parts, "build_inputs", "_lock"):
        monkeypatch.setattr(run, part, lambda *_, **__: None)

    async def execute(*parts):
        assert parts[-1] is given
        parts[-1].install()
        if error is not None:
            raise error

    monkeypatch.setattr(run, "_run", execute)
    try:
        run.run_plan(plan, given)
    except RunError as found:
        assert found is error
    assert [signal.getsignal(number) for number in BOTH] == [_stop, _stop]


@pytest.mark.parametrize("error", [None, RunError("trainer", "died", "rerun")])
def test_a_signal_that_comes_too_late_for_a_point_ends_the_sweep_after_it(monkeypatch, handlers, error):
    monkeypatch.setattr(sweep, "resolve_recipe", lambda recipe: recipe)

    def run_point(_, stop):
        async def finish():
            stop.install()
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(0.01)

        asyncio.run(finish())
        if error is not None:
            raise error

    monkeypatch.setattr(sweep, "run_and_tell", run_point)
    with pytest.raises(Interrupted) as caught:
        sweep._run_point(compose(["name=mine"]))
    assert caught.value.signal_number == signal.SIGTERM


SIDE_BY_SIDE = """
import sys, time
from pathlib import Path
from joblib import Parallel, delayed
from rlrecipes.errors import Interrupted
from rlrecipes.runner.faults import StopRequest

def work(number):
    from rlrecipes.cli.sweep import _STOP

    _STOP.listen()
    Path(f"{number}.started").touch()
    while number < 2:
        try:
            _STOP.check()
            time.sleep(0.05)
        except Interrupted:
            time.sleep(0.5)  # its checkpoint
            return "saved"

try:
    with StopRequest().left_to_children():
        print(Parallel(n_jobs=4, backend="loky")(delayed(work)(number) for number in range(2)), flush=True)
except Interrupted as stop:
    print("interrupted by", stop.signal_number)
"""


@pytest.mark.parametrize(("number", "should_signal_group"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_points_side_by_side_all_end_in_order(tmp_path, number, should_signal_group):
    process = subprocess.Popen(
        [sys.executable, "-c", SIDE_BY_SIDE], cwd=tmp_path, text=True, stdout=subprocess.PIPE, process_group=0
    )
    while not all((tmp_path / f"{point}.started").exists() for point in range(2)):
        assert process.poll() is None
        time.sleep(0.05)
    (os.killpg if should_signal_group else os.kill)(process.pid, number)
    said, _ = process.communicate(timeout=60)
    assert said == f"['saved', 'saved']\ninterrupted by {int(number)}\n"


@pytest.mark.parametrize("is_late", [False, True])
def test_a_worker_raises_nothing_and_begins_nothing_after_a_signal(monkeypatch, handlers, is_late):
    begun = []

    def run_point(recipe, stop):
        begun.append(recipe)
        signal.raise_signal(signal.SIGTERM)
        if not is_late:
            stop.check()

    monkeypatch.setattr(sweep, "_STOP", StopRequest())
    monkeypatch.setattr(sweep, "resolve_recipe", lambda recipe: recipe)
    monkeypatch.setattr(sweep, "run_and_tell", run_point)
    for recipe in ("first", "second"):
        sweep._run_in_worker(recipe)
    assert begun == ["first"]
