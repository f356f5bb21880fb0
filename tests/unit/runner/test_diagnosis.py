"""What doctor looks at, piece by piece: packages that break or hang, what a host lacks, machines that do not answer."""

from __future__ import annotations

import os
import resource
import socket
import stat

import pytest

from rlrecipes.config.compose import compose
from rlrecipes.errors import InputError
from rlrecipes.plan.nvml import Gpu
from rlrecipes.runner.diagnosis import gpus, host, packages
from rlrecipes.runner.diagnosis.finding import Finding, to_table
from rlrecipes.runner.diagnosis.host import check_host
from rlrecipes.runner.diagnosis.network import check_network
from rlrecipes.runner.diagnosis.packages import Probe, check_dependencies, check_imports, probe_modules
from rlrecipes.runner.resolution import resolve_recipe

TORCH = Probe(facts={"cuda": "13.0", "nccl": "2.28.9", "has_gloo": True})
PROBES = {"torch": TORCH, "megatron-core": Probe(), "ray": Probe(), "sglang-router": Probe()}


def by_what(findings):
    return {one.what: one for one in findings}


class TestPackages:
    def test_versions_are_held_against_what_is_asked_for(self, tmp_path, monkeypatch):
        assert {one.state for one in check_dependencies()} == {"ok"}
        info = tmp_path / "transformers-4.0.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.0.0\n")
        monkeypatch.syspath_prepend(tmp_path)
        found = by_what(check_dependencies())["transformers"]
        assert found.state == "missing" and found.found.startswith("4.0.0, not ") and "'transformers" in found.fix

    def test_one_that_is_not_there_is_told(self, monkeypatch):
        monkeypatch.setattr(packages.metadata, "requires", lambda name: ["torch", "no-such-package>=2 ; extra == 'x'"])
        assert {one.state for one in check_dependencies()} == {"ok"}  # an extra is nobody's lack
        monkeypatch.setattr(packages.metadata, "requires", lambda name: ["torch", "no-such-package>=2"])
        found = by_what(check_dependencies())
        assert found["no-such-package"].fix == "pip install 'no-such-package>=2'"
        assert found["packages"].found == "1 of 2 that rlrecipes asks for"

    def test_imports_that_fail_crash_or_hang_do_not_hide_the_others(self, tmp_path, monkeypatch):
        sources = {
            "talks": "print('rlrecipes-prob'); import sys; sys.stderr.write('x')",
            "raises": "raise OSError('libcudart.so.13: cannot open\\nshared object file')",
            "leaves": "import os; os._exit(3)",
            "crashes": "import os; os.abort()",
            "hangs": "import time; time.sleep(600)",
            "fine": "",
        }
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        found = {name: probe.problem for name, probe in probe_modules([*sources, "absent"], timeout_s=8).items()}
        assert found == {
            "talks": "",
            "raises": "OSError: libcudart.so.13: cannot open",
            "leaves": "importing it ended Python with code 3",
            "crashes": "importing it ended Python by signal 6",
            "hangs": "importing it took more than 8 s",
            "fine": "",
            "absent": "ModuleNotFoundError: No module named 'absent'",
        }

    def test_a_broken_one_is_missing_and_a_router_only_where_something_is_served(self):
        broken = PROBES | {"torch": Probe(facts={"has_gloo": False}), "sglang-router": Probe("ended")}
        states = {one.what: one.state for one in check_imports(broken, has_router=True)}
        assert states == {"torch": "missing", "megatron-core": "ok", "ray": "ok", "sglang-router": "missing"}
        assert "sglang-router" not in by_what(check_imports(broken, has_router=False))


