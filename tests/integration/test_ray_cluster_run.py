"""A run over two nodes of a running Ray: one is lost, the run ends with its name, and resumes on another."""

from __future__ import annotations

import os
import signal

import pytest

from tests.integration.command_line import SMALL
from tests.integration.ray_processes import run_ray
from tests.integration.test_ray_nodes import ray_address  # noqa: F401

QUICK = [word for word in SMALL if not word.startswith("schedule.")]
SCHEDULE = ["schedule.prompts_per_step=4", "schedule.save_interval=1", "schedule.eval_interval=0"]
SCHEDULE += ["schedule.should_eval_before=false", "schedule.should_export_hf=false"]


def another_node(address, log):
    return run_ray([f"--address={address}", "--num-cpus=3", "--num-gpus=0"], log)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lost_node_ends_in_resume(shell, ray_address, tmp_path):  # noqa: F811
    words = ["name=run", "cluster=ray", f"cluster.address={ray_address}", "weight_sync=distributed", *QUICK, *SCHEDULE]
    with another_node(ray_address, tmp_path / "first.log") as node:
        process = shell.start("train", *words, "schedule.num_steps=1000")
        shell.wait_for_step("run", 3, process)
        os.killpg(node.pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 1, output
    # Trainer or engine, whichever lay there.
    assert "its process died" in output or "does not answer any more" in output, output
    assert "resume" in output and "Traceback" not in output
    step = max(shell.metrics("run"))
    with another_node(ray_address, tmp_path / "second.log"):
        output = shell.run("train", *words, f"schedule.num_steps={step + 2}")
    assert f"resuming runs/run after step {step}" in output
    assert sorted(shell.metrics("run")) == list(range(step + 3))
