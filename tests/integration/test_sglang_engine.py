"""The same recipe with the real SGLang as its engine, chosen by `topology` alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.command_line import SMALL, CommandLine

pytestmark = pytest.mark.timeout(400)
REPOSITORY = Path(__file__).parents[2]


def test_one_step_with_the_real_sglang(tmp_path, monkeypatch):
    python = os.environ.get("RLRECIPES_SGLANG_PYTHON", str(REPOSITORY / ".venv-sglang" / "bin" / "python"))
    assert Path(python).exists(), "the real SGLang is missing: run `make sglang`"
    monkeypatch.setenv("RLRECIPES_SGLANG_PYTHON", python)
    shell = CommandLine(tmp_path)
    try:
        small = [word for word in SMALL if word != "deterministic=true"]
        shell.run("train", "name=run", "topology=sglang_cpu", "schedule.num_steps=1", *small, timeout_s=380)
        metrics = shell.metrics("run")
        assert sorted(metrics) == [0, 1]
        assert metrics[1]["weight_sync/is_verified"] == 1.0
        assert metrics[1]["rollout/failed_fraction"] == 0
        assert metrics[1]["train/rollout_logprob_abs_diff_max"] < 1e-4
        assert metrics[1]["train/grad_norm"] > 0
        assert shell.leftovers() == []
    finally:
        shell.close()
