"""A cluster described, or read from this machine, SLURM or Ray: what is settled, what is refused, what a run checks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import yaml

from rlrecipes.config.compose import compose
from rlrecipes.config.schema import GpuConfig
from rlrecipes.errors import ConfigError
from rlrecipes.plan import cluster as cluster_module
from rlrecipes.plan import hosts
from rlrecipes.plan.cluster import check_is_here, find_gpus, read_cluster
from rlrecipes.plan.hosts import FoundHost, read_free_disk, read_local_host
from rlrecipes.plan.nodes import HostNode, load_plan
from rlrecipes.plan.nvml import Gpu
from rlrecipes.plan.resolve import resolve
from rlrecipes.plan.slurm import parse_nodes, read_slurm_hosts
from rlrecipes.runner.resolution import resolve_recipe

GPU_FILES = sorted((Path(__file__).parents[3] / "conf" / "gpu").glob("*.yaml"))
CUDA = ("topology.device=cuda", "topology.served_models.policy.server_groups.main.engine=sglang")


def refuse_ray(address: str) -> list[FoundHost]:
    raise AssertionError(f"asked Ray at {address}")


def settle(*overrides, found=None, monkeypatch=None):
    """Read a cluster; ``found`` stands for this machine and for Ray's machines alike."""
    config = compose(overrides).config
    if monkeypatch is not None:
        monkeypatch.setattr(cluster_module, "read_local_host", lambda: found[0])
    problems = []
    ask = refuse_ray if found is None or config.cluster.source != "ray" else lambda address: found
    cluster = read_cluster(config.cluster, config.runs_dir, problems, ask)
    return cluster, {problem.where: problem for problem in problems}


def machine(name="here", gpus=0, *names):
    return FoundHost(HostNode(name=name, num_cpus=16, num_gpus=gpus, memory_bytes=1 << 37), names)


@pytest.mark.parametrize(
    ("option", "num_nodes", "num_gpus", "gpu"),
    [
        ("h200_1", 1, 1, "H200-SXM"),
        ("h200_2", 1, 2, "H200-SXM"),
        ("h200_8", 1, 8, "H200-SXM"),
        ("h100_8", 1, 8, "H100-SXM"),
        ("h100_8x2", 2, 8, "H100-SXM"),
        ("h100_8x4", 4, 8, "H100-SXM"),
        ("h100_8x16", 16, 8, "H100-SXM"),
        ("h100_8x32", 32, 8, "H100-SXM"),
    ],
)
def test_described_clusters_are_what_they_are_called(option, num_nodes, num_gpus, gpu):
    cluster, problems = settle(f"cluster={option}")
    assert not problems and not cluster.notes
    assert [host.name for host in cluster.hosts] == [f"{option}-{index}" for index in range(num_nodes)]
    assert {host.num_gpus for host in cluster.hosts} == {num_gpus}
    assert cluster.node.gpu.name == gpu
    assert cluster.node.disk_bytes is None


def test_another_gpu_of_a_described_cluster_is_one_override():
    cluster, _ = settle("cluster=h100_8x2", "gpu@cluster.gpu=b200")
    assert cluster.node.gpu.name == "B200" and len(cluster.hosts) == 2


def test_all_that_a_description_lacks_is_told_at_once():
    fields = ("num_nodes", "gpus_per_node", "cpus_per_node", "memory_bytes_per_node")
    nulls = [f"cluster.{name}=null" for name in fields]
    cluster, problems = settle("cluster=h200_8", *nulls, "cluster.partition=gpu")
    assert set(problems) == {*(null.partition("=")[0] for null in nulls), "cluster.partition"}
    assert cluster.hosts == ()


def test_a_description_without_gpus_has_no_gpu():
    _, problems = settle("cluster=h200_8", "cluster.gpus_per_node=0")
    assert set(problems) == {"cluster.gpu"}
    cluster, problems = settle("cluster=h200_8", "cluster.gpus_per_node=0", "cluster.gpu=null")
    assert not problems and cluster.hosts[0].num_gpus == 0 and not cluster.notes


def test_cuda_without_gpus_is_refused():
    recipe = compose(["cluster=h200_8", "cluster.gpus_per_node=0", "cluster.gpu=null", *CUDA])
    with pytest.raises(ConfigError) as caught:
        resolve_recipe(recipe)
    assert [(problem.where, "the cluster has 0" in problem.problem) for problem in caught.value.problems] == [
        ("topology", True)
    ]


def test_a_cluster_that_cannot_be_told_is_one_problem_not_two():
    with pytest.raises(ConfigError) as caught:
        resolve_recipe(compose(["cluster=h200_8", "cluster.num_nodes=null", *CUDA]))
    (problem,) = caught.value.problems
    assert problem.where == "cluster.num_nodes" and problem.origin == "override cluster.num_nodes=null"


