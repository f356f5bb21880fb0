"""The reaper ends what a dead driver has started, wherever it writes, and nothing else."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from rlrecipes.runner import reaper
from rlrecipes.runner.reaper import DRIVER_VARIABLE

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
DRIVER = """
import os, subprocess, sys, time
os.environ[{variable!r}] = str(os.getpid())
child = subprocess.Popen({sleep!r}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
reaper = [sys.executable, "-I", "-S", {reaper!r}, str(os.getpid())]
subprocess.Popen(reaper, stdout=subprocess.DEVNULL, start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def strangers() -> Iterator[subprocess.Popen[bytes]]:
    """A process of another driver."""
    process = subprocess.Popen(SLEEP, env=os.environ | {DRIVER_VARIABLE: "1"})
    yield process
    process.kill()
    process.wait()


def test_children_of_a_killed_driver_end_and_those_of_others_live(strangers: subprocess.Popen[bytes]) -> None:
    code = DRIVER.format(variable=DRIVER_VARIABLE, sleep=SLEEP, reaper=reaper.__file__)
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    child = os.pidfd_open(int(driver.stdout.readline()))
    time.sleep(0.5)
    assert not _has_ended(child, 0)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert _has_ended(child, 10)
    assert strangers.poll() is None


def _has_ended(handle: int, wait_s: float) -> bool:
    return bool(select.select([handle], [], [], wait_s)[0])
