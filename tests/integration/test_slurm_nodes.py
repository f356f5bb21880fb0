"""The nodes of a real SLURM, started here with fake GPUs; skipped where its daemons are not installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from rlrecipes.engines.sglang.process import find_free_port
from rlrecipes.errors import ConfigError
from rlrecipes.plan.slurm import read_slurm_hosts
from rlrecipes.runner.diagnosis.network import check_network

DAEMONS = ("slurmctld", "slurmd", "sinfo", "scontrol")
PATH = f"{os.environ['PATH']}:/usr/sbin"
MISSING = [name for name in DAEMONS if not shutil.which(name, path=PATH)]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: apt-get install slurm-wlm slurmd slurmctld"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd runs as root only"),
]
NODES = {"a1": "gpu:h200_sxm:2", "a2": "gpu:h200_sxm:2", "a3": "gpu:h200_sxm:2", "b1": "gpu:4", "c1": ""}


def write_config(directory: Path) -> Path:
    for name in ("state", "log", "spool", "dev"):
        (directory / name).mkdir(parents=True)
    for index in range(4):
        (directory / "dev" / f"nvidia{index}").symlink_to("/dev/null")
    host = os.uname().nodename.partition(".")[0]
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={find_free_port()}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/none",
        "CredType=cred/none",
        "MpiDefault=none",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "GresTypes=gpu",
        "SwitchType=switch/none",
        "ReturnToService=2",
        "AccountingStorageType=accounting_storage/none",
        "SlurmdParameters=config_overrides",
        f"SlurmctldPidFile={directory}/slurmctld.pid",
        f"SlurmdPidFile={directory}/slurmd.%n.pid",
        f"SlurmdSpoolDir={directory}/spool/%n",
        f"StateSaveLocation={directory}/state",
        f"SlurmctldLogFile={directory}/log/slurmctld.log",
        f"SlurmdLogFile={directory}/log/slurmd.%n.log",
    ]
    lines += [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={find_free_port()} CPUs=16 RealMemory=16000"
        f"{' Gres=' + gres if gres else ''} State=UNKNOWN"
        for name, gres in NODES.items()
    ]
    lines += [
        "PartitionName=h200 Nodes=a1,a2,a3 Default=YES State=UP",
        "PartitionName=other Nodes=b1,c1 State=UP",
        "PartitionName=broken Nodes=a3 State=UP",
    ]
    config = directory / "slurm.conf"
    config.write_text("\n".join(lines) + "\n")
    gres = [f"NodeName=a[1-3] Name=gpu Type=h200_sxm File={directory}/dev/nvidia[0-1]"]
    gres += [f"NodeName=b1 Name=gpu File={directory}/dev/nvidia[0-3]"]
    (directory / "gres.conf").write_text("\n".join(gres) + "\n")
    (directory / "cgroup.conf").write_text("CgroupAutomount=no\n")
    return config


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    directory = tmp_path_factory.mktemp("slurm")
    config = write_config(directory)
    environment = os.environ | {"SLURM_CONF": str(config), "PATH": PATH}
    daemons = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in NODES)]
    started = [
        subprocess.Popen([*d, "-f", str(config)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for d in daemons
    ]
    patch = pytest.MonkeyPatch()
    patch.setenv("SLURM_CONF", str(config))
    patch.setenv("PATH", PATH)
    try:
        wait_until_idle(directory)
        drain = ["scontrol", "update", "NodeName=a3", "State=DRAIN", "Reason=broken"]
        subprocess.run(drain, check=True, timeout=30)
        yield
    finally:
        patch.undo()
        for process in started:
            process.terminate()
        for process in started:
            process.wait(timeout=30)


def wait_until_idle(directory: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done = subprocess.run(["sinfo", "-hN", "-o", "%N %T"], capture_output=True, text=True, timeout=60, check=False)
        if {line.split()[1] for line in done.stdout.splitlines()} == {"idle"}:
            return
        time.sleep(0.2)
    logs = "\n".join(path.read_text()[-1000:] for path in (directory / "log").iterdir())
    pytest.fail(f"SLURM did not come up: {done.stdout}{done.stderr}\n{logs}")


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
