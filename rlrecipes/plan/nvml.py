"""The GPUs of this machine as NVIDIA's driver tells of them through NVML: no CUDA, no torch. The only user of pynvml.

/proc/driver/nvidia would say less, and in some containers nothing at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlrecipes.errors import ConfigError

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU.

    Attributes:
        name: what it calls itself.
        uuid: ``GPU-...``, or ``MIG-...`` of a slice.
        index: in the driver's order; None of a slice, which NVML does not count.
    """

    name: str
    uuid: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that computes on a GPU.

    Attributes:
        pid: as the driver knows it; in a container it may be another's number.
        used_bytes: of the GPU; None where the driver does not say.
    """

    pid: int
    used_bytes: int | None

    def __str__(self) -> str:
        return str(self.pid) if self.used_bytes is None else f"{self.pid} ({self.used_bytes / _MIB:,.0f} MiB)"


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What is taken of a GPU now.

    Attributes:
        total_bytes: of its memory.
        used_bytes: by all processes, the driver's own share included.
        processes: those that the driver tells of.
    """

    total_bytes: int
    used_bytes: int
    processes: tuple[GpuProcess, ...]


@dataclass(frozen=True, slots=True)
class Driver:
    """NVIDIA's driver.

    Attributes:
        version: as 580.159.04.
        cuda: the newest CUDA that it runs, (major, minor).
    """

    version: str
    cuda: tuple[int, int]


def read_gpus() -> list[Gpu]:
    """All GPUs of this machine, in the driver's order; none where there is no driver.

    Raises:
        ConfigError: there is a driver, and it does not answer.
    """
    import pynvml as nvml

    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [
            Gpu(nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle), index)
            for index, handle in enumerate(handles)
        ]
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
            return []
        fix = "reload the driver or start the machine anew; CUDA_VISIBLE_DEVICES= leaves its GPUs out"
        raise ConfigError("cluster", f"the GPUs of this machine cannot be read: {error}", fix) from error


def read_gpu_use(index: int) -> GpuUse:
    """Memory of a GPU, and who uses it.

    Args:
        index: in the driver's order.

    Raises:
        ConfigError: the driver does not say.
    """
    with _asking() as nvml:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        processes = []
        with contextlib.suppress(nvml.NVMLError):  # some containers are not told of processes
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    found = tuple(GpuProcess(process.pid, process.usedGpuMemory) for process in processes)
    return GpuUse(memory.total, memory.used, found)


def read_busy_fraction(index: int) -> float:
    """Of the last moments (a sixth of a second to a second), those in which a kernel ran.

    Args:
        index: in the driver's order.

    Raises:
        ConfigError: the driver does not say.
    """
    with _asking() as nvml:
        busy: int = nvml.nvmlDeviceGetUtilizationRates(nvml.nvmlDeviceGetHandleByIndex(index)).gpu
    return busy / 100


def read_driver() -> Driver:
    """The driver of this machine.

    Raises:
        ConfigError: there is none, or it does not answer.
    """
    with _asking() as nvml:
        number = nvml.nvmlSystemGetCudaDriverVersion_v2()
        return Driver(nvml.nvmlSystemGetDriverVersion(), (number // 1000, number % 1000 // 10))


@contextlib.contextmanager
def _asking() -> Iterator[Any]:
    import pynvml

    try:
        pynvml.nvmlInit()
        yield pynvml
    except pynvml.NVMLError as error:
        raise ConfigError("cluster", f"NVIDIA's driver does not answer: {error}", "see what nvidia-smi says") from error