def test_an_unknown_gpu_is_a_note():
    cluster, problems = settle("cluster=h200_8", "cluster.gpu=null")
    assert not problems and cluster.node.gpu is None
    assert "nothing is said of memory and time" in cluster.notes[0]


@pytest.mark.parametrize(
    ("names", "gpu", "note"),
    [
        (("NVIDIA H200",), "H200-SXM", None),
        (("NVIDIA H100 80GB HBM3",), "H100-SXM", None),
        (("nvidia_h100_80gb_hbm3",), "H100-SXM", None),
        (("h200_sxm",), "H200-SXM", None),
        (("NVIDIA GeForce RTX 4090",), "RTX-4090", None),
        (("H100", "NVIDIA H100 PCIe"), "H100-PCIe", None),
        (("H100",), None, "H100 may be H100-PCIe or H100-SXM"),
        (("NVIDIA H200 NVL",), None, "NVIDIA H200 NVL is no GPU of conf/gpu"),
        ((), None, "does not say what its GPUs are"),
    ],
)
def test_the_gpu_is_read_from_its_name(names, gpu, note, monkeypatch):
    cluster, problems = settle("cluster=host", found=[machine("here", 8, *names)], monkeypatch=monkeypatch)
    assert not problems
    assert (cluster.node.gpu.name if cluster.node.gpu else None) == gpu
    assert bool(cluster.notes) == (gpu is None)
    assert note is None or note in cluster.notes[0]


def test_a_machine_without_gpus_says_nothing_of_them(monkeypatch):
    cluster, problems = settle("cluster=host", found=[machine()], monkeypatch=monkeypatch)
    assert (cluster.node.gpu, cluster.notes, problems) == (None, (), {})


def test_what_stands_beside_what_is_read_must_agree(monkeypatch):
    found = [machine("here", 8, "NVIDIA H200")]
    same = ("cluster.gpus_per_node=8", "cluster.cpus_per_node=16", "gpu@cluster.gpu=h200_sxm", "cluster.num_nodes=1")
    cluster, problems = settle(
        "cluster=host", *same, "cluster.gpu.memory_bytes=5", found=found, monkeypatch=monkeypatch
    )
    assert not problems and cluster.node.gpu.memory_bytes == 5
    other = (
        "cluster.gpus_per_node=4",
        "cluster.cpus_per_node=8",
        "cluster.memory_bytes_per_node=1",
        "cluster.num_nodes=2",
        "cluster.address=auto",
        "gpu@cluster.gpu=b200",
    )
    cluster, problems = settle("cluster=host", *other, found=found, monkeypatch=monkeypatch)
    assert set(problems) == {
        "cluster.gpus_per_node",
        "cluster.cpus_per_node",
        "cluster.memory_bytes_per_node",
        "cluster.num_nodes",
        "cluster.address",
        "cluster.gpu",
    }
    assert "here has 8" in problems["cluster.gpus_per_node"].problem
    assert cluster.hosts == ()


def test_ray_is_asked_for_its_machines_and_those_with_gpus_come_first():
    found = [machine("head"), machine("w0", 4, "H200"), machine("w1", 8, "H200")]
    cluster, problems = settle("cluster=ray", "cluster.num_nodes=2", found=found)
    assert not problems
    assert [host.name for host in cluster.hosts] == ["w1", "w0"]
    assert cluster.node.gpu.name == "H200-SXM"
    _, problems = settle("cluster=ray", "cluster.address=null")
    assert set(problems) == {"cluster.address"}


def test_gpus_of_two_kinds_are_refused():
    _, problems = settle("cluster=ray", found=[machine("w0", 8, "H200"), machine("w1", 8, "B200")])
    assert set(problems) == {"cluster"} and "B200, H200" in problems["cluster"].problem


# --- this machine ---


