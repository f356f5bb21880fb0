"""docs/config.md says what the schema says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from rlrecipes.config.compose import compose
from rlrecipes.config.reference import render_docs
from rlrecipes.config.validation import recipe_paths

DOCS = Path(__file__).parents[3] / "docs" / "config.md"
CONF = Path(__file__).parents[3] / "conf"
ROWS = re.compile(r"^\| `([^`]+)` \| (.*?) \| (.*) \|$", re.MULTILINE)


def test_docs_are_current():
    assert DOCS.read_text() == render_docs(), "run: make docs"


def test_every_key_a_recipe_may_have_is_explained():
    rows = ROWS.findall(render_docs())
    explained = {path: meaning for path, _, meaning in rows}
    groups = {group.name for group in CONF.iterdir() if group.is_dir()}
    for algo in ("grpo", "sft"):
        data = compose([f"algo={algo}"]).config.model_dump()
        for path in recipe_paths(data):
            if path not in groups:
                assert explained[path.replace("*", "<name>")], path


def test_ranges_choices_and_null_are_told():
    kinds = {path: kind for path, kind, _ in ROWS.findall(render_docs())}
    assert kinds["optim.lr"] == "float > 0"
    assert kinds["rollout.sampling.top_p"] == "float > 0, <= 1"
    assert kinds["algo.dual_clip"] == "float > 1 or null"
    assert kinds["model.shapes"] == "section or null"
    assert kinds["resume"] == "one of `auto`, `never`, `required`, `accept_changes`"
    assert kinds["rollout.sampling.stop"] == "list of string"
    assert kinds["topology.served_models.<name>.server_groups.<name>.env"] == "name -> string"


def test_every_option_of_every_group_says_why():
    text = render_docs()
    for file in CONF.glob("*/*.yaml"):
        comment = next(
            line[2:] for line in file.read_text().splitlines() if line.startswith("# ") and "@package" not in line
        )
        said = comment.replace("<", "\\<")
        assert f"- `{file.parent.name}={file.stem}`: {said}" in text


def test_the_page_is_made_without_torch():
    code = "import sys, rlrecipes.config.reference as r; r.render_docs(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
