"""The machine's load over a step: a thread that looks twice a second. Owns ``system/*``; never fails a run.

It sees this machine alone: a run's trainers and engines on others are not in its numbers.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rlrecipes.tracking.upload_state import LOGGER

SAMPLE_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """What one GPU does now.

    Attributes:
        use_fraction: of the last moments, in which a kernel ran.
        used_bytes: of its memory, by all processes.
    """

    use_fraction: float
    used_bytes: int


@dataclass(slots=True)
class _Seen:
    """What was seen since the step began."""

    started_s: float
    network: tuple[int, int]
    memory_bytes: int = 0
    gpu_use: list[float] = field(default_factory=list)
    gpu_bytes: dict[str, int] = field(default_factory=dict)


class SystemSampler:
    """Watches this machine while it is entered.

    Args:
        run_dir: the disk that matters is the one under it.
        read_gpus: looks at the run's GPUs on this machine; empty where there are none.
    """

    def __init__(self, run_dir: Path, read_gpus: Callable[[], Sequence[GpuLoad]] = list) -> None:
        self._run_dir, self._read_gpus = run_dir, read_gpus
        self._lock = threading.Lock()
        self._phase = ""
        self._is_over = threading.Event()
        self._seen = _Seen(time.monotonic(), _read_network())
        self._thread = threading.Thread(target=self._run, name="system-sampler", daemon=True)

    def __enter__(self) -> Self:
        """Start to look."""
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop; waits for a look in progress."""
        self._is_over.set()
        self._thread.join(timeout=5)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say what the run does, for the memory of GPUs: rollout, logprobs, train, weight_sync. Looks at both ends.

        Args:
            name: of the phase.
        """
        self._look()
        outer, self._phase = self._phase, name
        try:
            yield
        finally:
            self._look()
            self._phase = outer

    def take(self) -> dict[str, float]:
        """What was seen since this was asked last.

        Returns:
            ``system/*``: use as means, memory at its most, network as a rate; what cannot be read is left out.
        """
        import psutil

        self._look()
        with self._lock:
            seen, self._seen = self._seen, _Seen(time.monotonic(), _read_network())
        duration_s = max(self._seen.started_s - seen.started_s, 1e-3)
        sent, received = (now - before for now, before in zip(self._seen.network, seen.network, strict=True))
        metrics = {
            "system/cpu_fraction": psutil.cpu_percent(None) / 100,
            "system/memory_bytes": float(seen.memory_bytes),
            "system/disk_free_bytes": float(shutil.disk_usage(self._run_dir).free),
            "system/network_sent_bytes_per_s": max(sent, 0) / duration_s,
            "system/network_received_bytes_per_s": max(received, 0) / duration_s,
        }
        if seen.gpu_use:
            metrics["system/gpu_use_fraction"] = sum(seen.gpu_use) / len(seen.gpu_use)
            metrics["system/gpu_memory_bytes"] = float(max(seen.gpu_bytes.values()))
            phases = {name: value for name, value in seen.gpu_bytes.items() if name}
            metrics |= {f"system/gpu_memory_{name}_bytes": float(value) for name, value in phases.items()}
        return metrics

    def _run(self) -> None:
        while not self._is_over.wait(SAMPLE_INTERVAL_S):
            self._look()

    def _look(self) -> None:
        import psutil

        phase = self._phase
        try:
            loads = self._read_gpus()
        except Exception as error:
            LOGGER.warning("the GPUs cannot be watched any more: %s", error)
            self._read_gpus = list
            loads = []
        with self._lock:
            seen = self._seen
            seen.memory_bytes = max(seen.memory_bytes, psutil.virtual_memory().used)
            if loads:
                seen.gpu_use.append(sum(load.use_fraction for load in loads) / len(loads))
                most = max(load.used_bytes for load in loads)
                seen.gpu_bytes[phase] = max(most, seen.gpu_bytes.get(phase, 0))


def _read_network() -> tuple[int, int]:
    """Bytes sent and received by this machine since it started; what it tells itself is left out."""
    import psutil

    counters = [each for name, each in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    return sum(each.bytes_sent for each in counters), sum(each.bytes_recv for each in counters)
