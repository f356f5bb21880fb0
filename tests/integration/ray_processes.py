"""Real nodes of Ray, as `ray start` gives them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

RAY = Path(sys.executable).parent / "ray"
# The usual ranges of worker ports are others' too.
QUIET = ("--object-store-memory=80000000", "--disable-usage-stats", "--min-worker-port=0", "--max-worker-port=0")


@contextlib.contextmanager
def run_ray(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """One node, up until the end of the block."""
    with log.open("w") as output:
        command = [str(RAY), "start", "--block", *words, *QUIET]
        node = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in log.read_text():
            assert node.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield node
    finally:
        with contextlib.suppress(ProcessLookupError):  # a test may have killed it
            os.killpg(node.pid, signal.SIGKILL)
        node.wait(timeout=30)
