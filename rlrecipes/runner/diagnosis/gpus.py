"""What GPUs need: driver, CUDA, NCCL, Transformer Engine, SGLang, DeepEP. A run's own check judges them for a Plan."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from rlrecipes.errors import ConfigError
from rlrecipes.plan.cluster import check_is_here
from rlrecipes.plan.hosts import read_visible_gpus
from rlrecipes.plan.nodes import Plan
from rlrecipes.plan.nvml import read_driver
from rlrecipes.plan.packages import uses_transformer_engine
from rlrecipes.runner.diagnosis.finding import Finding, to_findings
from rlrecipes.runner.diagnosis.packages import Probe, read_sglang_version, read_version
from rlrecipes.runner.readiness import check_is_ready

_RECIPES = "recipes for GPUs"
_SGLANG_PYTHON = "RLRECIPES_SGLANG_PYTHON"


def check_gpus(probes: dict[str, Probe]) -> Iterator[Finding]:
    """What is here of all that any recipe for GPUs may ask; what lacks is a warning.

    Args:
        probes: from ``probe_packages``.
    """
    try:
        gpus = read_visible_gpus()
        names = ", ".join(f"{count} {name}" for name, count in Counter(gpu.name for gpu in gpus).items())
        yield _warn("GPUs", names or "none", _RECIPES, "" if gpus else "none is needed for recipes of the CPU")
        if gpus:
            driver = read_driver()
            yield _warn("NVIDIA driver", f"{driver.version}, runs CUDA {driver.cuda[0]}.{driver.cuda[1]}", _RECIPES)
    except ConfigError as error:
        yield from (_warn("GPUs", one.problem, _RECIPES, one.fix) for one in error.problems)
    facts = probes["torch"].facts
    cuda, nccl = facts.get("cuda"), facts.get("nccl")
    yield _warn("CUDA of torch", cuda or "none", _RECIPES, "" if cuda else "install a torch that is built with CUDA")
    yield _warn("NCCL", nccl or "none", "trainers on several GPUs", "" if nccl else "install a torch that has NCCL")
    yield _package("Transformer Engine", "transformer-engine", probes, "trainers on GPUs, but local ones")
    for python in dict.fromkeys((sys.executable, os.environ.get(_SGLANG_PYTHON, ".venv-sglang/bin/python"))):
        version = read_sglang_version(python)
        if version is not None:
            yield _warn("SGLang", f"{version} in {_short(python)}", "its engines, on GPUs and CPUs")
            break
    else:
        fix = f"`make sglang`, or name an interpreter that has it in {_SGLANG_PYTHON}"
        yield _warn("SGLang", "not installed", "its engines, on GPUs and CPUs", fix)
    yield _package("DeepEP", "deep_ep", probes, "engines with moe_a2a_backend=deepep")


def check_plan(plan: Plan, probes: dict[str, Probe]) -> Iterator[Finding]:
    """What a Plan needs of GPUs and engines, and whether a run of it would start here.

    Args:
        plan: the Plan.
        probes: from ``probe_packages``.
    """
    if plan.trainer.device == "cuda":
        nccl = probes["torch"].facts.get("nccl")
        yield Finding("NCCL", nccl or "none", "trainers", "" if nccl else "install a torch that has NCCL")
        if uses_transformer_engine(plan.trainer) and (version := read_version("transformer-engine")):
            problem = probes["transformer-engine"].problem
            fix = "install it for this torch and CUDA, or set parallel.megatron.transformer_impl=local"
            found = f"{version}; {problem}" if problem else version
            yield Finding("Transformer Engine", found, "trainers", fix if problem else "")
    groups = [group for model in plan.served_models for group in model.server_groups if group.engine == "sglang"]
    for python in dict.fromkeys(engine.python or sys.executable for group in groups for engine in group.engines):
        if version := read_sglang_version(python):
            yield Finding("SGLang", f"{version} in {_short(python)}", "engines")
    yield from _judge(lambda: check_is_here(plan), plan.name)
    yield from _judge(lambda: check_is_ready(plan), plan.name)


def _judge(check: Callable[[], None], needed_for: str) -> list[Finding]:
    try:
        check()
    except ConfigError as error:
        return to_findings(error.problems, needed_for)
    return []


def _package(what: str, package: str, probes: dict[str, Probe], use: str) -> Finding:
    version = read_version(package)
    if version is None:
        return _warn(what, "not installed", use, f"install {package}")
    problem = probes[package].problem
    return _warn(
        what, f"{version}; {problem}" if problem else version, use, f"install {package} anew" if problem else ""
    )


def _warn(what: str, found: str, needed_for: str, fix: str = "") -> Finding:
    return Finding(what, found, needed_for, fix, is_needed=False)


def _short(python: str) -> str:
    path = Path(python)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else python
