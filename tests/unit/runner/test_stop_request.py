"""Signals: what stops a run in order, and what cuts it short."""

from __future__ import annotations

import asyncio
import signal

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
    for part in (*parts, "build_inputs", "_lock", "_write_plan"):
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
