"""`rlrecipes` in processes forked from one that has imported everything: what takes seconds of imports takes none.

Each command is the real ``main`` in a process of its own; only the imports are shared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

IMPORTS = (
    "rlrecipes.runner.run",
    "rlrecipes.tracking.compare",
    "transformers.models.auto.tokenization_auto",
    "reasoning_gym",
    "mlflow.tracking",
    "sqlalchemy.dialects.sqlite",
    "matplotlib.pyplot",
)


class WarmCommands:
    """The parent of those processes."""

    def __init__(self) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(self, cwd: Path, *arguments: str, code: int = 0) -> str:
        """As ``CommandLine.run``."""
        assert self._process.stdin is not None and self._process.stdout is not None
        output = cwd.with_name(cwd.name + "-output")
        self._process.stdin.write(json.dumps([str(cwd), str(output), arguments]) + "\n")
        self._process.stdin.flush()
        found = self._process.stdout.readline().strip()
        assert found == str(code), f"exit code {found}\n{output.read_text()}"
        return output.read_text()

    def close(self) -> None:
        """End it."""
        self._process.communicate(timeout=10)


def _serve() -> None:
    import importlib
    import warnings

    warnings.simplefilter("ignore")
    for name in IMPORTS:
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(_run(*json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    os._exit(0)  # libraries take seconds to say goodbye


def _run(cwd: str, output: str, arguments: list[str]) -> int:
    from rlrecipes.cli.main import main

    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(cwd)
    sys.path.insert(0, cwd)
    sys.argv = ["rlrecipes", *arguments]
    code = 70
    try:
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return code


if __name__ == "__main__":
    _serve()
