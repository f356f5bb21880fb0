import time

import pytest

from rlrecipes.tracking.metrics import check_metrics
from rlrecipes.tracking.system import GpuLoad, SystemSampler

HOST = {
    "system/cpu_fraction",
    "system/memory_bytes",
    "system/disk_free_bytes",
    "system/network_sent_bytes_per_s",
    "system/network_received_bytes_per_s",
}


def test_a_machine_without_gpus_tells_of_itself(tmp_path):
    with SystemSampler(tmp_path) as system:
        metrics = check_metrics(system.take())
    assert set(metrics) == HOST
    assert metrics["system/memory_bytes"] > 1e7 and metrics["system/network_sent_bytes_per_s"] >= 0


def test_gpu_memory_is_the_most_of_the_fullest_in_each_phase(tmp_path):
    used = [10, 20]

    def read():
        return [GpuLoad(0.5, used[0]), GpuLoad(1.0, used[1])]

    system = SystemSampler(tmp_path, read)
    with system.phase("rollout"):
        used[:] = [70, 30]
    used[:] = [5, 5]
    with system.phase("train"):
        pass
    metrics = check_metrics(system.take())
    assert metrics["system/gpu_memory_rollout_bytes"] == 70 and metrics["system/gpu_memory_train_bytes"] == 5
    assert metrics["system/gpu_memory_bytes"] == 70 and metrics["system/gpu_use_fraction"] == 0.75
    later = system.take()
    assert later["system/gpu_memory_bytes"] == 5 and "system/gpu_memory_rollout_bytes" not in later


def test_it_looks_by_itself_between_the_ends_of_a_phase(tmp_path, monkeypatch):
    monkeypatch.setattr("rlrecipes.tracking.system.SAMPLE_INTERVAL_S", 0.01)
    peak = [1]
    with SystemSampler(tmp_path, lambda: [GpuLoad(0.0, peak[0])]) as system, system.phase("train"):
        peak[0] = 99
        deadline = time.monotonic() + 10
        while system._seen.gpu_bytes.get("train") != 99 and time.monotonic() < deadline:
            time.sleep(0.01)
        peak[0] = 2
    assert system.take()["system/gpu_memory_train_bytes"] == 99


def test_a_driver_that_stops_answering_costs_one_warning(tmp_path, caplog):
    def read():
        raise RuntimeError("driver lost")

    system = SystemSampler(tmp_path, read)
    assert set(system.take()) == HOST and set(system.take()) == HOST
    assert caplog.text.count("driver lost") == 1


@pytest.mark.parametrize("outer", ["rollout", ""])
def test_a_phase_within_another_ends_where_it_began(tmp_path, outer):
    system = SystemSampler(tmp_path, lambda: [GpuLoad(0.0, 1)])
    with system.phase(outer):
        with system.phase("weight_sync"):
            pass
        assert system._phase == outer
