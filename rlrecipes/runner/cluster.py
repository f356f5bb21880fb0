"""A run's Ray: one of its own, or a cluster that others started; trainer ranks are its actors.

The only user of ray; its words stop here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from rlrecipes.engines.sglang.process import ServerProcess, read_log_tail
from rlrecipes.errors import ConfigError, EngineError, RecipeError, TrainerError
from rlrecipes.plan.cluster import RAY_ADDRESS, is_on_ray
from rlrecipes.plan.hosts import LAST_PORT, SHARED_MEMORY_BYTES, FoundHost
from rlrecipes.plan.nodes import HostNode, Plan
from rlrecipes.runner.machines import NODE_LABEL, RAY_NODE_ENVIRONMENT, HostWorker, LocalMachine, Machine
from rlrecipes.runner.rank import RankWorker
from rlrecipes.runner.reaper import DRIVER_VARIABLE

os.environ["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"] = "1"  # Ray's C++ core would take SIGTERM for a crash; read on import
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_NODES_TIMEOUT_S = 60.0
_PLACEMENT_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 30.0
_START_TIMEOUT_S = 180.0
_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 60.0
_ACCELERATOR = "accelerator_type:"
_OUT_OF_MEMORY = re.compile(r"(?i)out[ _]of[ _]memory|CUBLAS_STATUS_ALLOC_FAILED")
_ADVICE = " If reserved but unallocated memory is large"
"""Where torch's own message begins to say what may help; before it stands who holds how much."""
_JOIN_FIX = "run this on a machine of the cluster; beside host:port set RAY_AUTH_MODE=token where Ray asks for one"
_COMPUTING = ("train_step", "critic_step", "compute_logprobs", "compute_values", "compute_teacher_topk")


