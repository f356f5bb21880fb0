"""The machines of a running Ray cluster, started here with fake GPUs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from rlrecipes.engines.sglang.process import find_free_port
from rlrecipes.errors import ConfigError
from rlrecipes.runner.cluster import read_ray_hosts
from tests.integration.ray_processes import run_ray


@pytest.fixture
def ray_address(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    port = find_free_port()
    with tempfile.TemporaryDirectory(prefix="ray") as scratch:  # its sockets' paths must be short
        words = ["--head", f"--port={port}", f"--temp-dir={scratch}", "--include-dashboard=false"]
        words += ["--num-cpus=3", "--num-gpus=4", '--resources={"accelerator_type:H200": 1}']
        with run_ray(words, Path(scratch) / "start.log"):
            yield f"127.0.0.1:{port}"


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
