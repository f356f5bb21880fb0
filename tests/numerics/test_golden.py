"""Right values as data: golden.json holds inputs and what must come out, adapter.py says whose functions are asked."""

import json
from pathlib import Path

import adapter
import pytest

CASES = json.loads(Path(__file__).with_name("golden.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_value(case):
    got = getattr(adapter, case["function"])(**case["inputs"])
    assert got.keys() == case["expected"].keys()
    for name, expected in case["expected"].items():
        assert got[name] == pytest.approx(expected, rel=1e-9, abs=1e-12), name
