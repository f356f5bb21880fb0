"""Machines of a run, where servers are started: this one, or others through whoever reaches them. Knows no ray."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rlrecipes.engines.sglang.process import ServerProcess, find_free_port

LOOPBACK = "127.0.0.1"
NODE_LABEL = "rlrecipes-node"
"""Ray's label of a node that was started for one machine of a Plan: its number."""
RAY_NODE_ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # it would put the trainer behind every other process of the host
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""What a node of Ray's is started with, whoever starts it."""


class Machine(Protocol):
    """Where servers are started."""

    @property
    def address(self) -> str:
        """At which processes of the run reach its servers."""

    def find_free_port(self) -> int:
        """A port of it that nobody listens on."""

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str], log_path: Path) -> ServerProcess:
        """Start a server there.

        Args:
            name: for messages.
            command: words.
            env: what differs from the machine's own environment; GPUs by their number in a Plan.
            log_path: on a disk that all machines see.

        Raises:
            EngineError: it cannot be started.
        """


class LocalMachine:
    """This machine.

    Args:
        address: at which others reach it; nobody has to where a run has one machine.
    """

    def __init__(self, address: str = LOOPBACK) -> None:
        self._address = address

    @property
    def address(self) -> str:
        """At which processes of the run reach its servers."""
        return self._address

    def find_free_port(self) -> int:
        """A port that nobody listens on."""
        return find_free_port()

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str], log_path: Path) -> ServerProcess:
        """Start a server.

        Raises:
            EngineError: its port is taken.
        """
        own = os.environ | env
        if "CUDA_VISIBLE_DEVICES" in env:
            own["CUDA_VISIBLE_DEVICES"] = to_visible_devices(env["CUDA_VISIBLE_DEVICES"])
        return ServerProcess(name, command, own, log_path)


class HostWorker:
    """What lives in one process of another machine: the servers started there. They end with it, however it ends."""

    def __init__(self) -> None:
        self._machine = LocalMachine()
        self._servers: dict[str, ServerProcess] = {}

    def find_free_port(self) -> int:
        """A port that nobody listens on."""
        return self._machine.find_free_port()

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str], log_path: str) -> tuple[int, int]:
        """Start a server; returns its process number, and where in its log it begins."""
        server = self._servers[name] = self._machine.start(name, command, env, Path(log_path))
        return server.pid, server.log_offset_bytes

    def poll(self, name: str) -> int | None:
        """Exit code of a server, or None while it runs."""
        return self._servers[name].poll()

    def stop(self, name: str, grace_s: float) -> None:
        """End a server."""
        self._servers[name].stop(grace_s)


def to_visible_devices(wanted: str) -> str:
    """GPUs by their number in a Plan, as this process's CUDA_VISIBLE_DEVICES names them: a job may be given some only.

    Args:
        wanted: numbers with commas between them.
    """
    given = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return ",".join(given[int(gpu)] for gpu in wanted.split(",")) if given and wanted else wanted
