"""Python's packages: installed as rlrecipes asks, and able to be imported, which a child process tries."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from rlrecipes.runner.diagnosis.finding import Finding
from rlrecipes.runner.diagnosis.probe import MARK

_TIMEOUT_S = 180.0
"""For all imports of a child; a cold disk or a busy host takes half a minute."""
_MODULES = {"torch": "torch", "megatron.core": "megatron-core", "ray": "ray", "sglang_router": "sglang-router"}
"""Module -> package, of those that hold compiled code or stand on it: that they are installed says little."""
_USES = {
    "torch": "trainer, engines, losses",
    "megatron-core": "trainer",
    "ray": "trainer processes",
    "sglang-router": "router in front of the engines",
}
_GPU_MODULES = {"transformer_engine": "transformer-engine", "deep_ep": "deep_ep"}


@dataclass(frozen=True, slots=True)
class Probe:
    """How the import of a module went.

    Attributes:
        problem: why it failed; empty where it did not.
        facts: what the module says of itself.
    """

    problem: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def check_dependencies() -> list[Finding]:
    """Python, and every package that rlrecipes' own metadata asks for; imports none of them."""
    python = Finding("Python", platform.python_version(), "everything")
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return [python, Finding("packaging", "not installed", "everything", "pip install packaging")]
    try:
        words = metadata.requires("rlrecipes") or []
    except metadata.PackageNotFoundError:
        return [python, Finding("rlrecipes", "not installed, only on the path", "everything", "pip install rlrecipes")]
    asked = [one for one in map(Requirement, words) if one.marker is None or one.marker.evaluate({"extra": ""})]
    lacking = []
    for requirement in asked:
        version = read_version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            use = _USES.get(requirement.name, "rlrecipes")
            found = f"{version}, not {requirement.specifier}" if version else "not installed"
            lacking.append(Finding(requirement.name, found, use, f"pip install '{requirement}'"))
    whole = Finding("packages", f"{len(asked) - len(lacking)} of {len(asked)} that rlrecipes asks for", "everything")
    return [python, whole, *lacking]


def read_version(package: str) -> str | None:
    """The installed version of a package; None where there is none.

    Args:
        package: its name on PyPI.
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def probe_packages() -> dict[str, Probe]:
    """Import what a run imports, package by package; those for a GPU too, where they are installed."""
    modules = _MODULES | {module: name for module, name in _GPU_MODULES.items() if read_version(name) is not None}
    probes = probe_modules(list(modules))
    return {name: probes[module] for module, name in modules.items()}


def probe_modules(modules: Sequence[str], timeout_s: float = _TIMEOUT_S) -> dict[str, Probe]:
    """Import modules in a child process; one that ends it or hangs is told, and the others tried without it.

    Args:
        modules: in order.
        timeout_s: for a child.
    """
    found: dict[str, Probe] = {}
    while left := [module for module in modules if module not in found]:
        output, ending = _run_probe(left, timeout_s)
        told = [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]
        found |= {module: Probe(problem, facts) for module, problem, facts in told}
        begun = next((module for module in left if module not in found), None)
        if begun is not None:  # they come in order: this one ended the child
            found[begun] = Probe(f"importing it {ending}")
    return found


def _run_probe(modules: Sequence[str], timeout_s: float) -> tuple[str, str]:
    """What the child printed, and how it ended."""
    command = [sys.executable, "-W", "ignore", "-m", "rlrecipes.runner.diagnosis.probe", *modules]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace"), f"took more than {timeout_s:g} s"
    code = done.returncode
    ending = f"ended Python by signal {-code}" if code < 0 else f"ended Python with code {code}"
    return done.stdout.decode(errors="replace"), ending


def check_imports(probes: dict[str, Probe], *, has_router: bool) -> Iterator[Finding]:
    """What the imports of the CPU road say.

    Args:
        probes: from :func:`probe_packages`.
        has_router: whether anything is served.
    """
    for package in _MODULES.values():
        if package == "sglang-router" and not has_router:
            continue
        probe, version = probes[package], read_version(package)
        found, fix = str(version), ""
        if probe.problem:
            found, fix = f"{version}; {probe.problem}", f"install it anew: pip install --force-reinstall {package}"
        elif package == "torch" and not probe.facts["has_gloo"]:
            found, fix = f"{version} without gloo", "install a torch with torch.distributed and gloo"
        yield Finding(package, found, _USES[package], fix)


def read_sglang_version(python: str) -> str | None:
    """The version of SGLang that an interpreter has; None where it has none or cannot be started.

    Args:
        python: the interpreter.
    """
    code = "from importlib.metadata import version; print(version('sglang'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
