"""Completion in a shell: a real bash runs what `rlrecipes -sc install=bash` gives it, and is asked for words."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlrecipes.cli.completion import FLAGS
from rlrecipes.cli.main import VERBS

BIN = Path(sys.executable).parent
_DRIVER = r"""
eval "$(rlrecipes -sc install=bash)"
function=$(complete -p rlrecipes | sed 's/.* -F \([^ ]*\).*/\1/')
while IFS= read -r COMP_LINE; do
  COMP_POINT=${#COMP_LINE}
  read -ra COMP_WORDS <<< "$COMP_LINE"
  [[ $COMP_LINE == *" " ]] && COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
  $function
  echo "${COMPREPLY[*]}"
done
"""


def complete(directory: Path, *lines: str) -> list[list[str]]:
    """What a shell offers at the end of each line."""
    done = subprocess.run(
        ["bash", "--norc", "-c", _DRIVER],
        input="".join(f"{line}\n" for line in lines),
        cwd=directory,
        env=os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0 and done.stderr == ""
    offered = [line.split() for line in done.stdout.splitlines()]
    assert len(offered) == len(lines)
    return offered


def test_verbs_groups_keys_and_flags_in_bash(tmp_path):
    (tmp_path / "mine" / "recipe").mkdir(parents=True)
    (tmp_path / "mine" / "recipe" / "of_my_own.yaml").write_text("# @package _global_\nname: own\n")
    offered = complete(
        tmp_path,
        "rlrecipes ",
        "rlrecipes pl",
        "rlrecipes train -m algo=gr",
        "rlrecipes plan --format json recipe=quickstart algo.clip_",
        "rlrecipes plan --config-dir mine recipe=of",
        "rlrecipes explain algo.clip_l",
        "rlrecipes doctor --no",
        "rlrecipes render ",
        "rlrecipes plan --config-dir m",  # files
        "rlrecipes compare m",
        "rlrecipes plan recipe=nonesuch algo.g",  # nothing can be composed: nothing is said either
    )
    assert offered == [
        list(VERBS),
        ["plan"],
        ["algo=grpo"],
        ["algo.clip_high=", "algo.clip_low="],
        ["recipe=of_my_own"],
        ["algo.clip_low"],
        ["--nodes"],
        ["kuberay"],
        ["mine"],
        ["mine"],
        [],
    ]


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish: make debian")
def test_fish(tmp_path):
    script = 'rlrecipes -sc install=fish | source; complete -C "rlrecipes pl"; complete -C "rlrecipes plan algo=gr"'
    env = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run(["fish", "-c", script], env=env, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["plan", "algo=grpo"]


def test_flags_are_those_of_the_verbs():
    assert FLAGS.keys() <= VERBS.keys()
    for verb in ("search", "doctor", "render"):
        words = [sys.executable, "-m", "rlrecipes.cli.main", verb, "--help"]
        told = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
        assert set(FLAGS[verb]) == {word.strip("[],") for word in told.split() if word.strip("[],").startswith("--")}
