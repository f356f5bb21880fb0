"""Server and router processes. Owns their start, their end and what their log says; builds no command line (plan)."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from os import getpid
from pathlib import Path

import aiohttp
import psutil

from rlrecipes.errors import EngineError

STANDINS = Path(__file__).parent / "standins"
"""Directory for PYTHONPATH of a real SGLang server on a CPU, and of nothing else."""
_GUARD = Path(__file__).parent / "guard.py"
_LOOPBACK = "127.0.0.1"
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_PORT = 10_000
"""Ports that a run chooses lie from here to where those begin that the kernel gives away by itself."""
_NUM_PORTS_TO_TRY = 64
_POLL_INTERVAL_S = 0.1
_PROBE_TIMEOUT_S = 5.0
_KILL_TIMEOUT_S = 10.0
_NUM_TAIL_LINES = 15
_MAX_LINE_CHARACTERS = 300
_TAIL_BYTES = 64 * 1024
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_NOISE = re.compile(r'^$|^\s|^Traceback|"(GET|POST) /|Warning: ')
"""Indented lines are a traceback's files and code; the error it ends with is not indented."""
_KNOWN_CAUSES = (
    (r"(?i)address already in use|port \d+ is (not available|in use)", "its port was taken meanwhile: start again"),
    (
        r"Repo id must be in the form|Unrecognized model in|config\.json|No such file or directory: '\S*model",
        "give the path of a directory that holds config.json, the weights and the tokenizer",
    ),
    (r"No module named '?sglang", "this interpreter has no SGLang: run `make sglang`, or give one that has"),
    (r"^cannot start ", "give the path of an existing interpreter"),
    (
        r"Not enough memory.*increase --mem-fraction-static",
        "its KV cache has no room: raise mem_fraction_static, or end other processes on its GPUs",
    ),
    (
        r"(?i)out[ _]of[ _]memory|OOM killer",
        "give the engine's KV cache less memory (max_total_tokens, mem_fraction_static)",
    ),
    (
        r"(?s)crashed with exit code -9\b|\Aended with exit code 137\b(?!.*SIGQUIT)",  # SGLang ends itself so too
        "it was killed, by the host's OOM killer or by hand: free memory of the host, then rerun",
    ),
    (r"unrecognized arguments|invalid choice", "correct the option; the engine's own names are passed through"),
)


def find_free_port() -> int:
    """A TCP port of this host that nobody listens on, kept for a minute for whoever binds it by number.

    A server binds its port long after it was chosen, and meanwhile others open sockets by the hundred. So it lies
    outside the range that the kernel gives away by itself, and a closed connection of its own (TIME_WAIT) makes it look
    taken to the next caller of this function, in whatever process.
    """
    with socket.socket() as probe:
        for port in _list_ports_to_try():
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                break
        found: int = probe.getsockname()[1]
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_LOOPBACK, found))
        listener.listen(1)
        with socket.create_connection((_LOOPBACK, found)) as caller:
            answerer, _ = listener.accept()
            answerer.close()  # before the caller: TIME_WAIT stays with whoever closes first
            caller.recv(1)
    return found


def _list_ports_to_try() -> list[int]:
    """Some of no use to the kernel, then 0: any."""
    try:
        ephemeral = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except OSError:  # not Linux
        return [0]
    outside = range(FIRST_PORT, ephemeral)
    return [*random.SystemRandom().sample(outside, k=min(_NUM_PORTS_TO_TRY, len(outside))), 0]


def read_log_tail(log_path: Path, offset_bytes: int = 0) -> str:
    """The last lines of a log that say something, repeated ones once.

    Args:
        log_path: may be missing.
        offset_bytes: where to start; what an earlier process wrote before it is left out.
    """
    try:
        with log_path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(offset_bytes, log.tell() - _TAIL_BYTES))
            lines = _COLOUR.sub("", log.read().decode(errors="replace")).splitlines()
    except OSError:
        return "(no log)"
    told = dict.fromkeys(line[:_MAX_LINE_CHARACTERS] for line in lines if not _NOISE.search(line))
    return "\n".join(list(told)[-_NUM_TAIL_LINES:]) or "(the log is empty)"


