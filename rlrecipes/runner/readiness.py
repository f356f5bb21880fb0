"""Whether this machine can start a Plan now: packages, driver, GPU memory that others hold. Starts nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rlrecipes.errors import ConfigError, Problem
from rlrecipes.plan.hosts import read_visible_gpus
from rlrecipes.plan.nodes import Plan, ServedModelNode, ServerGroupNode
from rlrecipes.plan.nvml import GpuUse, read_driver, read_gpu_use
from rlrecipes.plan.packages import find_missing_packages, read_torch_build

_GIB = 1 << 30
_FREEING_S = 5.0
"""The driver takes a moment to free what a process held that has just been killed."""
_POLL_INTERVAL_S = 0.25
_INTERPRETER_TIMEOUT_S = 60.0
_FIND_MODULE = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec(sys.argv[1]) else 3)"


def check_is_ready(plan: Plan, *, should_train: bool = True) -> None:
    """Refuse to start a Plan where a process of it would fail minutes later, on what can be seen now.

    Args:
        plan: the Plan; this machine is what it was made for.
        should_train: whether trainers will be started.

    Raises:
        ConfigError: all that is missing, or in the way.
    """
    problems = list(find_missing_packages(plan.trainer)) if should_train else []
    problems += _find_missing_engines(plan)
    if plan.trainer.device == "cuda" and plan.cluster.source != "ray":  # a Ray's driver may be on any machine
        problems += list(_find_driver_problems()) or _find_busy_gpus(plan)
    if problems:
        raise ConfigError.from_problems(problems)


def _find_missing_engines(plan: Plan) -> Iterator[Problem]:
    """What engines import is looked for once in every interpreter and path that they would have."""
    asked: set[tuple[str, str, str]] = set()
    for model in plan.served_models:
        for group in model.server_groups:
            if group.engine != "sglang" or not group.engines:
                continue
            engine = group.engines[0]
            path = engine.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
            python = str(Path(engine.python).absolute()) if engine.python else sys.executable
            for module, package in _list_engine_modules(group):
                if (python, path, module) not in asked:
                    asked.add((python, path, module))
                    yield from _look_for_module(python, path, model, group, (module, package))


def _list_engine_modules(group: ServerGroupNode) -> Iterator[tuple[str, str]]:
    yield "sglang", "SGLang"
    if group.sglang.get("moe_a2a_backend") == "deepep":
        yield "deep_ep", "DeepEP"


def _look_for_module(
    python: str, path: str, model: ServedModelNode, group: ServerGroupNode, names: tuple[str, str]
) -> Iterator[Problem]:
    where = f"topology.served_models.{model.name}.server_groups.{group.name}.python"
    module, package = names
    env = os.environ | {"PYTHONPATH": path}
    try:
        found = subprocess.run(
            [python, "-c", _FIND_MODULE, module], env=env, capture_output=True, timeout=_INTERPRETER_TIMEOUT_S
        )
    except OSError as error:
        yield Problem(where, f"{python} cannot be started: {error.strerror}", "give the path of an interpreter")
        return
    if found.returncode == 3:
        fix = "run `make sglang`, or give" if module == "sglang" else "install it there, or give"
        yield Problem(where, f"{python} has no {package}", f"{fix} an interpreter that has it")


def _find_driver_problems() -> Iterator[Problem]:
    """A driver runs programs of its own major version of CUDA and of older ones."""
    version, built = read_torch_build()
    if built is None:
        problem = f"is cuda; torch {version} is built without CUDA"
        yield Problem("topology.device", problem, "install a torch with CUDA, or set topology.device=cpu")
        return
    try:
        driver = read_driver()
    except ConfigError as error:
        yield from error.problems
        return
    if driver.cuda[0] < int(built.split(".")[0]):
        runs = f"{driver.cuda[0]}.{driver.cuda[1]}"
        problem = f"driver {driver.version} runs CUDA {runs}; torch {version} is built for {built}"
        yield Problem("cluster", problem, f"install a newer driver, or a torch for CUDA {driver.cuda[0]}")


def _find_busy_gpus(plan: Plan) -> list[Problem]:
    """GPUs that others hold so much of that the Plan does not fit beside them."""
    needed, gpus = _to_needed_bytes(plan), read_visible_gpus()
    deadline = time.monotonic() + _FREEING_S
    while True:
        problems = []
        for number, num_bytes in sorted(needed.items()):
            index = gpus[number].index if number < len(gpus) else None
            use = read_gpu_use(index) if index is not None else None
            if use is not None and num_bytes > use.total_bytes - use.used_bytes:
                problems.append(_to_problem(number, num_bytes, use))
        if not problems or time.monotonic() > deadline:
            return problems
        time.sleep(_POLL_INTERVAL_S)


def _to_needed_bytes(plan: Plan) -> dict[int, int]:
    """GPU -> bytes that the Plan's memory model gives its processes at most; empty where nothing is predicted.

    Of the first machine, where the driver is.
    """
    owners: dict[int, set[str]] = {}
    for device in plan.trainer.devices:
        if device.gpu is not None and device.node == 0:
            owners.setdefault(device.gpu, set()).add("trainer")
    for model in plan.served_models:
        for group in model.server_groups:
            for device in (device for engine in group.engines for device in engine.devices):
                if device.gpu is not None and device.node == 0:
                    owners.setdefault(device.gpu, set()).add(f"{model.name}/{group.name}")
    roles = plan.memory.roles if plan.memory is not None else ()
    return {
        gpu: max((role.peak_bytes for role in roles if names.issuperset(role.name.split("+"))), default=0)
        for gpu, names in owners.items()
    }


def _to_problem(number: int, num_bytes: int, use: GpuUse) -> Problem:
    users = ", ".join(map(str, use.processes)) or "none that the driver names"
    free, total, needed = (one / _GIB for one in (use.total_bytes - use.used_bytes, use.total_bytes, num_bytes))
    problem = f"GPU {number} has {free:.1f} GiB free of {total:.1f}, the Plan needs {needed:.1f}; processes: {users}"
    return Problem("cluster", problem, "end them, wait for them, or choose other GPUs with CUDA_VISIBLE_DEVICES")
