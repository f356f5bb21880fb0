"""Trainer ranks as Ray actors, and what a Ray cluster consists of. The only user of ray; its words stop here."""

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from rlrecipes.engines.sglang.process import find_free_port, read_log_tail
from rlrecipes.errors import ConfigError, RecipeError, TrainerError
from rlrecipes.plan.hosts import SHARED_MEMORY_BYTES, FoundHost
from rlrecipes.plan.nodes import HostNode, Plan
from rlrecipes.runner.rank import RankWorker
from rlrecipes.runner.reaper import DRIVER_VARIABLE

os.environ["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"] = "1"  # Ray's C++ core would take SIGTERM for a crash; read on import
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

_START_TIMEOUT_S = 180.0
_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 60.0
_ACCELERATOR = "accelerator_type:"
_OUT_OF_MEMORY = re.compile(r"(?i)out[ _]of[ _]memory|CUBLAS_STATUS_ALLOC_FAILED")
_ADVICE = " If reserved but unallocated memory is large"
"""Where torch's own message begins to say what may help; before it stands who holds how much."""
_COMPUTING = ("train_step", "critic_step", "compute_logprobs", "compute_values", "compute_teacher_topk")


class TrainerGroup:
    """All trainer ranks of a run.

    Args:
        plan: the Plan.
        log_dir: one log a rank is kept there.
    """

    def __init__(self, plan: Plan, log_dir: Path) -> None:
        self._plan = plan
        self._log_paths = [log_dir / f"trainer-{rank}.log" for rank in range(plan.trainer.num_ranks)]
        self._actors: list[Any] = []

    async def launch(self) -> None:
        """Start Ray on this host; must not be cancelled, since nothing can stop Ray half started.

        Raises:
            TrainerError: Ray did not start.
        """
        # In the main thread Ray would take the signals over. Its head ends with the thread that started it: this one
        # lives as long as the event loop.
        await asyncio.to_thread(_init_ray, self._plan)

    async def start(self) -> None:
        """Start every rank.

        Raises:
            TrainerError: a rank did not start in time.
        """
        port = find_free_port()
        worker = ray.remote(RankWorker)
        plan_json = self._plan.model_dump_json()
        self._actors = [
            worker.options(num_cpus=0, max_restarts=0).remote(plan_json, rank, "127.0.0.1", port, str(path.absolute()))
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
        """Stop every rank and Ray; never raises, never hangs."""
        try:
            async with asyncio.timeout(10):
                await self.run("close")
        except (RecipeError, TimeoutError, RayError):
            pass  # a rank that is dead or hangs is killed with its host process below
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        await _end_ray()


def _init_ray(plan: Plan) -> None:
    environment = {
        "OMP_NUM_THREADS": str(plan.trainer.num_threads),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_worker_niceness": "0",  # it would put the trainer behind every other process of the host
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "HF_HUB_OFFLINE": "1",
        DRIVER_VARIABLE: str(os.getpid()),
    }
    if plan.trainer.device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    elif plan.weight_sync.transport == "distributed":
        environment["NCCL_CUMEM_ENABLE"] = "0"  # SGLang sets it in its processes; members of one group have to agree
    os.environ.update(environment)  # worker processes inherit it, and read it before they import torch
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
    fix = "run this on a machine of the cluster; beside host:port set RAY_AUTH_MODE=token where Ray asks for one"
    try:
        name, _, port = address.rpartition(":")
        if port.isdecimal() and "/" not in name:
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
