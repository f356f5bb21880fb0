"""GPUs, memory, processes and driver as NVML tells of them; a driver that is absent, and one that does not answer."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest

from rlrecipes.errors import ConfigError
from rlrecipes.plan.hosts import read_local_host
from rlrecipes.plan.nvml import (
    Driver,
    Gpu,
    GpuProcess,
    GpuUse,
    read_busy_fraction,
    read_driver,
    read_gpu_use,
    read_gpus,
)


def fail(number):
    def call(*_):
        raise pynvml.NVMLError(number)

    return call


@pytest.fixture
def driver(monkeypatch):
    """A machine of two H200, the first in use."""
    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=140, used=(120, 1)[handle]),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=7, usedGpuMemory=None)],
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=(75, 0)[handle]),
        "nvmlSystemGetDriverVersion": lambda: "580.159.04",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 13010,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_what_the_driver_tells(driver):
    assert read_gpus() == [Gpu("NVIDIA H200", "GPU-0", 0), Gpu("NVIDIA H200", "GPU-1", 1)]
    assert read_local_host().node.num_gpus == 2
    assert read_gpu_use(0) == GpuUse(140, 120, (GpuProcess(7, None),))
    assert [read_busy_fraction(0), read_busy_fraction(1)] == [0.75, 0.0]
    assert read_driver() == Driver("580.159.04", (13, 1))
    assert [str(GpuProcess(7, used)) for used in (None, 3 << 30)] == ["7", "7 (3,072 MiB)"]


def test_a_container_that_is_not_told_of_processes(driver, monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", fail(pynvml.NVML_ERROR_NOT_SUPPORTED))
    assert read_gpu_use(1) == GpuUse(140, 1, ())


@pytest.mark.parametrize("number", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_without_a_driver_there_is_no_gpu(driver, monkeypatch, number):
    monkeypatch.setattr(pynvml, "nvmlInit", fail(number))
    assert read_gpus() == []
    assert read_local_host().node.num_gpus == 0
    with pytest.raises(ConfigError, match="does not answer"):
        read_driver()


def test_a_driver_that_does_not_answer_is_one_line_and_can_be_left_out(driver, monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlInit", fail(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH))
    with pytest.raises(ConfigError) as refused:
        read_local_host()
    (problem,) = refused.value.problems
    assert problem.where == "cluster" and "version mismatch" in problem.problem and "reload" in problem.fix
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert read_local_host().node.num_gpus == 0
