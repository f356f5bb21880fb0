"""docs/memory.md says what the model says."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "memory.md").read_text()


def test_the_tables_are_what_the_model_says():
    source = "import sys, memory; sys.stdout.write(memory.render(sys.stdin.read()))"
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, input=PAGE, cwd=ROOT / "tools", capture_output=True, text=True, check=True)
    assert done.stdout == PAGE, "run `make docs`"
