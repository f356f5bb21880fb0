"""Signals and locks: how a run stops in order, and how two runs are kept out of one directory."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil

from rlrecipes.errors import ConfigError, Interrupted

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME_STOP_S = 2.0
"""One stop may arrive twice: sent to the process group, and passed on by a wrapper."""
_POLL_INTERVAL_S = 0.2


class StopRequest:
    """SIGINT or SIGTERM, seen by the loop where it can stop without losing anything.

    The first signal cancels what may be cancelled; another one, two seconds later or more, ends the process at once
    (children die with it).
    """

    def __init__(self) -> None:
        self._signal: int | None = None
        self._received_s = 0.0
        self._task: asyncio.Task[Any] | None = None

    def install(self) -> None:
        """Take over both signals; call inside the running event loop."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._receive, number)

    def listen(self) -> None:
        """Take over both signals where no event loop runs; a process started deaf to them hears from now on."""
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, _: self._receive(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    @contextmanager
    def left_to_children(self) -> Iterator[None]:
        """Hand signals on to child processes, which work for this one, and wait for them all the same.

        They are started deaf, and hear when they :meth:`listen`: one that has nothing to stop must not die of a signal.

        Raises:
            Interrupted: at the end, when a signal has come.
        """
        is_over = threading.Event()

        def hand_on(number: int, _: FrameType | None = None) -> None:
            for child in psutil.Process().children():  # of the process group, they have it: a second copy is no matter
                with contextlib.suppress(psutil.Error):
                    child.send_signal(number)
            self._receive(number)

        def wait() -> None:
            while not is_over.is_set():
                found = signal.sigtimedwait(STOP_SIGNALS, _POLL_INTERVAL_S)
                if found is not None:
                    hand_on(found.si_signo)

        resource_tracker.ensure_running()  # its start ends deafness, so not later
        waiting = threading.Thread(target=wait, daemon=True)
        with keeping_signal_handlers():
            for number in STOP_SIGNALS:
                signal.signal(number, hand_on)
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            waiting.start()
            try:
                yield
            finally:
                is_over.set()
                waiting.join()
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                self.check()

    def _receive(self, number: int) -> None:
        if self._signal is not None:
            if time.monotonic() - self._received_s >= _SAME_STOP_S:
                os._exit(128 + number)
            return
        self._signal, self._received_s = number, time.monotonic()
        if self._task is not None:
            self._task.cancel()

    def check(self) -> None:
        """Raise when a signal has come.

        Raises:
            Interrupted: it has.
        """
        if self._signal is not None:
            raise Interrupted(self._signal)

    async def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that may be cancelled without loss.

        Raises:
            Interrupted: a signal came before or meanwhile; the work has ended.
        """
        if self._signal is not None:
            work.close()
            self.check()
        self._task = task = asyncio.create_task(work)
        try:
            result: T = await task
            return result
        except asyncio.CancelledError:
            self.check()
            raise
        finally:
            self._task = None


@contextmanager
def keeping_signal_handlers() -> Iterator[None]:
    """Put the handlers of both signals back at the end, where an event loop that took them over leaves the defaults."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class RunLock:
    """At most one process runs in a run directory.

    Args:
        run_dir: made when missing.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._file: IO[str] | None = None

    def __enter__(self) -> RunLock:
        """Take the lock; it falls with the process, however that dies.

        Raises:
            ConfigError: another process has it, or the directory cannot be made.
        """
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            self._file = (self._run_dir / ".lock").open("w")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            problem = f"another process runs in {self._run_dir}"
            raise ConfigError("run_dir", problem, "wait for it, or choose another name or run_dir") from error
        except OSError as error:
            problem = f"{self._run_dir} cannot be made: {error.strerror}"
            raise ConfigError("run_dir", problem, "choose a writable place") from error
        return self

    def __exit__(self, *exception: object) -> None:
        """Release it."""
        if self._file is not None:
            self._file.close()