class ServerProcess:
    """One server, started when built, in a session of its own.

    It and everything it started end when ``stop`` is called, when it ends itself, and when this process ends in any
    way, kill -9 included (see guard.py).

    Args:
        name: for messages.
        command: words; a ``--port`` among them is checked to be free.
        env: the whole environment.
        log_path: output is appended there; parents are made.

    Raises:
        EngineError: the port is taken.
    """

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._check_port(command)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self.log_offset_bytes = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARD), str(getpid()), *command],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the guard, whose only child is the server."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit code, or None while it runs; 128 + the signal when one ended it."""
        return self._process.poll()

    def check_alive(self) -> None:
        """Raise when the process has ended.

        Raises:
            EngineError: with its exit code and the end of its log.
        """
        code = self.poll()
        if code is not None:
            raise self._error(f"ended with exit code {code}")

    async def wait_until_ready(self, url: str, timeout_s: float) -> None:
        """Wait until ``GET /health`` answers 200; stops the process when it does not in time.

        Args:
            url: of the server.
            timeout_s: longest wait.

        Raises:
            EngineError: it ended first, or time is over.
        """
        deadline = time.monotonic() + timeout_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)) as session:
            while time.monotonic() < deadline:
                self.check_alive()
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(f"{url}/health") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(_POLL_INTERVAL_S)
        error = self._error(f"did not answer {url}/health within {timeout_s:g} s")
        await asyncio.to_thread(self.stop, 0.0)
        raise error

    def stop(self, grace_s: float = 5.0) -> None:
        """End the server and everything it started; does nothing when it has ended.

        Args:
            grace_s: how long it may take to end by itself.
        """
        is_deaf = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())  # as its guard is (see there)
        self._process.terminate()
        try:
            self._process.wait(0.0 if is_deaf else grace_s)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGUSR1)
            self._process.wait(_KILL_TIMEOUT_S)

    def _check_port(self, command: Sequence[str]) -> None:
        if "--port" not in command:
            return
        port = int(command[command.index("--port") + 1])
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("", port))
            except OSError as error:
                problem = f"port {port} is taken{_find_owner(port)}"
                fix = "stop that process, or leave the port out to have a free one found"
                raise EngineError(f"engine {self.name}", problem, fix) from error

    def _error(self, what: str) -> EngineError:
        tail = read_log_tail(self.log_path, self.log_offset_bytes)
        fixes = (fix for pattern, fix in _KNOWN_CAUSES if re.search(pattern, f"{what}\n{tail}", re.MULTILINE))
        indented = "\n".join(f"        {line}" for line in tail.splitlines())
        problem = f"{what}; the end of {self.log_path}:\n{indented}"
        return EngineError(f"engine {self.name}", problem, next(fixes, f"read {self.log_path}"))


def _find_owner(port: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""


async def wait_until_workers(router_url: str, worker_urls: Iterable[str], timeout_s: float) -> None:
    """Wait until a router has registered every engine and finds it healthy; requests sent before are refused.

    Args:
        router_url: of the router.
        worker_urls: of all engines.
        timeout_s: longest wait.

    Raises:
        EngineError: names the engines it does not know.
    """
    deadline = time.monotonic() + timeout_s
    missing = set(worker_urls)
    while missing and time.monotonic() < deadline:
        missing -= await _read_healthy_workers(router_url)
        await asyncio.sleep(_POLL_INTERVAL_S if missing else 0)
    if missing:
        raise EngineError(
            f"router {router_url}",
            f"did not find these engines healthy within {timeout_s:g} s: {', '.join(sorted(missing))}",
            "look at the router's and the engines' logs in <run_dir>/logs",
        )


async def wait_until_joined(router_url: str, known_urls: Iterable[str], num_wanted: int, timeout_s: float) -> list[str]:
    """Wait until others have registered engines at a router.

    Args:
        router_url: of the router.
        known_urls: engines that were there before.
        num_wanted: how many must join.
        timeout_s: longest wait.

    Returns:
        Their addresses, sorted.

    Raises:
        EngineError: fewer came in time.
    """
    deadline = time.monotonic() + timeout_s
    joined: set[str] = set()
    while len(joined) < num_wanted and time.monotonic() < deadline:
        joined = await _read_healthy_workers(router_url) - set(known_urls)
        await asyncio.sleep(_POLL_INTERVAL_S if len(joined) < num_wanted else 0)
    if len(joined) < num_wanted:
        problem = f"{len(joined)} of {num_wanted} engines joined within {timeout_s:g} s"
        fix = f'register each: POST {router_url}/workers {{"url": "http://<engine>"}}'
        raise EngineError(f"router {router_url}", problem, fix)
    return sorted(joined)


async def _read_healthy_workers(router_url: str) -> set[str]:
    """Engines that a router finds healthy; none while it does not answer."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)) as session,
            session.get(f"{router_url}/workers") as response,
        ):
            workers = (await response.json())["workers"]
            return {worker["url"] for worker in workers if worker["is_healthy"]}
    return set()
