"""The nodes of a real SLURM, started here with fake GPUs; skipped where its daemons are not installed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rlrecipes.engines.sglang.process import find_free_port
from rlrecipes.errors import ConfigError
from rlrecipes.plan.slurm import read_slurm_hosts
from rlrecipes.runner.diagnosis.network import check_network
from tests.integration.slurm_cluster import NEEDS_SLURM, run_slurm

pytestmark = NEEDS_SLURM
NODES = {"a1": "gpu:h200_sxm:2", "a2": "gpu:h200_sxm:2", "a3": "gpu:h200_sxm:2", "b1": "gpu:4", "c1": ""}
PARTITIONS = (
    "PartitionName=h200 Nodes=a1,a2,a3 Default=YES State=UP",
    "PartitionName=other Nodes=b1,c1 State=UP",
    "PartitionName=broken Nodes=a3 State=UP",
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with run_slurm(tmp_path_factory.mktemp("slurm"), NODES, PARTITIONS):
        drain = ["scontrol", "update", "NodeName=a3", "State=DRAIN", "Reason=broken"]
        subprocess.run(drain, check=True, timeout=30)
        yield


def test_nodes_come_with_their_gpus_and_drained_ones_are_left_out(slurm, monkeypatch):
    monkeypatch.setenv("SINFO_FORMAT", "%N")  # a user's own habits change nothing
    monkeypatch.setenv("SINFO_PARTITION", "other")
    found = read_slurm_hosts("h200")
    assert [(host.node.name, host.node.num_gpus, host.gpu_names) for host in found] == [
        ("a1", 2, ("h200_sxm",)),
        ("a2", 2, ("h200_sxm",)),
    ]
    assert {(host.node.num_cpus, host.node.memory_bytes) for host in found} == {(16, 16000 << 20)}
    assert read_slurm_hosts(None) == found  # it is the default one


def test_gpus_without_a_type_and_nodes_without_gpus(slurm):
    found = {host.node.name: (host.node.num_gpus, host.gpu_names) for host in read_slurm_hosts("other")}
    assert found == {"b1": (4, ()), "c1": (0, ())}


@pytest.mark.parametrize(("partition", "word"), [("h2000", "'h200'"), ("broken", "1 drain")])
def test_a_partition_that_cannot_be_used_is_told(slurm, partition, word):
    with pytest.raises(ConfigError) as caught:
        read_slurm_hosts(partition)
    (problem,) = caught.value.problems
    assert problem.where == "cluster.partition"
    assert word in problem.problem + problem.fix


def test_a_controller_that_does_not_answer_is_told(slurm, tmp_path, monkeypatch):
    config = Path(os.environ["SLURM_CONF"])
    lines = config.read_text().splitlines()
    dead = tmp_path / "slurm.conf"
    text = "\n".join(f"SlurmctldPort={find_free_port()}" if "SlurmctldPort" in line else line for line in lines)
    dead.write_text(text + "\nSlurmctldTimeout=2\nMessageTimeout=2\n")
    monkeypatch.setenv("SLURM_CONF", str(dead))
    with pytest.raises(ConfigError) as caught:
        read_slurm_hosts("h200")
    (problem,) = caught.value.problems
    assert problem.where == "cluster.source" and "sinfo" in problem.problem


def test_the_network_between_nodes_is_tried_by_srun(slurm):
    (found,) = check_network(["a1", "a2"], is_slurm=True, partition="h200")
    assert found.state == "ok" and found.found.startswith("2 machines, 2 ways, round trip ")
    lost = {one.what: one.found for one in check_network(["a1", "a3"], is_slurm=True, partition="h200")}
    assert set(lost) == {"machine a3"} and "srun: " in lost["machine a3"]
