"""docs/topologies.md has a row for every topology."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]


def test_every_topology_has_its_row():
    page = (REPOSITORY / "docs" / "topologies.md").read_text()
    rows = re.findall(r"^\| `(\w+)`(?: \(default\))? \|", page.partition("## A served model")[0], re.MULTILINE)
    options = sorted(path.stem for path in (REPOSITORY / "conf" / "topology").glob("*.yaml"))
    assert sorted(rows) == options
