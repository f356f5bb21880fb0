"""One step on two GPUs, short: engines apart from the trainer, prefill apart from decode, an engine of two ranks.

Needs HF directories in MODEL and SPLIT_MODEL; see benchmarks/gpu/two_gpus.py, whose recipes these are.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
TIMEOUT_S = 300.0
MOST_NATS = 0.1
"""Of the mean difference, in bfloat16; weights that did not arrive differ by more."""
SMALL = ("schedule.prompts_per_step=16",)


@pytest.fixture(scope="module")
def two_gpus():
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
    import two_gpus

    return two_gpus


@pytest.mark.parametrize("name", ["disaggregated", "pd", "tp2"])
def test_weights_reach_engines_and_both_sides_agree(two_gpus, name, tmp_path):
    variant = two_gpus.VARIANTS[name]
    model = os.environ.get("SPLIT_MODEL" if variant.is_split else "MODEL", "")
    if not (Path(model) / "config.json").is_file():
        pytest.skip(f"{'SPLIT_MODEL' if variant.is_split else 'MODEL'} names no HF directory")
    package = "nixl" if name == "pd" else "sglang"
    if not os.environ.get(variant.path) and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed, and {variant.path} is not set")
    before = {gpu: two_gpus.read_used_mib(gpu) for gpu in two_gpus.GPUS}
    report = two_gpus.print_variant(name, two_gpus.run_variant(name, model, tmp_path, TIMEOUT_S, SMALL))
    assert report["code"] == 0
    steps = [step for step in report["steps"] if "weight_sync/is_verified" in step]
    assert len(steps) == 3  # before the first step and after each
    assert all(step["weight_sync/is_verified"] == float(not variant.is_split) for step in steps)
    assert [line["mean"] < MOST_NATS for line in report["differences"]] == [True, True]
    after = two_gpus.wait_until_free(before)
    assert all(after[gpu] <= before[gpu] + 1 for gpu in before)
