"""What each task of a job of the SLURM launcher runs: Ray on its node, and on the first one the driver.

    python -m rlrecipes.runner.slurm_node [--wait SECONDS] RUN_DIR MEETING_DIR

Tasks meet in a directory that all of them see: `token` lets them into Ray, `head` holds its address, `node-N` says that
N has joined, `failed-N` that it cannot, `stop` that the time limit is near, `end` that the driver has ended.

SLURM sends SIGTERM to every process of a job, and engines or Ray must not hear it before the checkpoint is written. So
all of them inherit a mask that blocks it; this process alone takes it, and hands it to the driver as SIGINT.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rlrecipes.engines.sglang.process import find_free_port, read_log_tail
from rlrecipes.plan.hosts import SHARED_MEMORY_BYTES
from rlrecipes.plan.nodes import Plan, load_plan
from rlrecipes.plan.sbatch import REQUEUE_CODE
from rlrecipes.runner.machines import NODE_LABEL, RAY_NODE_ENVIRONMENT
from rlrecipes.runner.reaper import DRIVER_VARIABLE, kill_left

_STARTED = "Ray runtime started"
_POLL_INTERVAL_S = 0.2
_KILL_WAIT_S = 20.0
_START_RAY = "from ray.scripts.scripts import main; main()"


class NodeError(Exception):
    """A node did not come up; the message is for the job's log."""