class TrainerGroup:
    """All trainer ranks of a run.

    Args:
        plan: the Plan.
        log_dir: one log a rank is kept there.
        cluster: where they run; launched before they start.
    """

    def __init__(self, plan: Plan, log_dir: Path, cluster: RayCluster) -> None:
        self._plan = plan
        self._cluster = cluster
        self._log_paths = [log_dir / f"trainer-{rank}.log" for rank in range(plan.trainer.num_ranks)]
        self._actors: list[Any] = []

    async def start(self) -> None:
        """Start every rank.

        Raises:
            TrainerError: a rank did not start in time.
        """
        nodes = [device.node for device in self._plan.trainer.devices]
        machines = self._cluster.machines
        master, port = machines[nodes[0]].address, machines[nodes[0]].find_free_port()
        worker = ray.remote(RankWorker)
        plan_json = self._plan.model_dump_json()
        self._actors = [
            worker.options(**self._cluster.to_options(nodes[rank])).remote(
                plan_json, rank, master, port, machines[nodes[rank]].address, str(path.absolute())
            )
            for rank, path in enumerate(self._log_paths)
        ]
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self.run("start")
        except TimeoutError as error:
            problem = f"trainer ranks did not start in {_START_TIMEOUT_S:g} s"
            raise TrainerError("trainer", problem, f"see {self._log_paths[0]}") from error

    async def run(
        self,
        method: str,
        *shared: Any,
        per_rank: Sequence[Sequence[Any]] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> list[Any]:
        """Call a method of RankWorker on every rank, or on some, and wait for all.

        The first failure ends the wait: other ranks may hang in a collective that will never complete.

        Args:
            method: its name.
            shared: arguments for every rank.
            per_rank: each called rank's own arguments, which come first.
            ranks: which are called; all by default.

        Returns:
            One result a called rank.

        Raises:
            RecipeError: what a rank raised; TrainerError when one died.
        """
        called = range(len(self._actors)) if ranks is None else ranks
        if not called:
            return []
        own = per_rank if per_rank is not None else [()] * len(called)
        references = [
            getattr(self._actors[rank], method).remote(*arguments, *shared)
            for rank, arguments in zip(called, own, strict=True)
        ]
        waits = [asyncio.wrap_future(reference.future()) for reference in references]
        done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION)
        for wait in pending:
            wait.cancel()
        for rank, wait in zip(called, waits, strict=True):
            if wait in done and wait.exception() is not None:
                raise self._to_error(rank, method, wait.exception())
        return [wait.result() for wait in waits]

    def _to_error(self, rank: int, method: str, error: BaseException | None) -> RecipeError:
        where = f"trainer rank {rank}"
        log = self._log_paths[rank]
        fix = f"see {log}; rerun the same command to resume from the last checkpoint"
        if isinstance(error, RayTaskError):
            if isinstance(error.cause, RecipeError):
                return error.cause
            cause = error.cause
            if self._plan.trainer.device == "cuda" and _OUT_OF_MEMORY.search(str(cause)):
                says = " ".join(str(cause).partition(_ADVICE)[0].split())
                return TrainerError(where, f"out of GPU memory in {method}: {says}", self._to_memory_fix(method))
            return TrainerError(where, f"{method} raised {type(cause).__name__}: {cause}", fix)
        if isinstance(error, RayActorError):
            tail = "\n".join(f"        {line}" for line in read_log_tail(log).splitlines())
            return TrainerError(where, f"its process died during {method}; the end of {log}:\n{tail}", fix)
        return TrainerError(where, f"{method} failed: {type(error).__name__}: {error}", fix)

    def _to_memory_fix(self, method: str) -> str:
        """What an activation may be made of, or who else may hold the memory; none of it changes what is learned."""
        if method not in _COMPUTING:
            return "end other processes on the GPU, or give engines less (mem_fraction_static), then rerun to resume"
        trainer = self._plan.trainer
        tokens = f"lower parallel.max_tokens_per_micro_batch ({trainer.max_tokens_per_micro_batch})"
        recompute = "" if trainer.recompute_granularity == "full" else ", set parallel.recompute_granularity=full"
        return f"{tokens}{recompute}, or end other processes on the GPU; then rerun to resume from the last checkpoint"

    async def close(self) -> None:
        """Stop every rank; never raises, never hangs."""
        try:
            async with asyncio.timeout(10):
                await self.run("close")
        except (RecipeError, TimeoutError, RayError):
            pass  # a rank that is dead or hangs is killed with its host process below
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []


class RayCluster:
    """The Ray that a run's processes live in: started for it on this machine, or joined.

    Args:
        plan: the Plan.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.is_joined = is_on_ray(plan)
        self.machines: dict[int, Machine] = {0: LocalMachine()}
        """By their number in the Plan, those that it uses."""
        self._node_ids: dict[int, str] = {}
        self._workers: list[Any] = []

    async def launch(self) -> None:
        """Start Ray on this host, or join; must not be cancelled, since nothing can stop Ray half started.

        Raises:
            TrainerError: Ray did not start.
            ConfigError: no Ray answers at the address.
        """
        # In the main thread Ray would take the signals over. Its head ends with the thread that started it: this one
        # lives as long as the event loop.
        await asyncio.to_thread(_join_ray if self.is_joined else _init_ray, self._plan)

    async def settle(self) -> None:
        """Find the Plan's machines among the nodes of a cluster that was joined, and reserve them.

        Raises:
            TrainerError: some are not there in time, or are in use; says which, and why.
        """
        needs = self._plan.num_used_gpus
        is_reserved = False
        while not is_reserved:  # a node that has just died counts as alive for half a minute
            found = await self._find_nodes(needs)
            self._node_ids = {number: node["NodeID"] for number, node in found.items()}
            is_reserved = await self._reserve(needs)
        own = ray.get_runtime_context().get_node_id()
        for number, node in found.items():
            address = node["NodeManagerAddress"]
            if node["NodeID"] == own:
                self.machines[number] = LocalMachine(address)
                continue
            worker = ray.remote(HostWorker).options(**self.to_options(number)).remote()
            self._workers.append(worker)
            self.machines[number] = _RemoteMachine(address, worker)

    async def _find_nodes(self, needs: Mapping[int, int]) -> dict[int, Mapping[str, Any]]:
        deadline = time.monotonic() + _NODES_TIMEOUT_S
        while len(found := match_nodes(self._plan, nodes := ray.nodes())) < len(needs):
            if time.monotonic() > deadline:
                raise TrainerError("ray", _say_missing(self._plan, needs, found, nodes), _NODES_FIX)
            await asyncio.sleep(1)
        return found

    async def _reserve(self, needs: Mapping[int, int]) -> bool:
        """Whether all of it is ours; False when a node that was chosen turns out to be dead."""
        numbers = sorted(needs)
        bundles = [{"CPU": 1.0} | ({"GPU": float(needs[number])} if needs[number] else {}) for number in numbers]
        where = [{"ray.io/node-id": self._node_ids[number]} for number in numbers]
        group = placement_group(bundles, strategy="SPREAD", bundle_label_selector=where)
        ready = asyncio.wrap_future(group.ready().future())
        deadline = time.monotonic() + _PLACEMENT_TIMEOUT_S
        while not (await asyncio.wait([ready], timeout=1))[0]:
            if not {node["NodeID"] for node in _alive(ray.nodes())}.issuperset(self._node_ids.values()):
                remove_placement_group(group)
                return False
            if time.monotonic() < deadline:
                continue
            free = ray._private.state.available_resources_per_node()
            says = [
                f"{_name(self._plan, number)} needs {_to_words(bundle)}; free are {_to_words(own)}"
                for number, bundle in zip(numbers, bundles, strict=True)
                if not _is_within(bundle, own := free.get(self._node_ids[number], {}))
            ]
            problem = f"cannot place these in {_PLACEMENT_TIMEOUT_S:g} s: " + "; ".join(says or ["nobody says why"])
            fix = "wait for whoever uses them (`ray status` on the cluster), or use other machines"
            raise TrainerError("ray", problem, fix)
        ready.result()
        return True

    def to_options(self, number: int) -> dict[str, Any]:
        """How Ray is told where a process runs.

        Args:
            number: of the machine.
        """
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
        if number in self._node_ids:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self._node_ids[number], soft=False)
        return options

    async def close(self) -> None:
        """Leave or end Ray; never raises, never hangs."""
        for worker in self._workers:
            with contextlib.suppress(RayError):
                ray.kill(worker)
        self._workers = []
        if self.is_joined:
            await asyncio.to_thread(ray.shutdown)
        else:
            await _end_ray()


class _RemoteMachine:
    """A machine of the cluster, through a process there."""

    def __init__(self, address: str, worker: Any) -> None:
        self.address = address
        self._worker = worker

    def find_free_port(self) -> int:
        """A port that nobody listens on."""
        port: int = _ask(self.address, self._worker.find_free_port.remote())
        return port

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str], log_path: Path) -> ServerProcess:
        """Start a server there."""
        started = self._worker.start.remote(name, tuple(command), dict(env), str(log_path.absolute()))
        return _RemoteServer(name, log_path, self.address, self._worker, _ask(self.address, started))


class _RemoteServer(ServerProcess):
    """A server of another machine; its log lies where this one sees it."""

    def __init__(self, name: str, log_path: Path, address: str, worker: Any, started: tuple[int, int]) -> None:
        self.name, self.log_path, self._address, self._worker = name, log_path, address, worker
        self._pid, self.log_offset_bytes = started

    @property
    def pid(self) -> int:
        """On its machine."""
        return self._pid

    def poll(self) -> int | None:
        """Exit code, or None while it runs.

        Raises:
            EngineError: its machine is lost.
        """
        code: int | None = _ask(self._address, self._worker.poll.remote(self.name))
        return code

    def stop(self, grace_s: float = 5.0) -> None:
        """End it; what is lost with its machine has ended."""
        with contextlib.suppress(EngineError):
            _ask(self._address, self._worker.stop.remote(self.name, grace_s))


def _ask(address: str, reference: Any) -> Any:
    try:
        return ray.get(reference, timeout=_ANSWER_TIMEOUT_S)
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, RecipeError) else error from error
    except (RayActorError, GetTimeoutError) as error:
        problem = f"does not answer any more: {str(error).splitlines()[0]}"
        fix = "rerun the same command to resume from the last checkpoint"
        raise EngineError(f"machine {address}", problem, fix) from error


def match_nodes(plan: Plan, nodes: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """The node of a cluster for each machine that a Plan uses, where there is one.

    By label where nodes were started for the Plan; else by name, then by GPUs alone.

    Args:
        plan: the Plan.
        nodes: as ``ray.nodes()`` tells them.
    """
    alive = list(_alive(nodes))
    labels = {int(node["Labels"][NODE_LABEL]): node for node in alive if NODE_LABEL in node.get("Labels", {})}
    needs = plan.num_used_gpus
    if labels:
        return {number: labels[number] for number in needs if number in labels}
    found: dict[int, Mapping[str, Any]] = {}
    for is_named in (True, False):
        for number, num_gpus in needs.items():
            fitting = (
                node
                for node in alive
                if not any(node is taken for taken in found.values())
                and node["Resources"].get("GPU", 0) >= num_gpus
                and (not is_named or node["NodeManagerHostname"] == plan.hosts[number].name)
            )
            if number not in found and (node := next(fitting, None)) is not None:
                found[number] = node
    return found


_NODES_FIX = "see `ray status` on the cluster, start the nodes that are missing, or use fewer machines"


def _say_missing(
    plan: Plan, needs: Mapping[int, int], found: Mapping[int, Any], nodes: Sequence[Mapping[str, Any]]
) -> str:
    missing = ", ".join(f"{_name(plan, n)} ({num_gpus} GPUs)" for n, num_gpus in needs.items() if n not in found)
    there = ", ".join(f"{node['NodeManagerHostname']} ({_to_words(node['Resources'])})" for node in _alive(nodes))
    return f"has no node for {missing} after {_NODES_TIMEOUT_S:g} s; there are: {there or 'none'}"


def _alive(nodes: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    return (node for node in nodes if node["Alive"])


def _name(plan: Plan, number: int) -> str:
    return f"machine {number} ({plan.hosts[number].name})"


def _to_words(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))


def _is_within(bundle: Mapping[str, float], free: Mapping[str, float]) -> bool:
    return all(free.get(name, 0) >= amount for name, amount in bundle.items())


def _to_environment(plan: Plan) -> dict[str, str]:
    """What every process of Ray has in common; read before it imports torch."""
    environment = {
        "OMP_NUM_THREADS": str(plan.trainer.num_threads),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        **RAY_NODE_ENVIRONMENT,
        "HF_HUB_OFFLINE": "1",
        DRIVER_VARIABLE: str(os.getpid()),
    }
    if plan.trainer.device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    elif plan.weight_sync.transport == "distributed":
        environment["NCCL_CUMEM_ENABLE"] = "0"  # SGLang sets it in its processes; members of one group have to agree
    return environment


def _join_ray(plan: Plan) -> None:
    """Join a cluster; its processes are no children of this one, so they get their environment by Ray's hand."""
    address = os.environ.get(RAY_ADDRESS) or plan.cluster.address or "auto"
    environment = _to_environment(plan) | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *_own_python_path()])}
    _start_reaper()
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", runtime_env={"env_vars": environment})
    except Exception as error:
        problem = f"no Ray answers at {address}: {type(error).__name__}: {error}"
        raise ConfigError("cluster.address", problem, _JOIN_FIX) from error


