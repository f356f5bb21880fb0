"""Inventories say what the pinned packages say, and judge values by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlrecipes.plan.inventory import Option, load_inventory, read_figures, read_installed_version, to_count

REPOSITORY = Path(__file__).parents[3]
INVENTORIES = REPOSITORY / "rlrecipes" / "plan" / "inventories"
SGLANG = Path(os.environ.get("RLRECIPES_SGLANG_PYTHON", REPOSITORY / ".venv-sglang/bin/python"))
NAMES = ("router", "megatron", "embedded", "reasoning_gym", "sglang")


def regenerate(name):
    python, environment = sys.executable, dict(os.environ)
    if name == "sglang":
        python = str(SGLANG)
        standins = str(REPOSITORY / "rlrecipes/engines/sglang/standins")
        environment |= {"CUDA_VISIBLE_DEVICES": "", "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": standins}
    command = [python, "-W", "ignore", str(REPOSITORY / "tools/inventory.py"), name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_an_inventory_is_what_the_pinned_version_has(name):
    if name == "sglang" and not SGLANG.is_file():
        pytest.skip("make sglang makes its environment")
    assert (INVENTORIES / f"{name}.json").read_text() == regenerate(name), "run: make inventory"


def test_inventories_are_of_the_versions_that_the_locks_pin():
    locks = "".join((REPOSITORY / "requirements" / name).read_text() for name in ("lock.txt", "sglang.txt"))
    for name in NAMES:
        inventory = load_inventory(name)
        assert inventory.package is None or f"{inventory.package}=={inventory.version} " in locks, name


@pytest.mark.parametrize("name", NAMES)
def test_every_default_is_a_value_that_the_option_takes(name):
    for group, options in load_inventory(name).groups.items():
        for option_name, option in options.items():
            if option.default not in (None, {}):
                assert option.find_problem(option.default) is None, (group, option_name)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        (Option(("int", "null")), 3, None),
        (Option(("int", "null")), None, None),
        (Option(("int",)), None, "an integer"),
        (Option(("int",)), True, "an integer"),
        (Option(("int",)), 3.0, "an integer"),
        (Option(("int",)), "3", "an integer"),
        (Option(("int", "str")), "32k", None),
        (Option(("positive_int",)), 0, "at least 1"),
        (Option(("float",)), 3, None),
        (Option(("float",)), False, "a number"),
        (Option(("str",)), 3, "a string"),
        (Option(("str",)), ["a"], "a string"),
        (Option(("str",), choices=("red", "green")), "gren", "did you mean 'green'?"),
        (Option(("str", "null"), choices=("red",)), None, None),
        (Option(("int",), choices=(16, 32)), 17, "16, 32"),
        (Option(("str",), items=("str",)), "a", None),
        (Option(("str",), items=("str",)), ["a", "b"], None),
        (Option(("str",), items=("int",)), ["a"], "a list, each entry an integer"),
        (Option(("str",), items=("str",), choices=("a", "b")), ["a", "c"], "allowed: a, b"),
        (Option(("bool", "null")), 1, "true or false"),
        (Option(("json",)), '{"a": 1}', None),
        (Option(("json",)), {"a": 1}, "JSON in a string"),
        (Option(("json",)), "{a", "JSON in a string"),
        (Option(("mapping",)), {"a": 1}, None),
        (Option(()), "gelu", "only code can give it a value"),
    ],
)
def test_a_value_is_judged_by_types_and_choices(option, value, expected):
    found = option.find_problem(value)
    if expected is None:
        assert found is None
    else:
        assert found is not None and expected in found[1]


def test_other_names_of_a_flag_are_known():
    inventory = load_inventory("sglang")
    assert inventory.aliases["tensor_parallel_size"] == "tp_size"
    assert inventory.groups["ServerArgs"]["tensor_parallel_size"] is inventory.groups["ServerArgs"]["tp_size"]


def test_the_installed_version_is_read_where_the_package_will_run(tmp_path):
    assert read_installed_version("megatron-core", None) == load_inventory("megatron").version
    assert read_installed_version("no-such-package", None) is None
    metadata = tmp_path / "lib/python3.12/site-packages/sglang-0.5.23.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    assert read_installed_version("sglang", str(tmp_path / "bin/python")) == "0.5.23"


def test_files_are_json_with_a_line_an_option():
    for name in NAMES:
        text = (INVENTORIES / f"{name}.json").read_text()
        options = [option for group in json.loads(text)["groups"].values() for option in group]
        assert all(text.count(f"\n      {json.dumps(option)}: ") >= 1 for option in options)


def test_numbers_in_words_are_read_as_sglang_reads_them():
    words = {"32k": 32000, "25.6k": 25600, "32Ki": 32768, "1M": 10**6, "1Mi": 2**20, "7": 7, " 7 ": 7, 7: 7}
    assert {word: to_count(word) for word in words} == words
    assert [to_count(value) for value in ("big", "1e3", "-1", "", None, 1.5, [1], True)] == [None] * 8


def test_figures_are_what_sglang_would_take():
    native = {"max_total_tokens": "32k", "mem_fraction_static": "big", "kv_cache_dtype": "fp8_e4m3", "no_such": 1}
    assert read_figures(native) == {"max_total_tokens": 32000, "kv_cache_dtype": "fp8_e4m3"}
    assert read_figures({"max_total_tokens": [1], "mem_fraction_static": 0.5}) == {"mem_fraction_static": 0.5}
    assert read_figures({}) == {}
