"""The main job as a user runs it: trained, saved, killed, resumed, at other layouts, and stopped in every bad way."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from tests.integration.command_line import NUM_STEPS, SMALL

pytestmark = pytest.mark.timeout(600)


def test_a_run_learns_measures_and_exports(trained):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    metrics = trained.metrics("run")
    assert sorted(metrics) == list(range(NUM_STEPS + 1))
    assert all(metrics[step]["weight_sync/is_verified"] == 1.0 for step in metrics)
    assert metrics[1]["train/grad_norm"] > 0
    assert metrics[1]["train/rollout_logprob_abs_diff_max"] < 1e-4
    assert metrics[1]["staleness/max"] == 0
    assert metrics[NUM_STEPS]["train/ref_kl"] > 0
    hf = trained.cwd / "runs" / "run" / "hf"
    model = AutoModelForCausalLM.from_pretrained(hf)
    tokenizer = AutoTokenizer.from_pretrained(hf)
    assert tokenizer.decode(model.generate(**tokenizer("abc>", return_tensors="pt"), max_new_tokens=3)[0])
    page = (trained.cwd / "runs" / "run" / "report.html").read_text()
    assert f"{NUM_STEPS} of {NUM_STEPS}" in page and "reward/mean, first to last" in page
    kept = [json.loads(line) for line in (trained.cwd / "runs" / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert [record["step"] for record in kept if record["purpose"] == "train"] == list(range(1, NUM_STEPS + 1))
    assert {record["step"] for record in kept if record["purpose"] == "eval"} == {0, 2, 4, 6}
    assert trained.leftovers() == []


def test_rerunning_a_finished_run_does_nothing(trained):
    before = trained.metrics("run")
    output = trained.run("train", "name=run", f"schedule.num_steps={NUM_STEPS}", *SMALL)
    assert f"{NUM_STEPS} steps done" in output
    assert trained.metrics("run") == before


@pytest.mark.parametrize(
    ("layout", "sync"),
    [
        pytest.param("tp2", "disk", marks=pytest.mark.slow),
        ("pp2", "distributed"),
        pytest.param("dp2", "tensor", marks=pytest.mark.slow),
        pytest.param("cp2", "tensor", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_at_another_layout_by_another_transport(trained, continued, layout, sync):
    shutil.rmtree(continued.cwd / "runs" / "run" / "checkpoints" / f"step_{NUM_STEPS:08d}")
    engines = "topology.served_models.policy.server_groups.main.num_engines=2"
    output = continued.run(
        "train",
        "name=run",
        engines,
        f"parallel={layout}",
        f"weight_sync={sync}",
        f"schedule.num_steps={NUM_STEPS - 1}",
        *SMALL,
    )
    assert "resuming runs/run after step 4" in output
    found, expected = continued.metrics("run")[NUM_STEPS - 1], trained.metrics("run")[NUM_STEPS - 1]
    assert found["weight_sync/is_verified"] == 1.0
    # The step's rollouts are the same, since weights and seeds are; sums are rounded in another order.
    assert found["reward/mean"] == expected["reward/mean"]
    assert found["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-5)
    assert found["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-4)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT])
def test_a_signal_leaves_a_checkpoint_and_no_process(continued, number):
    arguments = [
        "train",
        "name=run",
        "schedule.num_steps=1000",
        "schedule.eval_interval=0",
        "schedule.save_interval=500",
    ]
    small = [word for word in SMALL if not word.startswith(("schedule.save", "schedule.eval"))]
    process = continued.start(*arguments, *small)
    continued.wait_for_step("run", NUM_STEPS + 2, process)
    os.killpg(process.pid, number)  # as a terminal or a scheduler does, to the whole group
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    assert "rerun the same command" in output
    assert "Traceback" not in output
    assert continued.leftovers() == []
    checkpoints = sorted(path.name for path in (continued.cwd / "runs" / "run" / "checkpoints").iterdir())
    last_logged = max(continued.metrics("run"))
    assert checkpoints[-1] == f"step_{last_logged:08d}"


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(continued):
    small = [word for word in SMALL if not word.startswith("optim.lr")]
    output = continued.run(
        "train", "name=run", "schedule.num_steps=20", "optim.lr=1e30", "resume=accept_changes", *small, code=1
    )
    assert "finite" in output or "is nan" in output
    assert "Traceback" not in output
    page = (continued.cwd / "runs" / "run" / "report.html").read_text()
    assert 'class="status FAILED"' in page and "finite" in page
    assert (continued.cwd / "runs" / "run" / "checkpoints" / f"step_{NUM_STEPS:08d}" / "state.json").exists()
    assert continued.leftovers() == []


def test_an_engine_that_dies_stops_the_run_with_its_name(continued):
    process = continued.start("train", "name=run", "schedule.num_steps=1000", *SMALL)
    continued.wait_for_step("run", NUM_STEPS + 1, process)
    engines = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "rlrecipes.engines.embedded.server" in child.cmdline() and "guard.py" not in " ".join(child.cmdline())
    ]
    engines[0].kill()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "policy-main-0" in output or "engine" in output
    assert "Traceback" not in output
    assert continued.leftovers() == []


def test_a_trainer_that_dies_stops_the_run_and_is_resumed(continued):
    process = continued.start("train", "name=run", "schedule.num_steps=1000", *SMALL)
    continued.wait_for_step("run", NUM_STEPS + 1, process)
    workers = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "RankWorker" in child.name() or any("RankWorker" in word for word in child.cmdline())
    ]
    assert workers
    workers[0].kill()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "trainer rank 0" in output
    assert continued.leftovers() == []


def test_a_full_disk_at_a_checkpoint_keeps_what_was_saved(continued):
    checkpoints = continued.cwd / "runs" / "run" / "checkpoints"
    kept = continued.cwd / "kept"
    shutil.move(checkpoints, kept)
    checkpoints.mkdir()
    if os.system(f"mount -t tmpfs -o size=2m none {checkpoints}") != 0:
        pytest.skip("this machine may not mount")
    try:
        shutil.copytree(kept / f"step_{NUM_STEPS:08d}", checkpoints / f"step_{NUM_STEPS:08d}")
        (checkpoints / "ballast").write_bytes(b"x" * (_free(checkpoints) - 100_000))
        output = continued.run("train", "name=run", "schedule.num_steps=20", *SMALL, code=1)
        assert "could not be written" in output
        assert "Traceback" not in output
        assert [path.name for path in checkpoints.iterdir() if path.is_dir()] == [f"step_{NUM_STEPS:08d}"]
        assert continued.leftovers() == []
        (checkpoints / "ballast").unlink()
        continued.run("train", "name=run", f"schedule.num_steps={NUM_STEPS + 1}", *SMALL)
    finally:
        os.system(f"umount {checkpoints}")


def _free(path: Path) -> int:
    return shutil.disk_usage(path).free


def test_a_port_that_is_taken_is_named(shell):
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        engine = "topology.served_models.policy.server_groups.main.sglang"
        output = shell.run("train", "name=run", "schedule.num_steps=2", f"+{engine}.port={port}", *SMALL, code=1)
    assert f"port {port} is taken" in output
    assert shell.leftovers() == []


def test_an_engine_that_does_not_start_is_told_with_its_log(shell):
    engine = "topology.served_models.policy.server_groups.main.sglang"
    output = shell.run("train", "name=run", "schedule.num_steps=2", f"+{engine}.tokenizer_path=nowhere", *SMALL, code=1)
    assert "nowhere" in output
    assert "Traceback" not in output
    assert shell.leftovers() == []
