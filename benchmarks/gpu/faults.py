"""Faults, one after another in one run on one GPU: how soon and with what words it stops, what is left, and whether it
goes on from its checkpoint.

Each run of ``rlrecipes train`` resumes the one before and is struck itself, so that four faults cost five starts::

    engine-killed    kill -9 of SGLang's scheduler while it answers requests
    trainer-killed   kill -9 of the trainer's process inside of a train step
    trainer-memory   all but a little of the GPU is taken when a train step begins
    engine-memory    the same when the engine is to take memory for its KV cache again
    gpu-busy         half of the GPU is taken before the run starts; nothing is to be started then

The last run is left alone. Needs a GPU, SGLang and megatron-core, no network::

    python benchmarks/gpu/faults.py --model DIR [--gpu 0] [--faults NAME ...] [--budget-s 400] [overrides ...]

Environment: as for colocated.py. ``--on-cpu`` runs the first two on the embedded engine, to try the script itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pynvml
from colocated import GROUP, RECIPE, SGLANG, SMALL
from watched_run import (
    NO_COMPARISON,
    PHASES,
    Recorder,
    WatchedRun,
    end,
    print_failure,
    read_lines,
    read_used_mib,
    run_inside,
    watch,
)

STRIKES = "strikes.jsonl"
TRAINED = "trained.jsonl"
NONE = "none"
BUSY = "gpu-busy"
NUM_STEPS, NUM_PROMPTS, GROUP_SIZE = 4, 16, 8
RUN_LIMIT_S = 200.0
LEAST_RUN_S = 30.0
KEPT_FREE_BYTES = 300 << 20
"""For kernels and the like: what fails then is the first large tensor."""
SETTLE_S = 15.0
CLEAN_MIB = 64
PROCESSES_OF_TRAINER = "ray::RankWorker"
POLL_S = 0.005
COMMON = [
    f"schedule.num_steps={NUM_STEPS}",
    f"schedule.prompts_per_step={NUM_PROMPTS}",
    f"algo.group_size={GROUP_SIZE}",
    "schedule.save_interval=1",
    "schedule.should_eval_before=false",
    "schedule.eval_interval=0",
    "schedule.should_export_hf=false",
    "data.eval_path=null",
    "optim.num_warmup_train_steps=0",
    "weight_sync.timeout_s=60",
    "tracking=local",
]
ON_CPU = [
    "name=faults",
    "data.tasks.num_train_rows=64",
    "rollout.sampling.max_new_tokens=64",
    "rollout.sampling.stop=[]",
    "model.shapes.num_layers=2",
    "model.shapes.hidden_size=32",
    "model.shapes.ffn_hidden_size=64",
    "model.shapes.kv_channels=8",
]


# ---- in the process of a run


@dataclass(frozen=True)
class Fault:
    """When a run is struck.

    Attributes:
        phase: of watched_run.py's table.
        call: of that phase, counted from 1 in one process.
    """

    phase: str
    call: int


FAULTS = {
    "engine-killed": Fault("rollout", 2),
    "trainer-killed": Fault("train", 1),
    "trainer-memory": Fault("train", 2),
    "engine-memory": Fault("trainer weights off, cache on", 2),
}


def run_struck(name: str, directory: Path, words: list[str]) -> None:
    """A watched run that meets a fault."""
    from rlrecipes.runner.loop import Loop
    from rlrecipes.runner.training import Learner
    from rlrecipes.runner.turns import GpuTurns

    note_trained(Recorder(directory / TRAINED))
    recorder = Recorder(directory / STRIKES)
    if name == "engine-killed":
        strike_during(Loop, "_collect", FAULTS[name].call, functools.partial(kill_engine, recorder))
    elif name == "trainer-killed":
        strike_during(Learner, "_train", FAULTS[name].call, functools.partial(kill_trainer, recorder))
    elif name == "trainer-memory":
        strike_before(Learner, "_train", FAULTS[name].call, functools.partial(take_memory, recorder))
    elif name == "engine-memory":
        strike_before(GpuTurns, "after_weights", FAULTS[name].call, functools.partial(take_memory, recorder))
    run_inside(directory, words)


def note_trained(recorder: Recorder) -> None:
    """Have every step tell which prompts it trains, and how many rollouts of each."""
    from rlrecipes.runner.training import Learner

    original = Learner.train_groups

    async def train_groups(self: Any, groups: Any, *, step: int, weight_version: int) -> Any:
        recorder.tell(step=step, groups=[(group.prompt.index, len(group.rollouts)) for group in groups])
        return await original(self, groups, step=step, weight_version=weight_version)

    Learner.train_groups = train_groups  # type: ignore[method-assign]


def strike_during(owner: Any, name: str, call: int, strike: Any) -> None:
    """Have something happen while a call of a coroutine function runs."""
    original, count = getattr(owner, name), 0

    async def struck(*arguments: Any, **keywords: Any) -> Any:
        nonlocal count
        count += 1
        striking = asyncio.create_task(strike(*arguments)) if count == call else None
        try:
            return await original(*arguments, **keywords)
        finally:
            if striking is not None:
                striking.cancel()

    setattr(owner, name, struck)


def strike_before(owner: Any, name: str, call: int, strike: Any) -> None:
    """Have something happen just before a call of a coroutine function."""
    original, count = getattr(owner, name), 0

    async def struck(*arguments: Any, **keywords: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            await asyncio.to_thread(strike)
        return await original(*arguments, **keywords)

    setattr(owner, name, struck)


async def kill_engine(recorder: Recorder, loop: Any, collector: Any, serving: Any) -> None:
    """Kill what computes in the first engine, once it answers requests; a server of one process is killed itself."""
    engine = serving.policy_engines[0]
    family = psutil.Process(engine.process.pid).children(recursive=True)
    chosen = next((process for process in family if "scheduler" in to_title(process)), family[0])
    while not (num_running := (await engine.client.load()).num_running_requests):
        await asyncio.sleep(POLL_S)
    kill(recorder, chosen, f"with {num_running} requests running")


async def kill_trainer(recorder: Recorder, *_: Any) -> None:
    """Kill the first trainer rank inside of a train step; Ray names its process after what it does."""
    rank = next(p for p in psutil.Process().children(recursive=True) if PROCESSES_OF_TRAINER in to_title(p))
    while "train_step" not in to_title(rank):
        await asyncio.sleep(POLL_S)
    await asyncio.sleep(10 * POLL_S)
    kill(recorder, rank, "inside of train_step")


def kill(recorder: Recorder, process: psutil.Process, when: str) -> None:
    """Kill a process, and tell."""
    what = f"kill -9 of {to_title(process)[:60].strip()}, {when}"
    recorder.tell(at_s=time.time(), what=what)
    process.kill()


def to_title(process: psutil.Process) -> str:
    """What a process calls itself; empty when it has ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def take_memory(recorder: Recorder) -> None:
    """Take all but a little of the GPU and keep it; this process ends with the run."""
    num_bytes = hold_memory(lambda free: free - KEPT_FREE_BYTES)
    recorder.tell(at_s=time.time(), what=f"{num_bytes / (1 << 20):,.0f} MiB taken, {KEPT_FREE_BYTES >> 20} MiB left")


