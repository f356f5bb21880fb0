"""The quickstart on three seeds: held-out accuracy before SFT, between the stages and after RL, and its picture.

python benchmarks/quickstart_seeds.py [--runs-dir DIR] [--picture FILE] [--algos grpo ...] [--seeds 0 ...]
[-- override]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from rlrecipes.tracking.curves import draw_curves
from rlrecipes.tracking.log import read_records

SEEDS = (0, 1, 2)
ACCURACY = "eval/spell_backward/accuracy"


def train(runs_dir: Path, recipe: str, run: str, seed: int, overrides: list[str]) -> tuple[Path, float]:
    started_s = time.monotonic()
    command = [str(Path(sys.executable).parent / "rlrecipes"), "train", f"recipe={recipe}", f"runs_dir={runs_dir}"]
    command += [f"seed={seed}", "tracking=local", *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return runs_dir / run / "metrics.jsonl", time.monotonic() - started_s


def accuracies(path: Path) -> list[float]:
    return [record.metrics[ACCURACY] for record in read_records(path) if ACCURACY in record.metrics]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--picture", type=Path, default=Path("docs/quickstart.png"))
    parser.add_argument("--algos", nargs="+", default=["grpo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("overrides", nargs="*", help="of the RL stage")
    asked = parser.parse_args()
    print("| algo | seed | before SFT | after SFT | after RL | gained by RL | SFT | RL |\n" + "|---" * 8 + "|")
    logs: dict[str, list[Any]] = {algo: [] for algo in asked.algos}
    gains: dict[str, list[float]] = {algo: [] for algo in asked.algos}
    for seed in asked.seeds:
        runs_dir = asked.runs_dir / f"seed-{seed}"
        sft, sft_s = train(runs_dir, "quickstart_sft", "quickstart_sft", seed, [f"model.init_seed={seed}"])
        for algo in asked.algos:
            overrides = [f"algo={algo}", *asked.overrides]
            path, rl_s = train(runs_dir, "quickstart", f"quickstart_{algo}", seed, overrides)
            before, (between, after) = accuracies(sft)[0], (accuracies(path)[0], accuracies(path)[-1])
            gains[algo].append(after - between)
            row = (
                f"| {algo} | {seed} | {before:.3f} | {between:.3f} | {after:.3f} | {100 * gains[algo][-1]:+.0f} points "
            )
            print(row + f"| {sft_s:.0f} s | {rl_s:.0f} s |", flush=True)
            logs[algo].append(read_records(path))
    for algo, found in gains.items():
        print(
            f"\n{algo} gains {100 * min(found):.0f} to {100 * max(found):.0f} points, median {100 * median(found):.0f}"
        )
    draw_curves({algo.upper(): runs for algo, runs in logs.items()}, asked.picture, [ACCURACY])


if __name__ == "__main__":
    main()
