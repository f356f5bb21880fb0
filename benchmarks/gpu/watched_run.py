"""A run in a process of its own, watched: when each phase began and ended, the GPUs' memory meanwhile, and how far the
trainer's log probabilities lie from the engine's.

What the scripts beside this one share. Run as a program it is the run itself::

    python benchmarks/gpu/watched_run.py DIRECTORY [--no-comparison] train|run override ...
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

ROOT = Path(__file__).resolve().parents[2]
POSITIONS = (0, 8, 16, 32, 64, 96, 128)
QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)
METRICS = (
    "reward/mean",
    "train/loss",
    "train/grad_norm",
    "train/rollout_logprob_abs_diff_mean",
    "rollout/time_s",
    "rollout/tokens_per_s_per_gpu",
    "train/time_s",
    "train/mfu_fraction",
    "train/gpu_allocated_bytes_max",
    "weight_sync/time_s",
    "weight_sync/num_bytes",
    "time/offload_s",
    "time/step_s",
)
PHASES = "phases.jsonl"
MEMORY = "memory.jsonl"
DIFFERENCES = "differences.jsonl"
SAMPLE_INTERVAL_S = 0.02
LOG_LINES = 25
NO_COMPARISON = "--no-comparison"


class Recorder:
    """Lines of JSON, each on disk as soon as it is told.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._lock = threading.Lock()

    def tell(self, **content: Any) -> None:
        """Write one line."""
        with self._lock:
            self._file.write(json.dumps(content) + "\n")


def wrap(owner: Any, name: str, phase: str, recorder: Recorder) -> None:
    """Have a coroutine function tell when it ran."""
    original: Callable[..., Awaitable[Any]] = getattr(owner, name)

    @functools.wraps(original)
    async def noted(*arguments: Any, **keywords: Any) -> Any:
        started_s = time.time()
        recorder.tell(phase=phase, started_s=started_s)
        try:
            return await original(*arguments, **keywords)
        finally:
            recorder.tell(phase=phase, started_s=started_s, ended_s=time.time())

    setattr(owner, name, noted)


def run_inside(directory: Path, words: list[str]) -> None:
    """What the command line does with these words, with every phase noted."""
    from rlrecipes.cli.main import main

    note_phases(Recorder(directory / PHASES))
    if words[0] == NO_COMPARISON:
        words = words[1:]
    else:
        note_differences(Recorder(directory / DIFFERENCES), Recorder(directory / PHASES))
    sys.argv = ["rlrecipes", *words]
    main()


def note_phases(recorder: Recorder) -> None:
    """Wrap what a step consists of; the names are those of the table."""
    from rlrecipes.runner import run
    from rlrecipes.runner.loop import Loop
    from rlrecipes.runner.servers import Serving
    from rlrecipes.runner.training import Learner
    from rlrecipes.runner.turns import GpuTurns

    wrap(Serving, "wait_until_ready", "engine starts", recorder)
    wrap(GpuTurns, "put_engines_to_sleep", "engine releases", recorder)
    wrap(run, "_start_trainers", "trainer starts", recorder)
    wrap(Loop, "_collect", "rollout", recorder)
    wrap(GpuTurns, "to_trainer", "turn to the trainer", recorder)
    wrap(Learner, "_with_logprobs", "logprobs", recorder)
    wrap(Learner, "_train", "train", recorder)
    wrap(GpuTurns, "before_weights", "state off, engine weights on", recorder)
    wrap(Loop, "_send_by_ranks", "weights travel", recorder)
    wrap(GpuTurns, "after_weights", "trainer weights off, cache on", recorder)
    wrap(Loop, "_sync", "whole sync", recorder)
    wrap(Loop, "_evaluate", "evaluation", recorder)
    wrap(Loop, "_save", "checkpoint", recorder)


