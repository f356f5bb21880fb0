"""Engines and routers as processes, started together and stopped together; and engines others run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlrecipes.config.schema import WorkerType
from rlrecipes.engines.sglang.client import EngineClient
from rlrecipes.engines.sglang.process import STANDINS, ServerProcess, wait_until_joined, wait_until_workers
from rlrecipes.errors import EngineError, WeightSyncError
from rlrecipes.plan.nodes import POLICY, DeviceNode, Plan, ProcessNode, ServedModelNode
from rlrecipes.runner.machines import LocalMachine, Machine

_ROUTERS_FILE = "routers.json"
_DEATH_S = 3.0
"""A server that dies drops its callers a moment before it has ended."""
_POLL_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine that answers.

    Attributes:
        url: where it listens.
        worker_type: what it does.
        num_ranks: its processes that hold weights, TP x PP.
        client: for administration.
        is_updated: whether weight syncs reach it.
        is_colocated: whether it lies on the trainer's GPUs and can give their memory back, which encoders cannot.
        devices: of its ranks, in order; none are known of an engine that somebody else runs.
        process: it; None when somebody else runs it.
        bootstrap_port: where a prefill engine hands over its KV cache.
    """

    url: str
    worker_type: WorkerType
    num_ranks: int
    client: EngineClient
    is_updated: bool
    is_colocated: bool = False
    devices: tuple[DeviceNode, ...] = ()
    process: ServerProcess | None = None
    bootstrap_port: int | None = None


