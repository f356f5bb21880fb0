"""docs/algorithms.md is what the code says, and names only keys that exist."""

import re
import subprocess
import sys
from pathlib import Path

from rlrecipes.config.schema import RlConfig

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "algorithms.md").read_text()


def test_the_table_is_what_the_code_says():
    source = "import sys, algorithms; sys.stdout.write(algorithms.replace_table(sys.stdin.read()))"
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, input=PAGE, cwd=ROOT / "tools", capture_output=True, text=True, check=True)
    assert done.stdout == PAGE, "run `make docs`"


def test_every_named_key_is_in_the_schema():
    known = {f"algo.{name}" for name in RlConfig.model_fields}
    named = set(re.findall(r"`(algo\.\w+)[\w.]*`", PAGE))
    assert named and named <= known
