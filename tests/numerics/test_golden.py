"""Right values as data: golden/ holds inputs and what must come out, adapter.py says whose functions are asked."""

import json
from pathlib import Path

import adapter
import pytest

FILES = sorted(Path(__file__).with_name("golden").glob("*.json"))
CASES = [
    pytest.param(case, id=f"{file.stem}: {case['name']}") for file in FILES for case in json.loads(file.read_text())
]


def assert_same(got, expected, name):
    """Nested lists, number by number."""
    if isinstance(expected, list):
        assert isinstance(got, list) and len(got) == len(expected), name
        for place, pair in enumerate(zip(got, expected, strict=True)):
            assert_same(*pair, f"{name}[{place}]")
    else:
        assert got == pytest.approx(expected, rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("case", CASES)
def test_value(case):
    got = getattr(adapter, case["function"])(**case["inputs"])
    assert got.keys() == case["expected"].keys()
    for name, expected in case["expected"].items():
        assert_same(got[name], expected, name)
