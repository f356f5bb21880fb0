"""The quickstart on three seeds: held-out accuracy before SFT, between the stages and after GRPO, and its picture.

python benchmarks/quickstart_seeds.py [--runs-dir DIR] [--picture docs/quickstart.png] [override ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from rlrecipes.tracking.curves import draw_curves
from rlrecipes.tracking.log import read_records

SEEDS = (0, 1, 2)
ACCURACY = "eval/spell_backward/accuracy"


def train(runs_dir: Path, recipe: str, seed: int, overrides: list[str]) -> tuple[Path, float]:
    started_s = time.monotonic()
    command = [str(Path(sys.executable).parent / "rlrecipes"), "train", f"recipe={recipe}", f"runs_dir={runs_dir}"]
    command += [f"seed={seed}", "tracking=local", *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return runs_dir / recipe / "metrics.jsonl", time.monotonic() - started_s


def accuracies(path: Path) -> list[float]:
    return [record.metrics[ACCURACY] for record in read_records(path) if ACCURACY in record.metrics]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--picture", type=Path, default=Path("docs/quickstart.png"))
    parser.add_argument("overrides", nargs="*", help="of the GRPO stage")
    asked = parser.parse_args()
    print("| seed | before SFT | after SFT | after GRPO | gained by GRPO | SFT | GRPO |\n|---|---|---|---|---|---|---|")
    logs, gains = [], []
    for seed in SEEDS:
        runs_dir = asked.runs_dir / f"seed-{seed}"
        sft, sft_s = train(runs_dir, "quickstart_sft", seed, [f"model.init_seed={seed}"])
        grpo, grpo_s = train(runs_dir, "quickstart_grpo", seed, asked.overrides)
        before, (between, after) = accuracies(sft)[0], (accuracies(grpo)[0], accuracies(grpo)[-1])
        gains.append(after - between)
        row = f"| {seed} | {before:.3f} | {between:.3f} | {after:.3f} | {100 * gains[-1]:+.0f} points "
        print(row + f"| {sft_s:.0f} s | {grpo_s:.0f} s |", flush=True)
        logs.append(read_records(grpo))
    print(f"\nGRPO gains {100 * min(gains):.0f} to {100 * max(gains):.0f} points, median {100 * median(gains):.0f}")
    draw_curves({"GRPO": logs}, asked.picture, [ACCURACY])


if __name__ == "__main__":
    main()