class ServedModel:
    """The engines and the router of one model.

    Args:
        node: from the Plan.
        log_dir: one log a process is kept there.
        announce: called when the router answers, before anybody joins.
        machines: by their number in the Plan; the router is started on this one.
    """

    def __init__(
        self,
        node: ServedModelNode,
        log_dir: Path,
        announce: Callable[[ServedModelNode, str], None],
        machines: Mapping[int, Machine],
    ) -> None:
        self._node = node
        self._log_dir = log_dir
        self._machines = machines
        self._announce = announce
        self._processes: list[ServerProcess] = []
        self.engines: list[Engine] = []
        self.router_url = ""

    def launch(self) -> None:
        """Start every engine process; does not wait. Encoders come first: others are told where they are."""
        groups = sorted(self._node.server_groups, key=lambda group: group.worker_type != "encoder")
        for group in groups:
            is_encoder = group.worker_type == "encoder"
            for node in group.engines:
                machine = self._machines[node.devices[0].node]
                bootstrap_port = machine.find_free_port()
                values = {
                    "model_path": str(Path(self._node.path).absolute()),
                    "bootstrap_port": str(bootstrap_port),
                    "encoder_urls": " ".join(self._urls("encoder")),
                }
                if node.followers:
                    values["dist_init_addr"] = f"{machine.address}:{machine.find_free_port()}"
                url, process = self._launch(machine, node, values)
                for follower in node.followers:
                    self._launch(self._machines[follower.devices[0].node], follower, values)
                engine = Engine(
                    url,
                    group.worker_type,
                    group.gpus_per_engine,
                    EngineClient(url),
                    is_updated=self._node.is_updated and not is_encoder,  # it holds no weights of the trainer
                    is_colocated=group.placement == "colocated" and not is_encoder,
                    devices=tuple(device for part in (node, *node.followers) for device in part.devices),
                    process=process,
                    bootstrap_port=bootstrap_port,
                )
                self.engines.append(engine)

    async def wait_until_ready(self) -> None:
        """Wait for the engines, then start the router and wait until it knows them all.

        Raises:
            EngineError: one did not come up in time, or one that others run is not what the recipe says.
        """
        await asyncio.gather(*(self._wait(engine) for engine in self.engines))
        for group in self._node.server_groups:
            self.engines += await asyncio.gather(*(self._meet(url, group.worker_type) for url in group.urls))
        await self._start_router()

    async def _wait(self, engine: Engine) -> None:
        timeouts_s = {node.name: node.start_timeout_s for node in self._node.engines}
        if engine.process is not None:
            await engine.process.wait_until_ready(engine.url, timeouts_s[engine.process.name])

    async def _start_router(self) -> None:
        node = self._node.router
        behind = [engine for engine in self.engines if engine.worker_type != "encoder"]
        prefill = [f"--prefill {e.url} {e.bootstrap_port}" for e in behind if e.worker_type == "prefill"]
        values = {
            "worker_urls": " ".join(engine.url for engine in behind),
            "prefill_urls": " ".join(prefill),
            "decode_urls": " ".join(f"--decode {url}" for url in self._urls("decode")),
        }
        url, router = self._launch(LocalMachine(), node, values)
        await router.wait_until_ready(url, node.start_timeout_s)
        self.router_url = url  # only now: another model's announcement tells every router that has one
        self._announce(self._node, self.router_url)
        urls = [engine.url for engine in behind]
        await wait_until_workers(self.router_url, urls, node.start_timeout_s)
        if self._node.num_joining_engines:
            wanted, timeout_s = self._node.num_joining_engines, self._node.join_timeout_s
            joined = await wait_until_joined(self.router_url, urls, wanted, timeout_s)
            self.engines += await asyncio.gather(*(self._meet(url, None) for url in joined))

    async def _meet(self, url: str, worker_type: WorkerType | None) -> Engine:
        """An engine somebody else runs, described by itself.

        Raises:
            EngineError: it does not answer, or it does something else than the recipe says.
        """
        client = EngineClient(url)
        try:
            info = await client.server_info()
        except EngineError as error:
            fix = "start it, or name another url: it is one of those that others run"
            raise EngineError(f"engine {url}", error.problems[0].problem, fix) from error
        mode = info.get("disaggregation_mode") or "null"
        found: WorkerType = "regular" if mode == "null" else "prefill" if mode == "prefill" else "decode"
        if worker_type not in (None, found):
            fix = f"set worker_type={found}, or name other urls"
            raise EngineError(f"engine {url}", f"is a {found} worker; the recipe says {worker_type}", fix)
        num_ranks = int(info.get("tp_size") or 1) * int(info.get("pp_size") or 1)
        port = info.get("disaggregation_bootstrap_port")
        return Engine(url, found, num_ranks, client, is_updated=self._node.is_updated, bootstrap_port=port)

    def _urls(self, worker_type: WorkerType) -> Iterable[str]:
        return (engine.url for engine in self.engines if engine.worker_type == worker_type)

    def _launch(self, machine: Machine, node: ProcessNode, values: Mapping[str, str]) -> tuple[str, ServerProcess]:
        python = str(Path(node.python).absolute()) if node.python else sys.executable
        port = _chosen_port(node.command) or machine.find_free_port()
        filled = {
            "python": python,
            "host": machine.address,
            "port": str(port),
            "metrics_port": str(machine.find_free_port()),
            "nccl_port": str(machine.find_free_port()),
            "standins": str(STANDINS),
            **values,
        }
        command = [part for word in node.command for part in _fill(word, filled)]
        env = {name: _fill(value, filled)[0] for name, value in node.env.items()}
        process = machine.start(node.name, command, env, self._log_dir / f"{node.name}.log")
        self._processes.append(process)
        return f"http://{machine.address}:{port}", process

    def check_alive(self) -> None:
        """Raise when a process has died.

        Raises:
            EngineError: names it, with the end of its log.
        """
        for process in self._processes:
            process.check_alive()

    async def close(self) -> None:
        """Stop router and engines; engines that others run go on."""
        for engine in self.engines:
            await engine.client.close()
        await asyncio.gather(*(asyncio.to_thread(process.stop) for process in reversed(self._processes)))
        self.engines, self._processes = [], []


