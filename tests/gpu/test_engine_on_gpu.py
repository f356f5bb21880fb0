"""Engine and trainer in turns on one GPU, short: the SmolLM2 recipe for two steps.

Needs the HF directory of SmolLM2-135M-Instruct in MODEL; see benchmarks/gpu/colocated.py, whose overrides these are.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
TIMEOUT_S = 200.0
MOST_NATS = 0.06
"""Of the mean difference of log probabilities, trainer against engine; docs/gpu.md says what bfloat16 costs."""
SMALL = ("schedule.prompts_per_step=16", "rollout.evaluation.num_prompts=16")


@pytest.fixture(scope="module")
def colocated():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if not (Path(os.environ.get("MODEL", "")) / "config.json").is_file():
        pytest.skip("MODEL names no HF directory")
    if not os.environ.get("ROLLOUT_PATH") and importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed, and ROLLOUT_PATH is not set")
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
    import colocated

    return colocated


def test_two_steps_in_turns_agree_and_leave_nothing(colocated, tmp_path):
    import watched_run

    before_mib = watched_run.read_used_mib(0)
    asked = argparse.Namespace(model=os.environ["MODEL"], steps=2, timeout=TIMEOUT_S, float32=False, overrides=SMALL)
    words = ["train", *colocated.build_overrides(asked, tmp_path / "run")]
    run = watched_run.watch(words, tmp_path, TIMEOUT_S)
    report = watched_run.print_report(tmp_path, tmp_path / "run")
    assert run.code == 0, run.output[-2000:]
    syncs = [step for step in report["steps"] if "weight_sync/is_verified" in step]
    assert [step["weight_sync/is_verified"] for step in syncs] == [1.0] * 3  # before the first step and after each
    assert [line["mean"] < MOST_NATS for line in report["differences"]] == [True, True]
    phases = {row["phase"]: row for row in report["phases"]}
    assert phases["engine releases"]["ends_mib"] < phases["rollout"]["ends_mib"] / 2
    assert watched_run.read_used_mib(0) < before_mib + 64
