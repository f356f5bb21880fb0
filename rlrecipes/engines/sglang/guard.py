"""Runs one command and outlives neither it nor the process that asked for it.

Started as a script, isolated and without site-packages: it must be up in a moment and import nothing of rlrecipes.
``PR_SET_PDEATHSIG`` alone would not do: it follows the thread that forked instead of its process, and reaches no
grandchild, where SGLang computes.

    python guard.py PARENT_PID COMMAND...

SIGTERM is passed on to the command; SIGUSR1 kills its whole process group. When the command ends, or the parent does,
however it dies, the group is killed. The exit code is the command's, or 128 + the signal that ended it.

Where the parent blocks SIGTERM, both stay deaf to it: a scheduler sends it to every process of a job, and the engines
must outlive the checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def run_guarded(parent_pid: int, command: list[str]) -> int:
    """Run a command until it or the parent ends.

    Args:
        parent_pid: of the process that started this one.
        command: words.

    Returns:
        The exit code to pass on.
    """
    parent = os.pidfd_open(parent_pid)
    if os.getppid() != parent_pid:
        return 1  # it died before it could be watched, and its number may be another's by now
    # One that came before its handler would leave the child alone.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS) - {signal.SIGUSR1}

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        child = subprocess.Popen(command, process_group=0, preexec_fn=unblock)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)
        return 127

    def kill_group(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, lambda *_: child.send_signal(signal.SIGTERM))
    signal.signal(signal.SIGUSR1, kill_group)
    unblock()
    select.select([parent, os.pidfd_open(child.pid)], [], [])
    kill_group()
    code = child.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(run_guarded(int(sys.argv[1]), sys.argv[2:]))
