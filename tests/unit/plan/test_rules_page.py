"""docs/rules.md is what the code says, and every rule and test it names is there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from rlrecipes.plan.rules.table import JUDGES, RULES

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "rules.md"


def run_tool(expression: str) -> str:
    source = f"import json, sys, rules; sys.stdout.write({expression})"
    return subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT / "tools", capture_output=True, text=True, check=True
    ).stdout


def test_the_page_is_what_the_code_says():
    assert run_tool("rules.render_page()") == PAGE.read_text(), "run `make docs`"


def test_what_others_accept_is_answered_by_rules_and_tests_that_are_there():
    rows = json.loads(run_tool("json.dumps([row for rows in rules.SILENCES.values() for row in rows])"))
    known = {rule.name for rule in RULES} | set(JUDGES)
    named = {word for _, answer, _ in rows for word in re.findall(r"`(\w+)`", answer)}
    assert named and named <= known
    for _, _, test in rows:
        path, _, name = test.partition("::")
        text = (ROOT / "tests" / path).read_text()
        assert not name or f"def {name}(" in text, test
