"""``rlrecipes train recipe=smollm2_135m_reasoning`` on several seeds: held-out accuracy against GPU time.

    python benchmarks/gpu/recipe_seeds.py --model DIR [--seeds 0 1] [--gpus 0] [--picture FILE] [override ...]

One run a GPU at a time, each watched (watched_run.py). Seconds count from the start of the command, so the engine's
start, evaluations and checkpoints are in them. Environment: as colocated.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from colocated import RECIPE, build_engine_overrides
from watched_run import DIFFERENCES, WatchedRun, print_failure, read_lines, watch

ACCURACY = "eval/chain_sum/accuracy"
LIMIT_S = 600


def build_words(model: str, seed: int, run_dir: Path, overrides: list[str]) -> list[str]:
    """What differs from the recipe: where things lie, and flags of this engine."""
    found = [f"recipe={RECIPE}", f"model.path={model}", "model.shapes=null", f"run_dir={run_dir}", f"seed={seed}"]
    found += ["tracking=local", "schedule.should_export_hf=false"]
    return ["train", *found, *build_engine_overrides(), *overrides]


def report(seed: int, run: WatchedRun, run_dir: Path) -> None:
    """Every evaluation: step, seconds, accuracy; the reward and the difference of log probabilities around it."""
    lines = read_lines(run_dir / "metrics.jsonl")
    print(f"\nseed {seed}: {run.describe()}")
    print("\n| step | s since the command | held-out accuracy | reward | abs(logprob trainer - engine) | a step, s |")
    print("|---" * 6 + "|")
    merged: dict[int, dict[str, Any]] = {}
    for line in lines:
        merged.setdefault(line["step"], {}).update(line["metrics"], time_s=line["time"] - run.started_s)
    differences = [line["mean"] for line in read_lines(run.directory / DIFFERENCES)]
    for step, metrics in merged.items():
        if ACCURACY not in metrics:
            continue
        around = differences[max(0, step - 5) : step + 5]
        difference = sum(around) / len(around) if around else float("nan")
        cells = [
            f"{step}",
            f"{metrics['time_s']:.0f}",
            f"{metrics[ACCURACY]:.3f}",
            f"{metrics.get('reward/mean', 0):.3f}",
        ]
        print("| " + " | ".join([*cells, f"{difference:.4f}", f"{metrics.get('time/step_s', 0):.2f}"]) + " |")
    found = [metrics[ACCURACY] for metrics in merged.values() if ACCURACY in metrics]
    if found:
        gained = 100 * (found[-1] - found[0])
        print(f"\nseed {seed}: held-out accuracy {found[0]:.3f} to {found[-1]:.3f}, {gained:+.1f} points")
    if run.code != 0:
        print_failure(run.output, run_dir)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("MODEL"), help="HF directory; MODEL of the environment")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--gpus", type=int, nargs="+", default=[0])
    parser.add_argument("--timeout", type=float, default=LIMIT_S, help="seconds of each run")
    parser.add_argument("--directory", type=Path, help="for everything written; a temporary one by default")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("overrides", nargs="*", help="further ones of the recipe")
    arguments = parser.parse_args()
    directory = (arguments.directory or Path(tempfile.mkdtemp(prefix="recipe-seeds-"))).absolute()
    waiting: Queue[int] = Queue()
    for seed in arguments.seeds:
        waiting.put(seed)
    runs: dict[int, WatchedRun] = {}

    def work(gpu: int) -> None:
        while True:
            try:
                seed = waiting.get_nowait()
            except Empty:
                return
            own = directory / f"seed-{seed}"
            words = build_words(arguments.model, seed, own / "run", arguments.overrides)
            print(f"GPU {gpu}: rlrecipes " + " ".join(words), flush=True)
            runs[seed] = watch(words, own, arguments.timeout, [gpu])

    workers = [threading.Thread(target=work, args=(gpu,)) for gpu in arguments.gpus]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for seed, run in sorted(runs.items()):
        report(seed, run, run.directory / "run")
    if arguments.picture:
        from rlrecipes.tracking.curves import draw_curves
        from rlrecipes.tracking.log import read_records

        logs = [read_records(run.directory / "run" / "metrics.jsonl") for run in runs.values()]
        draw_curves({"SmolLM2-135M-Instruct": logs}, arguments.picture, [ACCURACY, "reward/mean"])
    return max((1 if run.code is None else run.code for run in runs.values()), default=1)


if __name__ == "__main__":
    sys.exit(main())
