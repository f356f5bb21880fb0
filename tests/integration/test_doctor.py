"""`rlrecipes doctor` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROAD = {"Python", "packages", "torch", "megatron-core", "ray", "sglang-router", "disk", "ports"}
_RUN = """
import sys
from rlrecipes.cli.main import run
code = run(sys.argv[1:])
assert not {"torch", "ray", "megatron", "transformers"} & set(sys.modules)
sys.exit(code)
"""


def diagnose(directory: Path, *words: str, code: int) -> dict[str, dict[str, str]]:
    """Run it in a directory whose modules come before those installed; no heavy package may be imported by itself."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN, "doctor", *words, "--format", "json"],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(directory), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return {one["what"]: one for one in json.loads(done.stdout)["findings"]}


def pretend(directory: Path, package: str) -> None:
    """An old version of a package."""
    info = directory / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")


def test_the_road_of_the_cpu_works_here_and_gpu_parts_only_warn(tmp_path):
    found = diagnose(tmp_path, code=0)
    assert found.keys() >= ROAD and {found[what]["state"] for what in ROAD} == {"ok"}
    assert found["GPUs"]["state"] == "warning" and found["GPUs"]["found"] == "none"
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_that_this_machine_cannot_run_an_old_package_and_one_that_ends_python(tmp_path):
    pretend(tmp_path, "mlflow")
    (tmp_path / "sglang_router.py").write_text("import os; os.abort()\n")
    found = diagnose(tmp_path, "topology=sglang_cpu", code=1)
    assert found["sglang-router"]["found"].endswith("importing it ended Python by signal 6")
    assert found["ray"]["state"] == "ok"
    lacks = [what for what, one in found.items() if one["state"] == "missing"]
    assert lacks == ["mlflow", "sglang-router", "topology.served_models.policy.server_groups.main.python"]
    assert found["mlflow"]["found"].startswith("1.0, not ") and "the rest" not in found
    assert "DeepEP" not in found  # nobody asked for it


def test_without_a_package_that_doctor_itself_uses_it_still_answers(tmp_path):
    pretend(tmp_path, "pydantic")
    (tmp_path / "pydantic.py").write_text("raise ImportError('not this one')\n")
    found = diagnose(tmp_path, code=1)
    assert found["pydantic"]["state"] == "missing" and found["pydantic"]["fix"].startswith("pip install 'pydantic")
    assert found["the rest"]["found"] == "not looked at: ImportError: not this one"


def test_a_wrong_recipe_is_refused_as_by_every_verb(tmp_path):
    for words in (["algo=grpoo"], ["--nodes", "a"], ["--nodes", "a,a"]):
        done = subprocess.run(
            [sys.executable, "-m", "rlrecipes.cli.main", "doctor", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 2 and done.stderr.startswith("rlrecipes: ") and "fix:" in done.stderr
