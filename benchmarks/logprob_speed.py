"""Logprobs and entropy, forward and backward, against a straightforward torch version: time, peak memory and ratios.

    python benchmarks/logprob_speed.py [--tokens 2048] [--vocab 32000] [--top-p 1] [--top-k -1] [--repeats 5]

Takes the GPU where there is one (then 32768 tokens x 152064 rows, bfloat16), else one CPU thread and float32. Each
version runs in a process of its own. On a CPU its seconds are counted, which other programs do not lengthen; memory is
what forward and backward add to the logits, their gradient included.
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

from rlrecipes.engines.megatron.logprobs import compute_logprobs

Version = Callable[[torch.Tensor, torch.Tensor, float, int], tuple[torch.Tensor, torch.Tensor]]
TEMPERATURE = 0.7


class Alone:
    """A group of one rank."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def run_ours(
    logits: torch.Tensor, targets: torch.Tensor, top_p: float, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"top_p": top_p, "top_k": top_k, "vocab_size": logits.shape[1], "group": Alone()}
    return compute_logprobs(logits, targets, temperature=TEMPERATURE, **options)[:2]


def run_plain(
    logits: torch.Tensor, targets: torch.Tensor, top_p: float, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    z = logits.float() / TEMPERATURE
    if top_p < 1 or top_k > 0:
        with torch.no_grad():
            q, order = torch.softmax(z, -1).sort(dim=-1, descending=True)
            is_kept = q.cumsum(-1) - q <= top_p
            if top_k > 0:
                is_kept[:, top_k:] = False
            is_cut = torch.ones_like(is_kept).scatter_(1, order, ~is_kept).scatter_(1, targets[:, None], False)
        z = z.masked_fill(is_cut, -1e9)
    log_p = torch.log_softmax(z, -1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


VERSIONS: dict[str, Version] = {"ours": run_ours, "plain": run_plain}


def measure(version: Version, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of one forward and backward, and the most bytes they added."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_cuda = device.type == "cuda"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if is_cuda else torch.float32
    logits = torch.empty(options.tokens, options.vocab, dtype=dtype, device=device).normal_(0, 3).requires_grad_()
    targets = torch.randint(0, options.vocab, (options.tokens,), device=device)
    first = logits[:8].detach().clone().requires_grad_()
    version(first, targets[:8], options.top_p, options.top_k)[0].sum().backward()
    before = torch.cuda.memory_allocated() if is_cuda else read_peak_bytes()
    torch.cuda.reset_peak_memory_stats() if is_cuda else None
    times = []
    for _ in range(options.repeats):
        logits.grad = None
        torch.cuda.synchronize() if is_cuda else None
        started = time.perf_counter() if is_cuda else time.process_time()
        logprobs, entropy = version(logits, targets, options.top_p, options.top_k)
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        torch.cuda.synchronize() if is_cuda else None
        times.append((time.perf_counter() if is_cuda else time.process_time()) - started)
    peak = torch.cuda.max_memory_allocated() if is_cuda else read_peak_bytes()
    return {"seconds": statistics.median(times), "bytes": peak - before}


def read_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    size = (32768, 152064) if torch.cuda.is_available() else (2048, 32000)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=size[0])
    parser.add_argument("--vocab", type=int, default=size[1])
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=-1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--version", choices=VERSIONS, help="measure only this one, print JSON")
    options = parser.parse_args()
    if options.version:
        print(json.dumps(measure(VERSIONS[options.version], options)))
        return
    found = {}
    for name in VERSIONS:
        command = [sys.executable, __file__, *sys.argv[1:], "--version", name]
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode == 0:
            found[name] = json.loads(process.stdout)
        elif "out of memory" not in process.stderr.lower():
            raise SystemExit(process.stderr)
    table = Table("version", "s", "GB added", title=f"{options.tokens} tokens x {options.vocab} rows")
    for name in VERSIONS:
        numbers = found.get(name)
        cells = (f"{numbers['seconds']:.3f}", f"{numbers['bytes'] / 1e9:.2f}") if numbers else ("out of memory", "")
        table.add_row(name, *cells)
    if len(found) == len(VERSIONS):
        ratios = (found["ours"][key] / found["plain"][key] for key in ("seconds", "bytes"))
        table.add_row("ours / plain", *(f"{ratio:.2f}" for ratio in ratios))
    Console().print(table)


if __name__ == "__main__":
    main()