def note_differences(recorder: Recorder, phases: Recorder) -> None:
    """Before each train step, have the trainer compute what the engine said of every token it sampled."""
    import numpy as np

    from rlrecipes.batching.grid import unpack_tokens
    from rlrecipes.rollout.samples import to_samples
    from rlrecipes.runner.training import Learner

    original = Learner.train_groups

    async def check(self: Any, groups: Sequence[Any]) -> None:
        samples = [sample for group in groups for sample in to_samples(group)]
        grid = self._grid(samples)
        outputs = await self._trainers.run("compute_logprobs", "policy", per_rank=self._per_rank(grid))
        found = unpack_tokens(grid, [output for output in outputs if output], len(samples))
        by_position: list[list[float]] = [[] for _ in POSITIONS]
        for sample, trainer in zip(samples, found, strict=True):
            trained = np.flatnonzero(sample.loss_mask)
            distance = np.abs(np.asarray(sample.rollout_logprobs)[trained] - np.asarray(trainer)[trained])
            for position, value in zip(trained - trained[:1], distance, strict=True):
                by_position[int(np.searchsorted(POSITIONS, position, side="right")) - 1].append(float(value))
        every = np.array([value for part in by_position for value in part])
        if len(every):
            recorder.tell(
                num_tokens=len(every),
                mean=float(every.mean()),
                quantiles=[float(value) for value in np.quantile(every, QUANTILES)],
                by_position=[(len(part), float(np.mean(part)) if part else 0.0) for part in by_position],
            )

    async def train_groups(self: Any, groups: Sequence[Any], **keywords: Any) -> Any:
        started_s = time.time()
        try:
            await asyncio.wait_for(check(self, groups), 120)
        finally:
            phases.tell(phase="(this comparison)", started_s=started_s, ended_s=time.time())
        return await original(self, groups, **keywords)

    Learner.train_groups = train_groups  # type: ignore[method-assign]


@dataclass(frozen=True)
class WatchedRun:
    """A run that is over.

    Attributes:
        code: exit code; None where it ran past its limit and was stopped.
        output: what it printed.
        started_s: when it began, seconds since 1970, as PHASES has it.
        time_s: seconds it took.
        directory: of what was noted; read_lines reads PHASES, MEMORY and DIFFERENCES there.
    """

    code: int | None
    output: str
    started_s: float
    time_s: float
    directory: Path

    def describe(self) -> str:
        """How it ended, in one line."""
        ended = "ran past its limit and was stopped" if self.code is None else f"ended with code {self.code}"
        return f"the run {ended} after {self.time_s:.0f} s; everything is in {self.directory}"


def watch(
    words: list[str],
    directory: Path,
    timeout_s: float,
    gpus: Sequence[int] = (0,),
    program: Sequence[str] = (str(Path(__file__).resolve()),),
) -> WatchedRun:
    """Run ``rlrecipes`` to its end, or to the limit; memory is sampled meanwhile.

    Args:
        words: of the command line: the verb and its overrides, after NO_COMPARISON where the run is timed as a whole.
        directory: for what is noted; made if missing.
        timeout_s: seconds; then the run is told to end, and killed if it does not.
        gpus: whose memory is read, and the only ones that the run sees.
        program: script, and its own first words, that is given the directory and the words; it calls run_inside.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()
    sampler = threading.Thread(target=sample_memory, args=(directory, stop, gpus), daemon=True)
    sampler.start()
    output = directory / "output.log"
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
    }
    command = [sys.executable, *program, str(directory), *words]
    started_s = time.time()
    with output.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
            end(process)
    time_s = time.time() - started_s
    stop.set()
    sampler.join(2)
    return WatchedRun(code, output.read_text(errors="replace"), started_s, time_s, directory)


def end(process: subprocess.Popen[bytes]) -> None:
    """In order first, so that nothing is left on the GPU; what remains is killed with its session."""
    for number, wait_s in ((signal.SIGTERM, 20), (signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, number)
            process.wait(wait_s)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def sample_memory(directory: Path, stop: threading.Event, gpus: Sequence[int]) -> None:
    """MiB in use on each GPU, every SAMPLE_INTERVAL_S, until told to stop."""
    recorder = Recorder(directory / MEMORY)
    try:
        while not stop.wait(SAMPLE_INTERVAL_S):
            recorder.tell(at_s=time.time(), used_mib=[round(read_used_mib(index), 1) for index in gpus])
    except pynvml.NVMLError as error:
        recorder.tell(error=f"no memory is known: {error}")


def read_used_mib(gpu: int) -> float:
    """MiB in use on a GPU by all processes, as the driver counts it.

    Raises:
        pynvml.NVMLError: there is no driver, or no such GPU.
    """
    pynvml.nvmlInit()
    used: int = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(gpu)).used
    return used / (1 << 20)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines; the last may be cut."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def iter_phase_rows(phases: list[dict[str, Any]], memory: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One row a phase: seconds of the first and the median of the rest, memory when it began, at most, and ended.

    Memory is of the fullest GPU.
    """
    samples = [(line["at_s"], max(line["used_mib"])) for line in memory if "at_s" in line]
    ended = [phase for phase in phases if "ended_s" in phase]
    for name in dict.fromkeys(phase["phase"] for phase in phases):
        own = [phase for phase in ended if phase["phase"] == name]
        if not own:
            yield {"phase": f"{name} (never ended)", "count": 0}
            continue
        seconds = [phase["ended_s"] - phase["started_s"] for phase in own]
        held = [[mib for at, mib in samples if one["started_s"] <= at <= one["ended_s"]] for one in own]
        before = [find_last(samples, one["started_s"]) for one in own]
        after = [find_last(samples, one["ended_s"] + SAMPLE_INTERVAL_S) for one in own]
        known = [part for part in held if part]
        yield {
            "phase": name,
            "count": len(own),
            "first_s": seconds[0],
            "median_s": statistics.median(seconds[1:] or seconds),
            "begins_mib": statistics.median(before),
            "most_mib": max(map(max, known)) if known else max(before + after),
            "least_mib": min(map(min, known)) if known else min(before + after),
            "ends_mib": statistics.median(after),
        }


