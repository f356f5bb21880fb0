"""docs/algorithms.md names every function of the room, and only keys and tests that exist."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import rlrecipes.algos
from rlrecipes.config.schema import RlConfig

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "algorithms.md").read_text()


def test_every_public_function_has_a_row():
    functions = set()
    for module in pkgutil.iter_modules(rlrecipes.algos.__path__):
        members = inspect.getmembers(importlib.import_module(f"rlrecipes.algos.{module.name}"), inspect.isfunction)
        functions |= {
            f"{module.name}.{name}"
            for name, function in members
            if name.startswith("compute_") and function.__module__ == f"rlrecipes.algos.{module.name}"
        }
    assert functions == set(re.findall(r"\| `(\w+\.compute_\w+)` \|", PAGE))


def test_every_named_test_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)
    assert named
    missing = [test for test in named if f"def {test[1]}(" not in (ROOT / "tests" / test[0]).read_text()]
    assert not missing


def test_every_named_key_is_in_the_schema():
    kl_fields = RlConfig.model_fields["kl"].annotation.model_fields
    known = {f"algo.{name}" for name in RlConfig.model_fields} | {f"algo.kl.{name}" for name in kl_fields}
    named = set(re.findall(r"`(algo\.[\w.]+)`", PAGE))
    assert named and named <= known