def _own_python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _init_ray(plan: Plan) -> None:
    os.environ.update(_to_environment(plan))  # worker processes inherit it
    _start_reaper()
    # Processes inherit the mask: a SIGTERM or SIGINT sent to the whole group must leave Ray alive for the checkpoint.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        ray.init(
            address="local",
            num_cpus=max(1, plan.trainer.num_ranks),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=SHARED_MEMORY_BYTES,
        )
    except Exception as error:
        fix = "free memory in /dev/shm and /tmp, then rerun"
        raise TrainerError("ray", f"did not start: {type(error).__name__}: {error}", fix) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


async def _end_ray() -> None:
    """Disconnect, then kill: Ray would wait a second for each of its processes to heed the SIGTERM that it blocks."""
    root = str(Path(ray.__file__).parent)
    children = psutil.Process().children()
    ending = asyncio.create_task(asyncio.to_thread(ray.shutdown))
    while ray.is_initialized() and not ending.done():
        await asyncio.sleep(0.02)
    for child in children:
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if root in " ".join(child.cmdline()):
                child.kill()
    await ending


def _start_reaper() -> None:
    reaper = [sys.executable, "-I", "-S", str(Path(__file__).parent / "reaper.py"), str(os.getpid())]
    subprocess.Popen(reaper, stdin=subprocess.DEVNULL, start_new_session=True)


