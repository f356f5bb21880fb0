"""Signals: what stops a run in order, and what cuts it short."""

from __future__ import annotations

import signal

import pytest

from rlrecipes.errors import Interrupted
from rlrecipes.runner import faults
from rlrecipes.runner.faults import StopRequest


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
