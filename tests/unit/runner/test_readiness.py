"""What stops a run before any process of it starts: packages, driver, GPUs that others hold."""

from __future__ import annotations

import sys

import pytest

from rlrecipes.config.compose import compose
from rlrecipes.errors import ConfigError
from rlrecipes.plan import packages
from rlrecipes.plan.nvml import Driver, Gpu, GpuProcess, GpuUse
from rlrecipes.runner import readiness
from rlrecipes.runner.readiness import check_is_ready
from rlrecipes.runner.resolution import resolve_recipe

GIB = 1 << 30
GROUP = "topology.served_models.policy.server_groups.main"
FIND_MODULE = readiness._FIND_MODULE
RECIPE = ["recipe=smollm2_135m_reasoning", "model.path=null"]


@pytest.fixture
def machine(monkeypatch):
    """One idle H200 with all that a Plan needs; changed by tests."""
    found = {"use": GpuUse(140 * GIB, GIB // 2, ()), "driver": Driver("580.159.04", (13, 0))}
    monkeypatch.setattr(packages, "is_installed", lambda module: True)
    monkeypatch.setattr(readiness, "read_visible_gpus", lambda: [Gpu("NVIDIA H200", "GPU-3", 3)])
    monkeypatch.setattr(readiness, "read_gpu_use", lambda index: {3: found["use"]}[index])
    monkeypatch.setattr(readiness, "read_driver", lambda: found["driver"])
    monkeypatch.setattr(readiness, "_FREEING_S", 0.0)
    monkeypatch.setattr(readiness, "_FIND_MODULE", "")
    monkeypatch.setattr(readiness, "read_torch_build", lambda: ("2.11.0", "13.0"))
    return found


def problems_of(*overrides, **options):
    plan = resolve_recipe(compose([*RECIPE, *overrides]))
    try:
        check_is_ready(plan, **options)
    except ConfigError as error:
        assert not any("\n" in problem.problem + problem.fix for problem in error.problems)
        return [(problem.where, problem.problem) for problem in error.problems]
    return []


def test_a_machine_that_has_everything(machine):
    assert problems_of() == []


def test_a_gpu_that_others_hold_names_them(machine):
    machine["use"] = GpuUse(140 * GIB, 100 * GIB, (GpuProcess(7, 98 * GIB), GpuProcess(8, None)))
    ((where, problem),) = problems_of()
    assert where == "cluster" and problem.endswith("processes: 7 (100,352 MiB), 8")
    assert problem.startswith("GPU 0 has 40.0 GiB free of 140.0, the Plan needs 13")
    small = (f"+{GROUP}.sglang.mem_fraction_static=0.1", "parallel.max_tokens_per_micro_batch=16384")
    assert problems_of(*small) == []  # what is left is enough for it
    machine["use"] = GpuUse(140 * GIB, 100 * GIB, ())
    ((_, problem),) = problems_of()
    assert problem.endswith("none that the driver names")


def test_memory_that_is_freed_meanwhile_is_waited_for(machine, monkeypatch):
    uses = iter([GpuUse(140 * GIB, 100 * GIB, ()), GpuUse(140 * GIB, 0, ())])
    monkeypatch.setattr(readiness, "read_gpu_use", lambda index: next(uses))
    monkeypatch.setattr(readiness, "_FREEING_S", 60.0)
    assert problems_of() == []


@pytest.mark.parametrize(
    ("cuda", "built", "says"),
    [((12, 4), "13.0", "driver 580.159.04 runs CUDA 12.4; torch"), ((13, 0), None, "is built without CUDA")],
)
def test_a_driver_that_is_too_old_and_a_torch_without_cuda(machine, monkeypatch, cuda, built, says):
    machine["driver"] = Driver("580.159.04", cuda)
    monkeypatch.setattr(readiness, "read_torch_build", lambda: ("2.11.0", built))
    ((_, problem),) = problems_of()
    assert says in problem
    machine["driver"] = Driver("999", (14, 0))
    monkeypatch.setattr(readiness, "read_torch_build", lambda: ("2.11.0", "13.2"))
    assert problems_of() == []


def test_missing_packages_are_told_together(machine, monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda module: False)
    monkeypatch.setattr(readiness, "_FIND_MODULE", "raise SystemExit(3)")
    found = dict(problems_of())
    assert found["parallel.megatron.transformer_impl"] == "Transformer Engine is not installed"
    assert found[f"{GROUP}.python"] == f"{sys.executable} has no SGLang"
    assert list(dict(problems_of(should_train=False))) == [f"{GROUP}.python"]
    assert len(problems_of("+parallel.megatron.transformer_impl=local")) == 1


def test_sglang_is_looked_for_where_engines_will_run(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(readiness, "_FIND_MODULE", FIND_MODULE)
    path = f"+{GROUP}.env.PYTHONPATH={tmp_path}"
    assert len(problems_of(path)) == 1
    (tmp_path / "sglang.py").touch()
    assert problems_of(path) == []
    (tmp_path / "python").touch()
    ((where, problem),) = problems_of(path, f"{GROUP}.python={tmp_path}/python")
    assert where == f"{GROUP}.python" and "cannot be started" in problem
