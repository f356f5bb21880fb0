"""Engines and routers as processes of this host, started together and stopped together."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlrecipes.engines.sglang.client import EngineClient
from rlrecipes.engines.sglang.process import STANDINS, ServerProcess, find_free_port, wait_until_workers
from rlrecipes.plan.nodes import ProcessNode, ServedModelNode


@dataclass(frozen=True, slots=True)
class Engine:
    """One running engine.

    Attributes:
        url: where it listens.
        num_ranks: its tensor-parallel size.
        client: for administration.
        process: it.
    """

    url: str
    num_ranks: int
    client: EngineClient
    process: ServerProcess


class ServedModel:
    """The engines and the router of one model.

    Args:
        node: from the Plan.
        log_dir: one log a process is kept there.
    """

    def __init__(self, node: ServedModelNode, log_dir: Path) -> None:
        self._node = node
        self._log_dir = log_dir
        self._router: ServerProcess | None = None
        self.engines: list[Engine] = []
        self.router_url = ""

    def launch(self) -> None:
        """Start every engine process; does not wait."""
        for group in self._node.server_groups:
            for engine in group.engines:
                url, process = self._launch(engine, {"model_path": str(Path(self._node.path).absolute())})
                self.engines.append(Engine(url, group.gpus_per_engine, EngineClient(url), process))

    async def wait_until_ready(self) -> None:
        """Wait for the engines, then start the router and wait until it knows them all.

        Raises:
            EngineError: one did not come up in time.
        """
        nodes = self._node.engines
        await asyncio.gather(
            *(
                engine.process.wait_until_ready(engine.url, node.start_timeout_s)
                for engine, node in zip(self.engines, nodes, strict=True)
            )
        )
        urls = [engine.url for engine in self.engines]
        self.router_url, self._router = self._launch(self._node.router, {"worker_urls": " ".join(urls)})
        await self._router.wait_until_ready(self.router_url, self._node.router.start_timeout_s)
        await wait_until_workers(self.router_url, urls, self._node.router.start_timeout_s)

    def _launch(self, node: ProcessNode, values: Mapping[str, str]) -> tuple[str, ServerProcess]:
        python = str(Path(node.python).absolute()) if node.python else sys.executable
        port = _chosen_port(node.command) or find_free_port()
        filled = {
            "python": python,
            "port": str(port),
            "metrics_port": str(find_free_port()),
            "standins": str(STANDINS),
            **values,
        }
        command = [part for word in node.command for part in _fill(word, filled)]
        env = os.environ | {name: _fill(value, filled)[0] for name, value in node.env.items()}
        process = ServerProcess(node.name, command, env, self._log_dir / f"{node.name}.log")
        return f"http://127.0.0.1:{port}", process

    def check_alive(self) -> None:
        """Raise when a process has died.

        Raises:
            EngineError: names it, with the end of its log.
        """
        processes = [engine.process for engine in self.engines] + ([self._router] if self._router else [])
        for process in processes:
            process.check_alive()

    async def close(self) -> None:
        """Stop router and engines."""
        for engine in self.engines:
            await engine.client.close()
        processes = ([self._router] if self._router else []) + [engine.process for engine in self.engines]
        await asyncio.gather(*(asyncio.to_thread(process.stop) for process in processes))
        self.engines, self._router = [], None


def _fill(word: str, values: Mapping[str, str]) -> list[str]:
    """Placeholders are whole words; anything else in braces is the option's own."""
    if word == "{worker_urls}":
        return values["worker_urls"].split()
    name = word.removeprefix("{").removesuffix("}")
    return [values[name]] if word == f"{{{name}}}" and name in values else [word]


def _chosen_port(command: tuple[str, ...]) -> int | None:
    value = command[command.index("--port") + 1] if "--port" in command else ""
    return int(value) if value.isdigit() else None