@pytest.mark.parametrize(
    ("visible", "num_gpus", "names"),
    [
        (None, 3, ("NVIDIA H200",)),
        ("", 0, ()),
        ("-1", 0, ()),
        ("NoDevFiles", 0, ()),
        ("1", 1, ("NVIDIA H200",)),
        ("2,0", 2, ("NVIDIA H200",)),
        ("0,7,1", 1, ("NVIDIA H200",)),  # CUDA stops at the first that is none
        ("GPU-18ee,GPU-08ee57ef-be14", 2, ("NVIDIA H200",)),
        ("GPU-98ee", 0, ()),
        ("MIG-1234", 1, ("a MIG slice",)),
    ],
)
def test_gpus_are_those_that_cuda_would_show(monkeypatch, visible, num_gpus, names):
    gpus = [Gpu("NVIDIA H200", f"GPU-{index}8ee57ef-be14", index) for index in range(3)]
    monkeypatch.setattr(hosts, "read_gpus", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    host = read_local_host()
    assert (host.node.num_gpus, host.gpu_names) == (num_gpus, names)


@pytest.mark.parametrize(
    ("groups", "limits", "memory"),
    [
        ("0::/a/b\n", {"memory.max": "max", "a/memory.max": "4096", "a/b/memory.max": "8192"}, 4096),
        ("0::/a/b\n", {"a/b/memory.max": "2048"}, 2048),
        ("0::/gone\n", {"memory.max": "1024"}, 1024),
        ("4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "512"}, 512),
        ("4:cpu,memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("3:cpuset:/a\n", {"memory/a/memory.limit_in_bytes": "512"}, None),
        ("0::/\n", {"memory.max": "max"}, None),
    ],
)
def test_memory_is_what_the_control_groups_leave(tmp_path, groups, limits, memory):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in limits.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert read_local_host(tmp_path).node.memory_bytes == (memory or physical)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_cores_are_those_that_the_process_may_use():
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
    code += "from rlrecipes.plan.hosts import read_local_host; print(read_local_host().node.num_cpus)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "1\n"


def test_free_disk_is_that_of_the_nearest_directory(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or usage(3, 1, 2))
    assert read_free_disk(tmp_path / "runs" / "new") == 2
    assert asked == [tmp_path]
    cluster, _ = settle("cluster=host", f"runs_dir={tmp_path}/runs")
    assert cluster.node.disk_bytes == 2
    cluster, _ = settle("cluster=host", "cluster.disk_bytes=7")
    assert cluster.node.disk_bytes == 7


# --- SLURM ---

# As sinfo 22.05 printed it of a real SLURM with fake GPUs: jobs on a2 and c1, a3 drained, a4's daemon killed.
SINFO = """\
a1|16|16000|gpu:h200_sxm:2|idle|h200*
a2|16|16000|gpu:h200_sxm:2|mixed|h200*
a3|16|16000|gpu:h200_sxm:2|drained|h200*
a3|16|16000|gpu:h200_sxm:2|drained|broken
a4|16|16000|gpu:h200_sxm:2|down*|h200*
a4|16|16000|gpu:h200_sxm:2|down*|broken
b1|16|16000|gpu:4|idle|other
c1|16|16000|(null)|allocated|other
"""


def test_usable_nodes_of_a_partition():
    found = parse_nodes(SINFO, "h200")
    assert found == parse_nodes(SINFO, None)
    assert [host.node.name for host in found] == ["a1", "a2"]
    assert found[0] == FoundHost(HostNode(name="a1", num_cpus=16, num_gpus=2, memory_bytes=16000 << 20), ("h200_sxm",))
    assert [(host.node.num_gpus, host.gpu_names) for host in parse_nodes(SINFO, "other")] == [(4, ()), (0, ())]


@pytest.mark.parametrize(
    ("gres", "num_gpus", "names"),
    [
        ("gpu:8(S:0-1)", 8, ()),
        ("gpu:nvidia_h100_80gb_hbm3:8(S:0-1,3)", 8, ("nvidia_h100_80gb_hbm3",)),
        ("gpu:a:4(S:0),gpu:a:4(S:1)", 8, ("a",)),
        ("gpu:a:4,gpu:b:2", 6, ("a", "b")),
        ("shard:h100:64,nic:2", 0, ()),
        ("nic:2,gpu:h100:1", 1, ("h100",)),
    ],
)
def test_gres(gres, num_gpus, names):
    (host,) = parse_nodes(f"n|2|3|{gres}|idle|p\n", "p")
    assert (host.node.num_gpus, host.gpu_names) == (num_gpus, names)


@pytest.mark.parametrize(
    ("state", "is_usable"),
    [("idle~", True), ("idle#", True), ("mixed@", True), ("allocated+", True), ("completing", True), ("planned", True)]
    + [(state, False) for state in ("idle*", "draining", "drained", "down", "fail", "maint", "allocated$", "unknown*")],
)
def test_states(state, is_usable):
    text = f"n|2|3|gpu:1|{state}|p\nm|2|3|gpu:1|idle|p\n"
    assert [host.node.name for host in parse_nodes(text, "p")] == (["n", "m"] if is_usable else ["m"])


@pytest.mark.parametrize(
    ("partition", "problem", "fix"),
    [
        ("h20", "SLURM has no 'h20'", "did you mean 'h200'?"),
        ("broken", "no node of 'broken' is usable: 1 drained, 1 down*", "sinfo -R"),
    ],
)
def test_a_partition_that_cannot_be_used(partition, problem, fix):
    with pytest.raises(ConfigError) as caught:
        parse_nodes(SINFO, partition)
    (found,) = caught.value.problems
    assert (found.where, found.problem) == ("cluster.partition", problem)
    assert fix in found.fix


def test_slurm_without_a_default_partition():
    with pytest.raises(ConfigError, match="no default one"):
        parse_nodes(SINFO.replace("*\n", "\n"), None)


def test_a_machine_without_slurm_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        read_slurm_hosts("gpu")
    assert caught.value.problems[0].where == "cluster.source"
    _, problems = settle("cluster=slurm", "cluster.address=x")
    assert set(problems) == {"cluster.source", "cluster.address"}


# --- conf/gpu ---


@pytest.mark.parametrize("path", GPU_FILES, ids=lambda path: path.stem)
def test_every_gpu_is_found_by_its_names_and_has_plausible_dense_rates(path):
    gpu = GpuConfig.model_validate_json(json.dumps(yaml.safe_load(path.read_text())))
    for name in (gpu.name, *gpu.device_names):
        assert gpu in find_gpus(name)
    assert find_gpus(gpu.device_names[0]) == (gpu,)
    if gpu.fp8_flops_per_s is not None:
        assert gpu.fp8_flops_per_s / gpu.bf16_flops_per_s == pytest.approx(2, rel=0.03)
    assert gpu.nvlink_bytes_per_s < gpu.hbm_bytes_per_s


# --- the Plan, and where it may start ---


def test_the_plan_says_what_the_cluster_is_and_its_hash_forgets_free_disk(tmp_path, monkeypatch):
    found = [machine("here", 8, "NVIDIA H200")]
    monkeypatch.setattr(cluster_module, "read_local_host", lambda: found[0])
    plan = resolve_recipe(compose([*CUDA]))
    assert plan.cluster.gpu.name == "H200-SXM" and plan.cluster.disk_bytes > 0
    (tmp_path / "plan.yaml").write_text(plan.to_yaml())
    assert load_plan(tmp_path / "plan.yaml") == plan
    changed = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"disk_bytes": 1})})
    assert changed.hash == plan.hash
    slower = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"nic_bytes_per_s": 1.0})})
    assert slower.hash != plan.hash


