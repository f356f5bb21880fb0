"""Trainer ranks as Ray actors. The only user of ray; everything Ray calls by another name stops here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rlrecipes.engines.sglang.process import find_free_port, read_log_tail
from rlrecipes.errors import RecipeError, TrainerError
from rlrecipes.plan.nodes import Plan
from rlrecipes.runner.rank import RankWorker

_START_TIMEOUT_S = 180.0


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

    def launch(self) -> None:
        """Start Ray on this host. It takes signals over: whoever handles them must ask for them again.

        Raises:
            TrainerError: Ray did not start.
        """
        _init_ray(self._plan)

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
            return TrainerError(where, f"{method} raised {type(cause).__name__}: {cause}", fix)
        if isinstance(error, RayActorError):
            return TrainerError(where, f"its process died during {method}; it last said: {read_log_tail(log)}", fix)
        return TrainerError(where, f"{method} failed: {type(error).__name__}: {error}", fix)

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
        ray.shutdown()


def _init_ray(plan: Plan) -> None:
    environment = {
        "OMP_NUM_THREADS": str(plan.trainer.num_threads),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_worker_niceness": "0",  # it would put the trainer behind every other process of the host
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "HF_HUB_OFFLINE": "1",
    }
    if plan.trainer.device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    os.environ.update(environment)  # worker processes inherit it, and read it before they import torch
    # Processes inherit the mask: a SIGTERM or SIGINT sent to the whole group must leave Ray alive for the checkpoint.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    on_term = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address="local",
            num_cpus=max(1, plan.trainer.num_ranks),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=1 << 30,
        )
    except Exception as error:
        fix = "free memory in /dev/shm and /tmp, then rerun"
        raise TrainerError("ray", f"did not start: {type(error).__name__}: {error}", fix) from error
    finally:
        signal.signal(signal.SIGTERM, on_term)  # Ray's own would exit at once, before anything is put in order
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _start_reaper()


def _start_reaper() -> None:
    own = psutil.Process()
    root = str(Path(ray.__file__).parent)
    commands = {}
    for child in own.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            commands[child.pid] = " ".join(child.cmdline())
    pids = [str(pid) for pid, command in commands.items() if root in command or command.startswith("ray::")]
    reaper = [sys.executable, "-I", "-S", str(Path(__file__).parent / "reaper.py"), str(own.pid), *pids]
    subprocess.Popen(reaper, stdin=subprocess.DEVNULL, start_new_session=True)