class Serving:
    """Every served model of a Plan, by name. Where their routers are stands in ``routers.json`` of the run directory.

    Args:
        plan: the Plan.
        show: tells a person something.
        machines: by their number in the Plan; None: this one alone.
    """

    def __init__(self, plan: Plan, show: Callable[[str], None], machines: Mapping[int, Machine] | None = None) -> None:
        run_dir = Path(plan.run_dir)
        places = machines or {0: LocalMachine()}
        self._models = {
            node.name: ServedModel(node, run_dir / "logs", self._announce, places) for node in plan.served_models
        }
        self._routers_file = run_dir / _ROUTERS_FILE
        self._show = show

    def __bool__(self) -> bool:
        return bool(self._models)

    def launch(self) -> None:
        """Start every engine process; does not wait."""
        self._routers_file.unlink(missing_ok=True)  # of a run that was killed
        for model in self._models.values():
            model.launch()

    async def wait_until_ready(self) -> None:
        """Wait until every model's router knows its engines.

        Raises:
            EngineError: one did not come up in time.
        """
        await asyncio.gather(*(model.wait_until_ready() for model in self._models.values()))

    def _announce(self, node: ServedModelNode, router_url: str) -> None:
        urls = {name: model.router_url for name, model in self._models.items() if model.router_url}
        draft = self._routers_file.with_suffix(".draft")
        draft.write_text(json.dumps(urls, indent=2) + "\n", encoding="utf-8")
        draft.rename(self._routers_file)
        if node.num_joining_engines:
            url = '{"url": "http://<engine>"}'
            self._show(
                f"{node.name}: waiting {node.join_timeout_s:g} s for {node.num_joining_engines} engines to join;"
                f" register each: POST {router_url}/workers {url}"
            )

    def check_alive(self) -> None:
        """Raise when a process has died.

        Raises:
            EngineError: names it, with the end of its log.
        """
        for model in self._models.values():
            model.check_alive()

    @contextlib.asynccontextmanager
    async def naming_deaths(self) -> AsyncIterator[None]:
        """Say which process died, where a call has failed because one did.

        Raises:
            EngineError: in place of an error of an engine or a sync: with the end of the dead process's log.
        """
        try:
            yield
        except (EngineError, WeightSyncError):
            deadline = time.monotonic() + _DEATH_S
            while time.monotonic() < deadline:
                self.check_alive()
                await asyncio.sleep(_POLL_INTERVAL_S)
            raise

    @property
    def policy_engines(self) -> list[Engine]:
        """Engines of the model being trained."""
        return self._models[POLICY].engines

    @property
    def updated_engines(self) -> list[Engine]:
        """Engines that weight syncs reach, of all models."""
        return [engine for engine in self._engines if engine.is_updated]

    @property
    def colocated_engines(self) -> list[Engine]:
        """Engines on the trainer's GPUs, of all models."""
        return [engine for engine in self._engines if engine.is_colocated]

    @property
    def _engines(self) -> Iterable[Engine]:
        return (engine for model in self._models.values() for engine in model.engines)

    def router_url(self, name: str) -> str:
        """Where a model is asked.

        Args:
            name: of the served model.
        """
        return self._models[name].router_url

    async def close(self) -> None:
        """Stop everything."""
        self._routers_file.unlink(missing_ok=True)
        await asyncio.gather(*(model.close() for model in self._models.values()))


def _fill(word: str, values: Mapping[str, str]) -> list[str]:
    """Placeholders are whole words, those in the plural several; anything else in braces is the option's own."""
    name = word.removeprefix("{").removesuffix("}")
    if word != f"{{{name}}}" or name not in values:
        return [word]
    return values[name].split() if name.endswith("_urls") else [values[name]]


def _chosen_port(command: tuple[str, ...]) -> int | None:
    value = command[command.index("--port") + 1] if "--port" in command else ""
    return int(value) if value.isdigit() else None