def read_ray_hosts(address: str) -> list[FoundHost]:
    """Ask a running Ray cluster for its machines; this one must belong to it.

    A process of its own asks: Ray tries a dead address for two minutes, and nothing can stop it but its end.

    Args:
        address: host:port, or auto for the cluster that this machine belongs to.

    Raises:
        ConfigError: it does not answer.
    """
    code = "import sys; from rlrecipes.runner.cluster import print_ray_nodes; print_ray_nodes(sys.argv[1])"
    fix = _JOIN_FIX
    try:
        name, _, port = address.rpartition(":")
        if port.isdecimal() and "/" not in name:
            if int(port) > LAST_PORT:  # glibc takes it modulo 65536, and somebody may listen there
                raise OverflowError(f"a port is at most {LAST_PORT}")
            socket.create_connection((name, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
        done = subprocess.run(
            [sys.executable, "-c", code, address], capture_output=True, text=True, timeout=_READ_TIMEOUT_S, check=True
        )
    except (OSError, OverflowError) as error:
        raise ConfigError("cluster.address", f"no Ray answers at {address}: {error}", fix) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError("cluster.address", f"no Ray answers at {address} in {_READ_TIMEOUT_S:g} s", fix) from error
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        raise ConfigError("cluster.address", f"no Ray answers at {address}: {said}", fix) from error
    return to_ray_hosts(json.loads(done.stdout.splitlines()[-1]))


def print_ray_nodes(address: str) -> None:
    """Print what ``ray.nodes()`` says, as JSON.

    Args:
        address: of the cluster.
    """
    ray.init(address=address, log_to_driver=False, logging_level="error")
    print(json.dumps(ray.nodes()))
    ray.shutdown()


def to_ray_hosts(nodes: Sequence[Mapping[str, Any]]) -> list[FoundHost]:
    """The living machines, with what Ray may give away of them.

    Args:
        nodes: as ``ray.nodes()`` tells them.
    """
    hosts = []
    for node in nodes:
        if not node["Alive"]:
            continue
        resources = node["Resources"]
        host = HostNode(
            name=node["NodeManagerHostname"],
            num_cpus=int(resources.get("CPU", 0)),
            num_gpus=int(resources.get("GPU", 0)),
            memory_bytes=int(resources.get("memory", 0) + resources.get("object_store_memory", 0)),
        )
        names = [name.removeprefix(_ACCELERATOR) for name in resources if name.startswith(_ACCELERATOR)]
        hosts.append(FoundHost(host, tuple(names)))
    return hosts