def find_last(samples: list[tuple[float, float]], at_s: float) -> float:
    """Memory at a moment: the last that was read before it; 0 where nothing was."""
    found = 0.0
    for moment, mib in samples:
        if moment > at_s:
            break
        found = mib
    return found


def print_failure(output: str, run_dir: Path) -> None:
    """What a person would look at first."""
    print("\n==== the run's own words")
    print("\n".join(output.splitlines()[-LOG_LINES:]))
    for log in sorted((run_dir / "logs").glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()
        print(f"\n==== {log.name}")
        print("\n".join(line[:300] for line in lines[-LOG_LINES:]))
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.used,memory.total", "--format=csv"]
    print("\n==== nvidia-smi")
    try:
        print(subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.strip())
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{type(error).__name__}: {error}")


def print_report(directory: Path, run_dir: Path) -> dict[str, Any]:
    """Everything that was measured, however far the run came."""
    memory = read_lines(directory / MEMORY)
    rows = list(iter_phase_rows(read_lines(directory / PHASES), memory))
    for line in memory:
        if "error" in line:
            print(line["error"])
    print("\n| phase | times | first s | median s | MiB when it begins | most | least | when it ends |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        if not row["count"]:
            print(f"| {row['phase']} | 0 | | | | | | |")
            continue
        mib = (row[name] for name in ("begins_mib", "most_mib", "least_mib", "ends_mib"))
        numbers = " | ".join(f"{value:,.0f}" for value in mib)
        print(f"| {row['phase']} | {row['count']} | {row['first_s']:.3f} | {row['median_s']:.3f} | {numbers} |")
    differences = read_lines(directory / DIFFERENCES)
    print_differences(differences)
    steps = print_steps(run_dir / "metrics.jsonl")
    return {"phases": rows, "differences": differences, "steps": steps}


def print_differences(differences: list[dict[str, Any]]) -> None:
    """|log probability by the trainer - by the engine|, of each train batch and by position in the answer."""
    if not differences:
        return
    names = " | ".join("largest" if q == 1 else f"{q:.1%}" for q in QUANTILES)
    print(f"\n| step | tokens | mean of abs(logprob trainer - engine), nats | {names} |")
    print("|---" * (3 + len(QUANTILES)) + "|")
    for step, line in enumerate(differences, 1):
        values = " | ".join(f"{value:.2e}" for value in line["quantiles"])
        print(f"| {step} | {line['num_tokens']} | {line['mean']:.2e} | {values} |")
    ends = [f"{first}-{last - 1}" for first, last in zip(POSITIONS, POSITIONS[1:], strict=False)] + [
        f"{POSITIONS[-1]}-"
    ]
    print("\n| position in the answer | tokens | mean |\n|---|---|---|")
    for number, name in enumerate(ends):
        parts = [line["by_position"][number] for line in differences]
        total = sum(count for count, _ in parts)
        if total:
            print(f"| {name} | {total} | {sum(count * mean for count, mean in parts) / total:.2e} |")


def print_steps(path: Path) -> list[dict[str, Any]]:
    """The run's own metrics, a column a step."""
    merged: dict[int, dict[str, float]] = {}
    for line in read_lines(path):
        merged.setdefault(line["step"], {}).update(line["metrics"])
    evaluated = [name for name in dict.fromkeys(n for m in merged.values() for n in m) if name.endswith("/accuracy")]
    print("\n| metric | " + " | ".join(f"step {step}" for step in merged) + " |")
    print("|---" * (1 + len(merged)) + "|")
    for name in (*METRICS, *evaluated):
        values = [f"{metrics[name]:.4g}" if name in metrics else "" for metrics in merged.values()]
        if any(values):
            print(f"| {name} | " + " | ".join(values) + " |")
    return [{"step": step, **metrics} for step, metrics in merged.items()]


if __name__ == "__main__":
    run_inside(Path(sys.argv[1]), sys.argv[2:])
