"""The table of docs/algorithms.md: equation, function, config key and test of every algorithm.

    python tools/algorithms.py          writes it anew (`make docs`); a test holds the page to it

Everything comes from the code: what and equation from the docstring, keys from the schema's fields of the same name as
the function's parameters, tests from the test modules that call it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

import rlrecipes.algos
from rlrecipes.config.schema import RlConfig

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "algorithms.md"
HEADER = "| what | equation | function | config key | tests |\n|---|---|---|---|---|\n"
NUM_TESTS = 3
"""Tests named in a row; the module has more."""
OTHER_NAMES = {
    "mode": "algo.aggregation",
    "divisor": "algo.aggregation_divisor",
    "estimator": "algo.kl.estimator",
    "kl_coef": "algo.kl.coef",
    "kl_coef_in_loss": "algo.kl.coef",
    "kl_estimator": "algo.kl.estimator",
    "kl_is_unbiased": "algo.kl.is_unbiased",
    "old_is_rollout": "algo.old_logprobs",
    "distillation_coef": "algo.distillation.coef",
    "delta": "algo.off_policy.opsm_delta",
    "power": "algo.off_policy.staleness_power",
    "options": "algo.policy_loss_options",
    "function": "algo.policy_loss",
}
"""Parameters whose key is longer or shorter than their name."""
BY_VALUE = {
    "returns.compute_discounted_returns": "algo.estimator",
    "returns.compute_gae": "algo.estimator",
    "returns.compute_whitened_advantages": "algo.whiten_advantages",
    "policy_loss.compute_gspo_policy_loss": "algo.policy_loss",
    "policy_loss.compute_cispo_policy_loss": "algo.policy_loss",
    "policy_loss.compute_sft_loss": "algo.kind",
    "objective.compute_sft_objective": "algo.kind",
    "reward_shaping.compute_filtered_loss_masks": "algo.overlong.should_filter",
}
"""Functions that a value of a key chooses."""


def iterate_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function of the room, as (module.name, function)."""
    for info in pkgutil.iter_modules(rlrecipes.algos.__path__):
        module = importlib.import_module(f"rlrecipes.algos.{info.name}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("compute_") and function.__module__ == module.__name__:
                yield f"{info.name}.{name}", function


def find_keys(model: type[BaseModel], prefix: str) -> dict[str, str]:
    """Last part of a key -> the whole key; the outermost wins."""
    keys = {}
    for name, field in model.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys |= find_keys(kind, f"{prefix}.{name}")
    return keys | {name: f"{prefix}.{name}" for name in model.model_fields}


def find_tests() -> dict[str, list[str]]:
    """Function -> tests that call it by name, those of its own module first."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests" / "unit" / "algos").glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for name in {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}:
                    found.setdefault(name, []).append(f"`{path.relative_to(ROOT / 'tests')}::{node.name}`")
    return found


def read_docstring(function: Callable[..., Any]) -> tuple[str, str]:
    """What it does and where that comes from."""
    text = inspect.getdoc(function) or ""
    source = re.search(r"\nSource:\n(.*?)(\n\w+:\n|\Z)", text, re.DOTALL)
    assert source is not None, f"{function.__name__} names no source"
    where = " ".join(source.group(1).split())
    return text.partition("\n")[0].rstrip("."), re.sub(r"arXiv:([\d.]+\d)", r"[\1](https://arxiv.org/abs/\1)", where)


def build_table() -> str:
    """The whole table."""
    keys, tests = find_keys(RlConfig, "algo"), find_tests()
    rows = []
    for name, function in iterate_functions():
        what, source = read_docstring(function)
        named = [OTHER_NAMES.get(p) or keys.get(p) for p in inspect.signature(function).parameters]
        chosen = sorted({key for key in (*named, BY_VALUE.get(name)) if key})
        shown = tests.get(function.__name__, [])
        assert shown, f"no test calls {name}"
        own = [test for test in shown if f"test_{name.partition('.')[0]}.py" in test]
        cells = (
            what,
            source,
            f"`{name}`",
            ", ".join(f"`{key}`" for key in chosen),
            ", ".join((own or shown)[:NUM_TESTS]),
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return HEADER + "".join(rows)


def replace_table(page: str) -> str:
    """The page with its table written anew."""
    start = page.index(HEADER.splitlines()[0])
    end = page.index("\n\n", start) + 1
    return page[:start] + build_table() + page[end:]


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text()))
