"""The machines of a running Ray cluster, started here with fake GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rlrecipes.engines.sglang.process import find_free_port
from rlrecipes.errors import ConfigError
from rlrecipes.runner.cluster import read_ray_hosts

RAY = Path(sys.executable).parent / "ray"


@pytest.fixture
def ray_address(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    port = find_free_port()
    with tempfile.TemporaryDirectory(prefix="ray") as scratch:  # its sockets' paths must be short
        command = [str(RAY), "start", "--head", "--block", f"--port={port}", f"--temp-dir={scratch}"]
        command += ["--num-cpus=3", "--num-gpus=4", '--resources={"accelerator_type:H200": 1}']
        command += ["--include-dashboard=false", "--object-store-memory=80000000", "--disable-usage-stats"]
        command += ["--min-worker-port=0", "--max-worker-port=0"]  # its usual ranges are others' too
        log = Path(scratch) / "start.log"
        with log.open("w") as output:
            head = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            deadline = time.monotonic() + 120
            while "Ray runtime started" not in log.read_text():
                assert head.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            yield f"127.0.0.1:{port}"
        finally:
            os.killpg(head.pid, signal.SIGKILL)
            head.wait(timeout=30)


def test_its_machines_and_their_gpus(ray_address):
    (host,) = read_ray_hosts(ray_address)
    assert (host.node.num_cpus, host.node.num_gpus, host.gpu_names) == (3, 4, ("H200",))
    assert host.node.name == os.uname().nodename
    assert host.node.memory_bytes > 1 << 28


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "no-such-host.invalid:6379", "127.0.0.1:99999", "nonsense"])
def test_an_address_where_no_ray_is_is_told(address):
    with pytest.raises(ConfigError) as caught:
        read_ray_hosts(address.format(port=find_free_port()))
    (problem,) = caught.value.problems
    assert problem.where == "cluster.address" and "no Ray answers" in problem.problem