class TestHost:
    def check(self, *overrides):
        recipe = compose(overrides)
        return by_what(check_host(recipe.config, resolve_recipe(recipe), has_gpus=False))

    def test_a_port_that_is_taken_and_one_that_is_free(self):
        with socket.socket() as taken, socket.socket() as free:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            free.bind(("127.0.0.1", 0))
            ports = [one.getsockname()[1] for one in (taken, free)]
            free.close()
            key = "topology.served_models.policy"
            sglang = f"+{key}.server_groups.main.sglang.port={ports[0]}"
            found = self.check(f"+{key}.router.port={ports[1]}", sglang)
        assert found[f"port {ports[0]}"].state == "missing"
        assert found[f"port {ports[0]}"].needed_for == "policy-main-0"
        assert f"port {ports[1]}" not in found

    @pytest.mark.parametrize(("free", "state"), [(1 << 20, "missing"), (64 << 20, "warning"), (2 << 30, "ok")])
    def test_shared_memory_must_hold_the_weights_and_should_hold_more(self, monkeypatch, free, state):
        monkeypatch.setattr(host, "read_free_disk", lambda path: free if path == host._SHARED_MEMORY else 1 << 50)
        assert self.check()["shared memory"].state == state

    def test_limits(self, monkeypatch):
        limits = {resource.RLIMIT_NOFILE: 600, resource.RLIMIT_NPROC: resource.RLIM_INFINITY}
        monkeypatch.setattr(resource, "getrlimit", lambda number: (limits[number], limits[number]))
        found = self.check()
        assert found["open files"].fix == "ulimit -n 768" and found["processes and threads"].state == "ok"
        assert self.check("rollout.max_concurrent_requests=100")["open files"].state == "ok"
        limits[resource.RLIMIT_NPROC] = 100
        assert self.check()["processes and threads"].state == "missing"

    def test_disk_under_the_runs_directory(self, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        recipe = compose(())
        plan = resolve_recipe(recipe)
        monkeypatch.setattr(host, "read_free_disk", lambda path: 1 << 10)
        found = by_what(check_host(recipe.config, plan, has_gpus=True))
        assert found["disk"].state == "missing" and "set runs_dir" in found["disk"].fix
        assert found["disk of /tmp"].state == "missing"
        assert "locked memory" in found

    def test_a_runs_directory_that_cannot_be_written(self, monkeypatch):
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        assert self.check()["disk"].found.startswith("not writable")


class TestGpus:
    def test_without_a_gpu_everything_is_a_warning(self, monkeypatch):
        monkeypatch.setattr(gpus, "read_visible_gpus", lambda: [])
        monkeypatch.setattr(gpus, "read_sglang_version", lambda python: None)
        found = by_what(gpus.check_gpus(PROBES | {"torch": Probe("ended")}))
        assert set(found) == {"GPUs", "CUDA of torch", "NCCL", "Transformer Engine", "SGLang", "DeepEP"}
        assert {one.state for one in found.values()} == {"warning"}

    def test_gpus_of_this_machine(self, monkeypatch):
        monkeypatch.setattr(gpus, "read_visible_gpus", lambda: [Gpu("NVIDIA H200", f"GPU-{n}", n) for n in range(2)])
        monkeypatch.setattr(gpus, "read_sglang_version", lambda python: "0.5.17" if ".venv" in python else None)
        found = list(gpus.check_gpus(PROBES))
        assert found[0].found == "2 NVIDIA H200"
        assert by_what(found)["SGLang"].state == "ok"  # the driver of this machine may be absent: that is told too

    def test_a_plan_is_judged_as_its_run_would_be(self):
        plan = resolve_recipe(compose(["recipe=qwen3_4b"]))
        problems = [one.found for one in gpus.check_plan(plan, PROBES) if one.state == "missing"]
        assert "h100_8 says 8 GPUs; here are none" in problems or os.path.exists("/proc/driver/nvidia")
        assert "Transformer Engine is not installed" in problems or packages.read_version("transformer-engine")
        assert list(gpus.check_plan(resolve_recipe(compose()), PROBES)) == []


SSH = """#!/bin/sh
for word; do node=$last; last=$word; done
case "$node" in
  gone) echo "ssh: connect to host gone port 22: No route to host" >&2; exit 255 ;;
  walled) eval "$(echo "$last" | sed 's/"ports": ports/"ports": [1, ports[1]]/')" ;;
  *) eval "$last" ;;
esac
"""


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """What stands for ssh runs the program on this machine: real processes, real sockets, one of them behind a wall."""
    script = tmp_path / "ssh"
    script.write_text(SSH)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


class TestNetwork:
    def test_all_ways_between_machines(self, ssh):
        (found,) = check_network(["a", "b", "c"], is_slurm=False, partition=None)
        assert found.state == "ok" and found.found.startswith("3 machines, 6 ways, round trip ")

    def test_a_machine_that_is_gone_and_a_port_that_is_closed(self, ssh):
        found = by_what(check_network(["a", "walled", "gone"], is_slurm=False, partition=None))
        assert found["machine gone"].found.endswith("No route to host")
        assert set(found) == {"machine gone", "network a to walled", "network"}
        assert found["network a to walled"].found.startswith("port 1 of ")
        assert found["network"].found.startswith("2 machines, 2 ways")

    def test_no_ssh_here(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(InputError, match="no ssh here"):
            check_network(["a", "b"], is_slurm=False, partition=None)


def test_the_table_has_a_line_a_finding():
    table = to_table([Finding("a thing", "found", "all"), Finding("b", "no", "some", "mend", is_needed=False)])
    assert table.splitlines() == [
        "         what     found  needed for  fix",
        "ok       a thing  found  all",
        "warning  b        no     some        mend",
    ]