class Node:
    """One machine of a job.

    Args:
        run_dir: of the run.
        meeting: where tasks meet.
        wait_s: longest wait for other nodes.
    """

    def __init__(self, run_dir: Path, meeting: Path, wait_s: float) -> None:
        self._run_dir, self._meeting, self._wait_s = run_dir, meeting, wait_s
        self._number = int(os.environ["SLURM_PROCID"])
        self._plan: Plan = load_plan(run_dir / "slurm" / "plan.yaml")
        self._log = run_dir / "slurm" / f"node-{self._number}.log"
        self._is_told_to_stop = False
        self._scratch = ""

    def run(self) -> int:
        """Serve until the driver ends.

        Returns:
            The driver's exit code on the first node, 0 on others; REQUEUE_CODE asks to be queued again.
        """
        signal.signal(signal.SIGTERM, self._note_stop)
        try:
            return self._lead() if self._number == 0 else self._follow()
        except NodeError as error:
            print(f"rlrecipes: {error}", file=sys.stderr, flush=True)
            self._say(f"failed-{self._number}", "")
            return 1
        finally:
            if self._number == 0:
                self._say("end", "")
            kill_left(os.getpid())
            if self._scratch:
                shutil.rmtree(self._scratch, ignore_errors=True)

    def _note_stop(self, *_: object) -> None:
        self._is_told_to_stop = True

    def _lead(self) -> int:
        self._record_start()
        before = self._find_checkpoint()
        environment = dict(os.environ)
        if len(self._plan.hosts) > 1:
            port = find_free_port()
            self._token.touch(mode=0o600)
            self._token.write_text(secrets.token_hex(32))
            self._scratch = tempfile.mkdtemp(prefix="rlr")  # short: sockets' paths are limited
            ray = self._start_ray("--head", f"--port={port}", f"--temp-dir={self._scratch}")
            address = f"{self._read_address()}:{port}"
            self._say("head", address)
            self._wait_for_nodes(ray)
            environment |= {"RAY_ADDRESS": address, **self._authentication}
        driver = _start_masked(
            [sys.executable, "-m", "rlrecipes", "run", str(self._run_dir / "slurm" / "plan.yaml")], environment
        )
        is_limit_near, asked_at_s = False, 0.0
        while (code := driver.poll()) is None:
            is_limit_near = is_limit_near or (self._meeting / "stop").exists()
            if (is_limit_near or self._is_told_to_stop) and not asked_at_s:
                print("rlrecipes: told to stop; saving a checkpoint", flush=True)
                driver.send_signal(signal.SIGINT)
                asked_at_s = time.monotonic()
            time.sleep(_POLL_INTERVAL_S)
        if code == 0 or not is_limit_near:
            return code if code >= 0 else 128 - code
        if self._find_checkpoint() == before:
            print("rlrecipes: no step was saved since this start: not queued again; give it more time", flush=True)
            return 1
        return REQUEUE_CODE

    def _follow(self) -> int:
        address = self._wait_for_head()
        ray = self._start_ray(f"--address={address}")
        self._say(f"node-{self._number}", "")
        while not (self._meeting / "end").exists() and self._meeting.exists():
            if ray.poll() is not None:
                raise NodeError(f"Ray ended on {self._name}; the end of {self._log}:\n{read_log_tail(self._log)}")
            time.sleep(_POLL_INTERVAL_S)
        return 0

    @property
    def _token(self) -> Path:
        return (self._meeting / "token").absolute()

    @property
    def _authentication(self) -> dict[str, str]:
        """Ray's own words: only who may read this job's token joins it."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._token)}

    @property
    def _name(self) -> str:
        return f"node {self._number} ({os.environ.get('SLURMD_NODENAME', os.uname().nodename)})"

    def _record_start(self) -> None:
        names = {"job": "RLRECIPES_JOB", "restart_count": "SLURM_RESTART_COUNT", "nodes": "SLURM_JOB_NODELIST"}
        record = {"time": time.time()} | {key: os.environ.get(name, "") for key, name in names.items()}
        record["restart_count"] = int(record["restart_count"] or 0)
        with (self._run_dir / "slurm" / "starts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _find_checkpoint(self) -> str:
        return max((path.name for path in (self._run_dir / "checkpoints").glob("step_*")), default="")

    def _start_ray(self, *words: str) -> subprocess.Popen[bytes]:
        host = self._plan.hosts[self._number]
        command = [sys.executable, "-c", _START_RAY, "start", "--block", *words, f"--num-cpus={host.num_cpus}"]
        command += [f"--num-gpus={self._plan.num_used_gpus.get(self._number, 0)}"]
        command += [f"--labels={NODE_LABEL}={self._number}", f"--object-store-memory={SHARED_MEMORY_BYTES}"]
        command += ["--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats"]
        command += ["--include-dashboard=false"] if self._number == 0 else []
        environment = os.environ | {
            DRIVER_VARIABLE: str(os.getpid()),
            **RAY_NODE_ENVIRONMENT,
            **self._authentication,
        }
        environment.pop("RAY_ADDRESS", None)
        self._log.unlink(missing_ok=True)
        with self._log.open("wb") as log:
            ray = _start_masked(command, environment, log)
        deadline = time.monotonic() + self._wait_s
        while _STARTED not in self._log.read_text(errors="replace"):
            if ray.poll() is not None or time.monotonic() > deadline or self._is_told_to_stop:
                tail = read_log_tail(self._log)
                raise NodeError(f"Ray did not start on {self._name}; the end of {self._log}:\n{tail}")
            time.sleep(_POLL_INTERVAL_S)
        return ray

    def _read_address(self) -> str:
        words = self._log.read_text(errors="replace").partition("Local node IP: ")[2].split()
        return words[0]

    def _wait_for_head(self) -> str:
        head = self._meeting / "head"
        deadline = time.monotonic() + self._wait_s
        while not head.exists():
            if time.monotonic() > deadline or (self._meeting / "end").exists():
                raise NodeError(f"{self._name} has waited {self._wait_s:g} s for the first node's Ray")
            time.sleep(_POLL_INTERVAL_S)
        return head.read_text()

    def _wait_for_nodes(self, ray: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._wait_s
        waiting = list(range(1, len(self._plan.hosts)))
        while waiting := [number for number in waiting if not (self._meeting / f"node-{number}").exists()]:
            has_failed = any((self._meeting / f"failed-{number}").exists() for number in waiting)
            if has_failed or time.monotonic() > deadline or self._is_told_to_stop or ray.poll() is not None:
                raise NodeError(self._explain(waiting, self._wait_s - deadline + time.monotonic()))
            time.sleep(_POLL_INTERVAL_S)

    def _explain(self, missing: list[int], waited_s: float) -> str:
        count = f"{len(missing)} of {len(self._plan.hosts)} nodes"
        lines = [f"{count} did not join Ray; waited {waited_s:.1f} s of {self._wait_s:g}"]
        for number in missing:
            log = self._log.with_name(f"node-{number}.log")
            tail = "\n".join(f"        {line}" for line in read_log_tail(log).splitlines())
            lines.append(f"    node {number}; the end of {log}:\n{tail}")
        return "\n".join([*lines, "    fix: see these logs, leave the node out (--exclude), or raise node_wait_s"])

    def _say(self, name: str, text: str) -> None:
        with contextlib.suppress(OSError):  # the batch script has removed the directory: nobody listens any more
            draft = self._meeting / f".{name}"
            draft.write_text(text)
            draft.rename(self._meeting / name)


def _start_masked(command: list[str], environment: dict[str, str], log: object = None) -> subprocess.Popen[bytes]:
    """Start a process that does not hear SIGTERM, nor does anything it starts."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)  # type: ignore[call-overload, no-any-return]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def main() -> None:
    """Entry point of a task."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wait", type=float, default=300.0)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("meeting", type=Path)
    asked = parser.parse_args()
    sys.exit(Node(asked.run_dir, asked.meeting, asked.wait).run())


if __name__ == "__main__":
    main()
