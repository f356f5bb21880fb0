"""Waits for a process to die, then kills the processes it names. Stdlib only: it must be up in a moment.

Ray's agents outlive a driver that was killed by a minute: they try to tell a head that is dead too.

    python reaper.py PARENT_PID PID...
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys


def run_reaper(parent_pid: int, pids: list[int]) -> None:
    """Wait for the parent's end and kill the others, by handles that a reused number cannot fool.

    Args:
        parent_pid: of the process that started this one.
        pids: of the processes to kill.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    parent = os.pidfd_open(parent_pid)
    handles = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    if os.getppid() == parent_pid:
        select.select([parent], [], [])
    for handle in handles:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)


if __name__ == "__main__":
    run_reaper(int(sys.argv[1]), [int(word) for word in sys.argv[2:]])
