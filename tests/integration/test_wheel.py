"""What works in the checkout works from wheel and sdist, in any directory: conf/, inventories, constants, a project."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).parent / "uv"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A directory that holds an sdist, and the wheel that was built from it."""
    directory = tmp_path_factory.mktemp("dist")
    build = [UV, "build", "--no-build-isolation", "--offline", "--python", sys.executable, "-o", directory, ROOT]
    subprocess.run(build, check=True, capture_output=True, timeout=240)
    return directory


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """A directory that holds the unpacked wheel."""
    site = tmp_path_factory.mktemp("wheel") / "site"
    (wheel,) = built.glob("*.whl")
    install = [UV, "pip", "install", "--offline", "--no-deps", "--target", site, "--python", sys.executable, wheel]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    return site


@pytest.fixture(scope="module", params=["*.whl", pytest.param("*.tar.gz", marks=pytest.mark.slow)])
def user(request, built, tmp_path_factory):
    """The environment of a user: a new venv with the wheel, or the sdist, and what they ask for from our own."""
    directory = tmp_path_factory.mktemp("user")
    venv = directory / ".venv"
    subprocess.run([UV, "venv", "--offline", "--python", sys.executable, venv], check=True, capture_output=True)
    site = venv / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # Of a directory on the path no .pth is read, so our own editable installation stays out of it.
    (site / "requirements.pth").write_text(sysconfig.get_paths()["purelib"])
    (archive,) = built.glob(request.param)
    words = ["--offline", "--no-deps", "--no-build-isolation", "--python", venv / "bin" / "python", archive]
    subprocess.run([UV, "pip", "install", *words], check=True, capture_output=True, timeout=240)
    environment = os.environ | {"PATH": f"{venv}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    return directory, environment, archive.suffix == ".whl"


def type_in(user, line, code=0):
    directory, environment, _ = user
    done = subprocess.run(
        line, shell=True, cwd=directory, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def run(installed, directory, *words, code=0):
    command = [sys.executable, "-m", "rlrecipes.cli.main", *words]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def test_a_plan_is_the_checkouts(installed, tmp_path):
    words = ("plan", "recipe=qwen3_4b", "topology=pd", "parallel.data_parallel_size=2", "--format", "json")
    ours = json.loads(run(installed, tmp_path, *words))
    theirs = json.loads(run(ROOT, tmp_path, *words))
    assert ours == theirs
    assert ours["memory"]["roles"]
    where = run(installed, tmp_path, "explain", "algo.clip_high")
    assert "conf/algo/grpo.yaml:" in where


def test_every_verb_over_plans_works_outside_the_checkout(installed, tmp_path):
    run(installed, tmp_path, "plan", "recipe=qwen3_4b", "--save", "plan.yaml")
    assert "0.3" in run(installed, tmp_path, "diff", "plan.yaml", "recipe=qwen3_4b algo.clip_high=0.3")
    assert "layouts" in run(installed, tmp_path, "search", "model=qwen2_5_0_5b", "cluster=h200_1", "top=1")
    told = run(installed, tmp_path, "plan", "algo.group_sze=3", "--format", "json", code=2)
    assert json.loads(told)["problems"][0]["where"] == "algo.group_sze"


def test_a_users_own_group_composes_with_ours(installed, tmp_path):
    (tmp_path / "mine" / "recipe").mkdir(parents=True)
    text = "# @package _global_\n# Mine.\ndefaults:\n  - override /algo: dapo\nname: mine\n"
    (tmp_path / "mine" / "recipe" / "mine.yaml").write_text(text)
    plan = json.loads(run(installed, tmp_path, "plan", "--config-dir", "mine", "recipe=mine", "--format", "json"))
    assert (plan["name"], plan["algo"]["name"]) == ("mine", "dapo")


def test_a_project_is_made_and_what_is_printed_and_written_can_be_followed(user):
    where = "python -c 'import rlrecipes; print(rlrecipes.__file__)'"
    assert str(user[0]) in type_in(user, where)
    told = type_in(user, "rlrecipes init 'my project'")
    lines = [line.strip() for line in told.partition("next:")[2].splitlines() if line.strip()]
    small = "schedule.num_steps=2 model.shapes.num_layers=1 algo.group_size=2 tracking=local"
    assert [line.split()[0] for line in lines] == ["cd", "rlrecipes", "rlrecipes", "python"]
    output = type_in(user, " && ".join([lines[0], lines[1], f"{lines[3]} -p no:cacheprovider"]))
    assert "rewards:count_vowels" in output and "3 passed" in output
    readme = (user[0] / "my project" / "README.md").read_text()
    assert all(f"    {line}\n" in readme for line in lines[1:])
    if user[2]:  # a run from the wheel says enough
        assert "vowels: 2 steps done" in type_in(user, f"{lines[0]} && {lines[2]} {small}")
        assert (user[0] / "my project" / "runs" / "vowels" / "hf" / "config.json").exists()
    assert "is not empty" in type_in(user, "rlrecipes init 'my project'", code=2)


def test_a_project_is_not_made_where_a_file_is(user):
    (user[0] / "file").touch()
    for name in ("file", "file/below"):
        assert "cannot be written" in type_in(user, f"rlrecipes init {name}", code=2)
    assert "required: DIR" in type_in(user, "rlrecipes init", code=2)


def test_hydra_finds_our_launcher(installed, tmp_path):
    where = "import hydra_plugins.rlrecipes.slurm_launcher as found; print(found.__file__)"
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", where]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(str(installed)), done.stderr
    words = ("cluster=h100_8", "topology=colocated", "model=qwen3_4b", "parallel.data_parallel_size=8")
    options = ("hydra/launcher=slurm", "hydra.launcher.preview=true", "hydra.launcher.sbatch.account=rl")
    assert "#SBATCH --account=rl" in run(installed, tmp_path, "train", "name=seen", *words, *options)
