"""Discounted returns and GAE against a straightforward torch loop over tokens: CPU seconds, peak memory and ratios.

    python benchmarks/returns_speed.py [--samples 256] [--tokens 8192] [--repeats 3]

Samples have every length up to ``--tokens``, half of them with tool answers between their turns. ``loop`` goes through
one sample after another, token by token; ``padded`` through all of them at once, padded to the longest. Each version
runs in a process of its own, on one thread; memory is what a call adds to its inputs, its results included.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rlrecipes.algos.returns import compute_gae

Rows = list[Tensor]
Version = Callable[[Rows, Rows, Rows], tuple[Rows, Rows]]
GAMMA, GAE_LAMBDA = 0.999, 0.95


def run_ours(rewards: Rows, values: Rows, masks: Rows) -> tuple[Rows, Rows]:
    return compute_gae(token_rewards=rewards, values=values, loss_masks=masks, gamma=GAMMA, gae_lambda=GAE_LAMBDA)


def run_loop(rewards: Rows, values: Rows, masks: Rows) -> tuple[Rows, Rows]:
    advantages, returns = [torch.zeros_like(row) for row in rewards], [torch.zeros_like(row) for row in rewards]
    for sample, mask in enumerate(masks):
        following = advantage = torch.zeros((), dtype=rewards[sample].dtype)
        for place in reversed(range(len(mask))):
            if mask[place]:
                delta = rewards[sample][place] + GAMMA * following - values[sample][place]
                advantage = delta + GAMMA * GAE_LAMBDA * advantage
                following = values[sample][place]
                advantages[sample][place], returns[sample][place] = advantage, advantage + following
    return advantages, returns


def run_padded(rewards: Rows, values: Rows, masks: Rows) -> tuple[Rows, Rows]:
    reward, value, mask = (torch.nn.utils.rnn.pad_sequence(rows) for rows in (rewards, values, masks))
    advantages = torch.zeros_like(reward)
    following = torch.zeros(len(masks), dtype=reward.dtype)
    advantage = torch.zeros_like(following)
    for place in reversed(range(len(mask))):
        now = mask[place]
        delta = reward[place] + GAMMA * following - value[place]
        advantage = torch.where(now, delta + GAMMA * GAE_LAMBDA * advantage, advantage)
        following = torch.where(now, value[place], following)
        advantages[place] = torch.where(now, advantage, 0.0)
    returns = torch.where(mask, advantages + value, 0.0)
    lengths = [len(row) for row in masks]
    return tuple([table[:length, i] for i, length in enumerate(lengths)] for table in (advantages, returns))


VERSIONS: dict[str, Version] = {"ours": run_ours, "padded": run_padded, "loop": run_loop}


def build_inputs(num_samples: int, num_tokens: int) -> tuple[Rows, Rows, Rows]:
    generator = torch.Generator().manual_seed(0)
    masks = []
    for sample in range(num_samples):
        mask = torch.ones(max(num_tokens * (sample + 1) // num_samples, 2), dtype=torch.bool)
        mask[: len(mask) // 8] = False
        if sample % 2:
            mask[len(mask) // 3 : len(mask) // 2] = False
        masks.append(mask)
    rewards, values = ([torch.randn(len(mask), generator=generator) for mask in masks] for _ in range(2))
    return rewards, values, masks


def read_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(version: Version, options: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(1)
    version(*build_inputs(4, 200))
    inputs = build_inputs(options.samples, options.tokens)
    before = read_peak_bytes()
    times = []
    for _ in range(1 if version is run_loop else options.repeats):
        started_s = time.process_time()
        advantages, returns = version(*inputs)
        times.append(time.process_time() - started_s)
    sums = [float(torch.cat(rows).double().abs().sum()) for rows in (advantages, returns)]
    return {
        "time_s": statistics.median(times),
        "bytes": read_peak_bytes() - before,
        "advantages": sums[0],
        "returns": sums[1],
    }


def measure_apart(name: str, options: argparse.Namespace) -> dict[str, float]:
    sizes = [f"--{key}={getattr(options, key)}" for key in ("samples", "tokens", "repeats")]
    done = subprocess.run(
        [sys.executable, __file__, "--only", name, *sizes], capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=VERSIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(VERSIONS[options.only], options)))
        return
    found = {name: measure_apart(name, options) for name in VERSIONS}
    table = Table(title=f"GAE, {options.samples} samples of up to {options.tokens} tokens, one CPU thread")
    for column in ("version", "CPU s", "times ours", "MiB added", "sum of |advantage|"):
        table.add_column(column, justify="left" if column == "version" else "right")
    for name, row in found.items():
        ratio = row["time_s"] / found["ours"]["time_s"]
        cells = f"{row['time_s']:.3f}", f"{ratio:.1f}", f"{row['bytes'] / 2**20:.0f}", f"{row['advantages']:.3f}"
        table.add_row(name, *cells)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
