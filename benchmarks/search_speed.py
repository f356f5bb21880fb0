"""`rlrecipes search`: CPU seconds over several recipes and clusters, against the limit of 10 seconds for 5,000 layouts.

    python benchmarks/search_speed.py

Each search is a process of its own, with Python's bytecode written before; its CPU is user plus system time, start-up,
composing and the check of the winner included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

LIMIT_CPU_S, LIMIT_CANDIDATES = 10.0, 5000
RLRECIPES = str(Path(sys.executable).parent / "rlrecipes")
LONG = ["rollout.sampling.max_new_tokens=8192", "data.max_prompt_tokens=1024", "schedule.prompts_per_step=128"]
LONG += ["rollout.max_concurrent_requests=2048"]
SEARCHES = {
    "qwen3_4b, 8 H200": ["model=qwen3_4b", "cluster=h200_8", *LONG],
    "qwen3_4b, 8 H200, cost": ["model=qwen3_4b", "cluster=h200_8", "objective=cost", *LONG],
    "llama3_1_8b, 32 H100": ["model=llama3_1_8b", "cluster=h100_8x4", *LONG],
    "qwen3_32b, 256 H100": ["model=qwen3_32b", "cluster=h100_8x32", *LONG],
}


def run_search(words: list[str]) -> tuple[dict, float]:
    """What it found, and its CPU seconds."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [RLRECIPES, "search", *words, "--format", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        output = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"rlrecipes search failed with {process.returncode}")
    return json.loads(output), used.ru_utime + used.ru_stime


def main() -> None:
    """Search and print the table."""
    limit = f"s for {LIMIT_CANDIDATES}"
    table = Table(title=f"CPU of a search; limit {LIMIT_CPU_S:g} s for {LIMIT_CANDIDATES} layouts")
    for column in ("search", "layouts", "CPU s", limit, "best samples/s"):
        table.add_column(column, justify="left" if column == "search" else "right")
    for name, words in SEARCHES.items():
        found, cpu_s = run_search(words)
        num = found["num_candidates"]
        scaled = f"{cpu_s / max(num, 1) * LIMIT_CANDIDATES:.1f}"
        table.add_row(name, str(num), f"{cpu_s:.1f}", scaled, f"{found['candidates'][0]['samples_per_s']:.3g}")
    Console().print(table)


if __name__ == "__main__":
    main()
