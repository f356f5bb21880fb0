"""Waits for the driver's death, however it comes, then kills what is left of its Ray. Stdlib only: up in a moment.

Ray's agents outlive a driver that was killed by a minute: they try to tell a head that is dead too. They give
themselves other names and are nobody's children by then, but every process of a Ray writes logs in its session's
directory, which is named after the driver's process. What trainer ranks have started (torch's compilers look for their
parent once a minute) writes nowhere, but has inherited DRIVER_VARIABLE.

    python reaper.py DRIVER_PID
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator

DRIVER_VARIABLE = "RLRECIPES_DRIVER"
"""In the environment of everything that a driver starts: the driver's process number."""
_SHARED_MEMORY_KEEPER = "torch_shm_manag"
"""torch's process that removes shared memory when its users have died; it inherits their files, and then ends."""
_INTERVAL_S = 0.1
_MAX_ROUNDS = 50


def run_reaper(driver_pid: int) -> None:
    """Wait for the driver's end and kill what it has left, by handles that a reused number cannot fool.

    Args:
        driver_pid: of the process that started this one.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    with contextlib.suppress(ProcessLookupError):
        driver = os.pidfd_open(driver_pid)
        if os.getppid() == driver_pid:
            select.select([driver], [], [])
    kill_left(driver_pid)


def kill_left(driver_pid: int) -> None:
    """Kill what a process has left: its Ray, and what has inherited DRIVER_VARIABLE with its number.

    Args:
        driver_pid: of the process; it may be the caller.
    """
    for _ in range(_MAX_ROUNDS):
        handles = list(_find_left(driver_pid))
        if not handles:
            return
        for handle in handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
        time.sleep(_INTERVAL_S)


def _find_left(driver_pid: int) -> Iterator[int]:
    session = re.compile(rf"/session_[^/]*_{driver_pid}/")
    inherited = f"{DRIVER_VARIABLE}={driver_pid}".encode()
    own = str(os.getpid())  # it has inherited the variable too
    for name in (name for name in os.listdir("/proc") if name.isdigit() and name != own):
        try:
            handle = os.pidfd_open(int(name))
        except OSError:
            continue  # it has ended
        is_found = False
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            is_found = _is_of_driver(f"/proc/{name}", session, inherited)
        if is_found:
            yield handle
        else:
            os.close(handle)


def _is_of_driver(process: str, session: re.Pattern[str], inherited: bytes) -> bool:
    with open(f"{process}/comm", encoding="utf-8") as comm:
        if comm.read().startswith(_SHARED_MEMORY_KEEPER):
            return False
    with open(f"{process}/environ", "rb") as environment:
        if inherited in environment.read().split(b"\0"):
            return True
    return any(session.search(os.readlink(entry.path)) for entry in os.scandir(f"{process}/fd"))


if __name__ == "__main__":
    run_reaper(int(sys.argv[1]))
