"""Runs `rlrecipes` as a user does, in a directory of its own, and looks for what it leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.integration.warm_commands import WarmCommands, WarmProcess

Command = subprocess.Popen[str] | WarmProcess
SMALL = [
    "schedule.prompts_per_step=4",
    "schedule.save_interval=2",
    "schedule.eval_interval=2",
    "schedule.num_train_steps=2",
    "algo.group_size=4",
    "algo.kl.placement=loss",
    "algo.kl.coef=0.01",
    "algo.entropy_coef=0.001",
    "rollout.evaluation.num_prompts=8",
    "rollout.sampling.max_new_tokens=8",
    "data.tasks.num_train_rows=64",
    "data.tasks.num_eval_rows=8",
    "model.shapes.num_layers=2",
    "model.shapes.hidden_size=32",
    "model.shapes.ffn_hidden_size=64",
    "model.shapes.kv_channels=8",
    "optim.lr=1e-3",
    "weight_sync.bucket_bytes=16384",
    "reward.name=letters:count_vowels",
    "tracking=local",
    "deterministic=true",
]
"""A run small enough for tests; its reward varies from the first step, so there is always something to learn."""
NUM_STEPS = 6
"""Of the undisturbed run."""

_REWARD = """
def count_vowels(rollout):
    return sum(letter in "aeiou" for letter in rollout.text) / 8
"""
_OF_THE_CLOCK = ("_s", "tokens_per_s_per_gpu", "mfu_fraction", "kv_cache_use_fraction", "prefix_cache_hit_fraction")
"""Besides times: what an engine's cache held depends on which request came first; the answers do not."""


@dataclass
class CommandLine:
    """A working directory and the commands run in it: cold ones, as a user's, or warm ones, which begin at once."""

    cwd: Path
    warm: WarmCommands | None = None
    processes: list[Command] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cwd.mkdir(parents=True, exist_ok=True)
        (self.cwd / "letters.py").write_text(_REWARD)
        shutil.copy(Path(__file__).with_name("fate.py"), self.cwd / "sitecustomize.py")

    def start(self, *arguments: str, fate: str = "") -> Command:
        """Start `rlrecipes` in its own process group, as a shell would; ``fate`` is explained in fate.py."""
        env = os.environ | {"PYTHONPATH": str(self.cwd), "OMP_NUM_THREADS": "1", "FATE": fate}
        if self.warm is not None:
            process: Command = self.warm.start(self.cwd, arguments, env)
        else:
            process = subprocess.Popen(
                [str(Path(sys.executable).parent / "rlrecipes"), *arguments],
                cwd=self.cwd,
                env=env,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self.processes.append(process)
        return process

    def run(self, *arguments: str, code: int = 0, fate: str = "", timeout_s: float = 240) -> str:
        """Run to the end and check the exit code; returns what it printed."""
        process = self.start(*arguments, fate=fate)
        output, _ = process.communicate(timeout=timeout_s)
        assert process.returncode == code, output
        return output

    def metrics(self, name: str) -> dict[int, dict[str, float]]:
        """Step -> metrics of a run, those that depend on the clock left out."""
        merged: dict[int, dict[str, float]] = {}
        for line in (self.cwd / "runs" / name / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            merged.setdefault(record["step"], {}).update(record["metrics"])
        return {
            step: {key: value for key, value in metrics.items() if not _depends_on_clock(key)}
            for step, metrics in merged.items()
        }

    def wait_for_step(self, name: str, step: int, process: Command, timeout_s: float = 200) -> None:
        """Wait until a run has logged a step."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if (self.cwd / "runs" / name / "metrics.jsonl").exists() and step in self.metrics(name):
                return
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        raise AssertionError(f"step {step} was not reached in {timeout_s} s")

    def leftovers(self, timeout_s: float = 15) -> list[str]:
        """Processes that still live in this directory; a moment is given to the dying."""
        deadline = time.monotonic() + timeout_s
        while (found := _processes_in(self.cwd)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def close(self) -> None:
        """Kill what a failed test left."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _depends_on_clock(key: str) -> bool:
    return key.startswith(("time/", "system/")) or key.endswith(_OF_THE_CLOCK)


def _processes_in(directory: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(directory) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
        except (psutil.Error, OSError):
            continue
    return found
