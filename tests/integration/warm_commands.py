"""`rlrecipes` in processes forked from one that has imported everything: what takes seconds of imports takes none.

Each command is the real ``main`` in a process and a process group of its own; only the imports are shared.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

IMPORTS = (
    "rlrecipes.runner.run",
    "rlrecipes.runner.preparation",
    "rlrecipes.engines.megatron.initial",
    "rlrecipes.tracking.compare",
    "rlrecipes.tracking.comparison_page",
    "scipy.stats",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "reasoning_gym",
    "mlflow.tracking",
    "sqlalchemy.dialects.sqlite",
    "matplotlib.pyplot",
)
_NO_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""A fork has only the thread that forks."""
_START_TIMEOUT_S = 120
_POLL_S = 0.01


class WarmProcess:
    """A command that runs; the part of ``subprocess.Popen`` that tests use."""

    def __init__(self, directory: Path, arguments: Sequence[str]) -> None:
        self.args = ["rlrecipes", *arguments]
        self.returncode: int | None = None
        self._directory = directory
        self.pid = int(_wait_for(directory / "pid", _START_TIMEOUT_S))

    def poll(self) -> int | None:
        """Its exit code, once it has one."""
        if self.returncode is None and (self._directory / "code").exists():
            self.returncode = int((self._directory / "code").read_text())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            time.sleep(_POLL_S)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for its end; all it printed."""
        self.wait(timeout)
        return (self._directory / "output").read_text(), None

    def kill(self) -> None:
        """End it without a word."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class WarmCommands:
    """The parent of those processes.

    Args:
        directory: for its files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._num_started = 0
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=os.environ | _NO_THREADS, text=True, stdin=subprocess.PIPE
        )

    def start(self, cwd: Path, arguments: Sequence[str], env: Mapping[str, str]) -> WarmProcess:
        """Start one, in this environment."""
        self._num_started += 1
        directory = self._directory / str(self._num_started)
        directory.mkdir()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(directory), str(cwd), list(arguments), dict(env)]) + "\n")
        self._process.stdin.flush()
        return WarmProcess(directory, arguments)

    def run(self, cwd: Path, *arguments: str, code: int = 0) -> str:
        """As ``CommandLine.run``."""
        process = self.start(cwd, arguments, os.environ)
        output, _ = process.communicate(_START_TIMEOUT_S)
        assert process.returncode == code, f"exit code {process.returncode}\n{output}"
        return output

    def close(self) -> None:
        """End it."""
        self._process.communicate(timeout=10)


def _wait_for(path: Path, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(_POLL_S)
    return path.read_text()


def _write(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.rename(path)


def _serve() -> None:
    import importlib
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in IMPORTS:
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            _keep(*json.loads(line))
    os._exit(0)  # libraries take seconds to say goodbye


def _keep(directory: str, *task: Any) -> None:
    """Start the command, and write down how it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    command = os.fork()
    if command == 0:
        os.setpgid(0, 0)
        _run(Path(directory), *task)
    _write(Path(directory) / "pid", str(command))
    _write(Path(directory) / "code", str(os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])))
    os._exit(0)


def _run(directory: Path, cwd: str, arguments: list[str], env: dict[str, str]) -> None:
    from rlrecipes.cli.main import main

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(directory / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path.insert(0, cwd)
    sys.argv = ["rlrecipes", *arguments]
    if (Path(cwd) / "sitecustomize.py").exists():
        runpy.run_path(str(Path(cwd) / "sitecustomize.py"))
    main()
    sys.exit()


if __name__ == "__main__":
    _serve()