HELD: list[Any] = []


def hold_memory(to_size: Any) -> int:
    """Take memory of the GPU; returns bytes."""
    import torch

    torch.empty(1, device="cuda")  # a context of its own comes first
    num_bytes = int(to_size(torch.cuda.mem_get_info()[0]))
    HELD.append(torch.empty(max(0, num_bytes), dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    return num_bytes


def run_holder(ready: Path) -> None:
    """Somebody else's process: takes half of the GPU, says so in a file, and stays."""
    num_bytes = hold_memory(lambda free: free // 2)
    ready.write_text(str(num_bytes))
    time.sleep(300)


# ---- what is seen from outside


class Family:
    """Every process that this one has started, and those that they did; remembered when their parents are gone."""

    def __init__(self) -> None:
        self._known: set[psutil.Process] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            with contextlib.suppress(psutil.Error):
                self._known |= set(psutil.Process().children(recursive=True))

    def list_left(self) -> list[psutil.Process]:
        """Those that still live."""
        left = []
        for process in list(self._known):
            with contextlib.suppress(psutil.Error):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process)
        return left

    def end(self) -> None:
        """Kill what is left, and forget."""
        self._stop.set()
        self._thread.join(2)
        for process in self.list_left():
            with contextlib.suppress(psutil.Error):
                process.kill()


@dataclass(frozen=True)
class Left:
    """What was there after a run had ended.

    Attributes:
        after_s: seconds until nothing was, or until nobody waited any longer.
        processes: that still lived then.
        used_mib: of the GPU beyond what was used before; None where there is none.
    """

    after_s: float
    processes: list[str]
    used_mib: float | None

    @property
    def is_clean(self) -> bool:
        """Whether nothing is left."""
        return not self.processes and (self.used_mib or 0.0) < CLEAN_MIB


def read_mib(gpu: int) -> float | None:
    """MiB in use; None without a GPU."""
    try:
        return read_used_mib(gpu)
    except pynvml.NVMLError:
        return None


def wait_until_clean(family: Family, gpu: int, before_mib: float | None) -> Left:
    """Wait for a bounded time until processes and GPU memory are gone."""
    started_s = time.monotonic()
    while True:
        used = read_mib(gpu)
        beyond = None if used is None or before_mib is None else max(0.0, used - before_mib)
        left = Left(time.monotonic() - started_s, [to_title(p)[:80] for p in family.list_left()], beyond)
        if left.is_clean or left.after_s > SETTLE_S:
            return left
        time.sleep(0.05)


@dataclass(frozen=True)
class Outcome:
    """A run that is over.

    Attributes:
        name: of its fault.
        run: how it ended.
        ended_s: when.
        left: what was left of it.
        strike: what struck it and when; None where nothing did.
        phase: in which it was struck.
        resumed: step it went on from.
    """

    name: str
    run: WatchedRun
    ended_s: float
    left: Left
    strike: dict[str, Any] | None
    phase: str
    resumed: str

    @property
    def words(self) -> str:
        """What it said at last."""
        _, found, said = self.run.output.rpartition("rlrecipes: ")
        return (found + said).strip() if found else ""

    @property
    def faults(self) -> list[str]:
        """What is not as it should be."""
        found = []
        expected = {NONE: 0, BUSY: 2}.get(self.name, 1)
        if self.run.code != expected:
            found.append(f"code {self.run.code}, not {expected}")
        if "Traceback" in self.run.output:
            found.append("a traceback was printed")
        if not self.left.is_clean:
            found.append("something was left")
        if self.name in FAULTS and self.strike is None:
            found.append("was never struck")
        if self.name in FAULTS and self.strike is not None and FAULTS[self.name].phase not in self.phase:
            found.append(f"was not struck in {FAULTS[self.name].phase}")
        if self.name != NONE and "fix: " not in self.words:
            found.append("no line says what to do")
        return found


def run_once(name: str, words: list[str], directory: Path, timeout_s: float, gpu: int) -> Outcome:
    """One run with its fault, watched until nothing is left of it."""
    print(f"\n==== {name}: at most {timeout_s:.0f} s", flush=True)
    before_mib, family = read_mib(gpu), Family()
    program = [str(Path(__file__).resolve()), "--inside", name]
    run = watch(words, directory, timeout_s, (gpu,), program)
    ended_s = time.time()
    left = wait_until_clean(family, gpu, before_mib)
    family.end()
    strikes = read_lines(directory / STRIKES)
    strike = strikes[0] if strikes else None
    resumed = re.search(r"resuming .* after step (\d+)", run.output)
    outcome = Outcome(
        name=name,
        run=run,
        ended_s=ended_s,
        left=left,
        strike=strike,
        phase=find_phases(directory, strike["at_s"]) if strike else "",
        resumed=resumed.group(1) if resumed else "",
    )
    print(run.describe())
    print(f"struck: {strike['what'] if strike else 'no'}; in: {outcome.phase or '-'}; left: {left}")
    print(outcome.words or "(no last words)", flush=True)
    return outcome


def find_phases(directory: Path, at_s: float) -> str:
    """Phases that ran at a moment."""
    phases = read_lines(directory / PHASES)
    ended = {(line["phase"], line["started_s"]): line["ended_s"] for line in phases if "ended_s" in line}
    begun = {(line["phase"], line["started_s"]) for line in phases if line["started_s"] <= at_s}
    return ", ".join(sorted({phase for phase, started_s in begun if ended.get((phase, started_s), at_s) >= at_s}))


def print_outcomes(outcomes: list[Outcome]) -> None:
    """A row a run."""
    names = ("fault", "struck in", "exit code", "s from fault to exit", "s until nothing was left", "GPU MiB left")
    names += ("processes left", "resumed after step", "as it should be")
    print("\n| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for one in outcomes:
        since = f"{one.ended_s - one.strike['at_s']:.1f}" if one.strike else ""
        mib = "" if one.left.used_mib is None else f"{one.left.used_mib:.0f}"
        row = (one.name, one.phase, one.run.code, since, f"{one.left.after_s:.1f}", mib, len(one.left.processes))
        print("| " + " | ".join(map(str, (*row, one.resumed, "; ".join(one.faults) or "yes"))) + " |")
    for one in outcomes:
        if one.words:
            print(f"\n{one.name} said:\n\n    " + one.words.replace("\n", "\n    "))


def print_samples(directories: list[Path], run_dir: Path) -> bool:
    """Which prompts the steps that count have trained, and which steps were logged; whether all is as it should be."""
    last: dict[int, list[tuple[int, int]]] = {}
    num_told = 0
    for directory in directories:
        for line in read_lines(directory / TRAINED):
            last[line["step"] + 1] = line["groups"]  # what was trained and not saved is trained again
            num_told += 1
    times = Counter(index for groups in last.values() for index, _ in groups)
    lost = sorted(set(range(NUM_STEPS * NUM_PROMPTS)) - set(times))
    repeated = sorted(index for index, count in times.items() if count > 1)
    short = sorted(index for groups in last.values() for index, count in groups if count != GROUP_SIZE)
    logged = Counter((line["step"], name) for line in read_lines(run_dir / "metrics.jsonl") for name in line["metrics"])
    steps = sorted({step for step, _ in logged})
    twice = sorted({step for (step, _), count in logged.items() if count > 1})
    saved = sorted(path.name for path in (run_dir / "checkpoints").glob("*"))
    print(f"\ntrain steps begun: {num_told}; steps that count: {sorted(last)}; prompts in them: {len(times)}")
    print(f"prompts lost: {lost or 'none'}; repeated: {repeated or 'none'}; without all rollouts: {short or 'none'}")
    print(f"steps logged: {steps}; logged twice: {twice or 'none'}; checkpoints left: {', '.join(saved)}")
    return not (lost or repeated or short or twice) and steps == list(range(NUM_STEPS + 1))


@contextlib.contextmanager
def holding_gpu(directory: Path, gpu: int) -> Any:
    """Half of a GPU is somebody else's meanwhile."""
    directory.mkdir(parents=True, exist_ok=True)
    ready, log = directory / "held", directory / "holder.log"
    env = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
    command = [sys.executable, str(Path(__file__).resolve()), "--hold", str(ready)]
    with log.open("w") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not ready.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        print(f"process {process.pid} holds {ready.read_text() if ready.exists() else 'no'} bytes", flush=True)
        yield
    finally:
        end(process)
        print(log.read_text()[-500:], end="")


def build_words(arguments: argparse.Namespace, run_dir: Path) -> list[str]:
    """What differs from the recipe, the caller's words last."""
    found = [NO_COMPARISON, "train", f"run_dir={run_dir}"]
    if arguments.on_cpu:
        return [*found, *ON_CPU, *COMMON, *arguments.overrides]
    names = {word.partition("=")[0] for word in COMMON}
    found += [f"recipe={RECIPE}", f"model.path={arguments.model}"]
    found += [word for word in SMALL if word.partition("=")[0] not in names]
    native = {name: value for name, value in SGLANG.items() if name != "cuda_graph_max_bs_decode"}
    native["cuda_graph_backend_decode"] = "disabled"  # a start is what most of the time goes to
    found += [f"+{GROUP}.sglang.{name}={value}" for name, value in native.items()]
    found += [f"{GROUP}.start_timeout_s={RUN_LIMIT_S}"]
    if path := os.environ.get("ROLLOUT_PATH"):
        found.append(f"+{GROUP}.env.PYTHONPATH={path}")
    return [*found, *COMMON, *arguments.overrides]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("MODEL"), help="HF directory; MODEL of the environment")
    parser.add_argument("--gpu", type=int, default=0, help="the driver's number of the one to use")
    parser.add_argument("--faults", nargs="+", choices=[BUSY, *FAULTS], help="all by default")
    parser.add_argument("--budget-s", type=float, default=400.0, help="seconds of everything")
    parser.add_argument("--directory", type=Path, help="for everything written; a temporary one by default")
    parser.add_argument("--on-cpu", action="store_true", help="tries the script: embedded engine, a tiny model")
    parser.add_argument("overrides", nargs="*", help="further ones of the recipe, after --")
    arguments = parser.parse_args()
    if not arguments.on_cpu and not (Path(arguments.model or "") / "config.json").is_file():
        parser.error("--model or MODEL must name an HF directory")
    default = ["engine-killed", "trainer-killed"] if arguments.on_cpu else [BUSY, *FAULTS]
    arguments.faults = arguments.faults or default
    return arguments


def main() -> int:
    arguments = read_arguments()
    deadline = time.monotonic() + arguments.budget_s
    directory = (arguments.directory or Path(tempfile.mkdtemp(prefix="faults-"))).absolute()
    run_dir = directory / "run"
    words = build_words(arguments, run_dir)
    print("rlrecipes " + " ".join(words[1:]), flush=True)
    outcomes: list[Outcome] = []
    try:
        for name in [*arguments.faults, NONE]:
            left_s = deadline - time.monotonic()
            needed_s = max([LEAST_RUN_S, *(one.run.time_s for one in outcomes)])
            if left_s < needed_s * (1 if name == NONE else 2):  # the last run shows what the others left behind
                print(f"\n==== {name}: left out, {left_s:.0f} s are left")
                continue
            limit_s, own = min(RUN_LIMIT_S, left_s - SETTLE_S), directory / name
            if name == BUSY:
                elsewhere = [f"run_dir={directory / 'busy'}" if word.startswith("run_dir=") else word for word in words]
                with holding_gpu(own, arguments.gpu):
                    outcomes.append(run_once(name, elsewhere, own, min(limit_s, 60.0), arguments.gpu))
            else:
                outcomes.append(run_once(name, words, own, limit_s, arguments.gpu))
            if outcomes[-1].faults:
                print_failure(outcomes[-1].run.output, run_dir)
    finally:
        print_outcomes(outcomes)
        is_whole = print_samples([one.run.directory for one in outcomes], run_dir)
        print(f"\neverything is in {directory}", flush=True)
    return 0 if is_whole and not any(one.faults for one in outcomes) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        run_struck(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    elif sys.argv[1:2] == ["--hold"]:
        run_holder(Path(sys.argv[2]))
    else:
        sys.exit(main())
