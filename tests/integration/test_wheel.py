"""What works in the checkout works from the wheel, in any directory: conf/, inventories and constants come along."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).parent / "uv"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A directory that holds the unpacked wheel."""
    directory = tmp_path_factory.mktemp("wheel")
    built, site = directory / "dist", directory / "site"
    build = [UV, "build", "--wheel", "--no-build-isolation", "--offline", "--python", sys.executable, "-o", built, ROOT]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    (wheel,) = built.glob("*.whl")
    install = [UV, "pip", "install", "--offline", "--no-deps", "--target", site, "--python", sys.executable, wheel]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    return site


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