def test_without_a_settled_cluster_the_plan_says_what_the_recipe_says():
    recipe = compose(["cluster=h200_8"])
    plan = resolve(recipe.config, (machine("h200_8-0", 8).node,), recipe.origins)
    assert plan.cluster.gpu == recipe.config.cluster.gpu


@pytest.mark.parametrize(
    ("overrides", "here", "where", "says"),
    [
        (["cluster=h200_8"], machine(), "cluster", "h200_8 says 8 GPUs; here are none"),
        (["cluster=h200_8"], machine("x", 4, "NVIDIA H200"), "cluster", "here are 4"),
        (["cluster=h200_8", *CUDA], machine("x", 8, "NVIDIA B200"), "cluster.gpu", "is H200-SXM; here is NVIDIA B200"),
        (["cluster=h100_8x2", *CUDA], machine("x", 8, "NVIDIA H100 80GB HBM3"), "cluster", "has 2 machines"),
    ],
)
def test_a_described_cluster_that_this_machine_is_not_starts_nothing(overrides, here, where, says, monkeypatch):
    plan = resolve_recipe(compose(overrides))
    monkeypatch.setattr(cluster_module, "read_local_host", lambda: here)
    with pytest.raises(ConfigError) as caught:
        check_is_here(plan)
    (problem,) = caught.value.problems
    assert problem.where == where and says in problem.problem


@pytest.mark.parametrize(
    ("overrides", "here"),
    [
        (["cluster=h200_8", *CUDA], machine("x", 8, "NVIDIA H200")),
        (["cluster=h200_2", *CUDA], machine("x", 8, "some GPU that conf/gpu lacks")),
        (["cluster=host"], machine()),
    ],
)
def test_a_machine_that_is_what_the_plan_says_may_start(overrides, here, monkeypatch):
    plan = resolve_recipe(compose(overrides))
    monkeypatch.setattr(cluster_module, "read_local_host", lambda: here)
    check_is_here(plan)


def test_a_plan_of_a_gpu_machine_needs_the_gpus_that_it_uses(monkeypatch):
    monkeypatch.setattr(cluster_module, "read_local_host", lambda: machine("there", 8, "NVIDIA H200"))
    uses_none, uses_one = resolve_recipe(compose([])), resolve_recipe(compose([*CUDA]))
    monkeypatch.setattr(cluster_module, "read_local_host", lambda: machine())
    check_is_here(uses_none)
    with pytest.raises(ConfigError, match="needs 1 GPUs; here are none"):
        check_is_here(uses_one)
