"""`rlrecipes plan`, cold: CPU seconds of whole processes, against the bare interpreter and the limit of one second.

    python benchmarks/plan_speed.py [--repeats 20]

Cold means a new process each time, with Python's bytecode written before. CPU is user plus system time, children
included; it does not depend on what else runs, but for caches and clocks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

LIMIT_CPU_S = 1.0
RLRECIPES = str(Path(sys.executable).parent / "rlrecipes")
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "rlrecipes --help": [RLRECIPES, "--help"],
    "plan recipe=quickstart_sft": [RLRECIPES, "plan", "recipe=quickstart_sft"],
    "the same --format yaml": [RLRECIPES, "plan", "recipe=quickstart_sft", "--format", "yaml"],
    "the same, misspelt": [RLRECIPES, "plan", "recipe=quickstart_sft", "optim.lrr=1"],
}


def measure_cpu_s(command: list[str]) -> float:
    """User and system seconds of one process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for command in COMMANDS.values():
        measure_cpu_s(command)  # writes bytecode
    for _ in range(repeats):
        for name, command in COMMANDS.items():
            seconds[name].append(measure_cpu_s(command))
    table = Table(title=f"CPU seconds of {repeats} cold processes")
    for column in ("command", "median", "least", "most", f"of {LIMIT_CPU_S:g} s"):
        table.add_column(column, justify="left" if column == "command" else "right")
    for name, values in seconds.items():
        median = statistics.median(values)
        share = f"{median / LIMIT_CPU_S:.0%}"
        table.add_row(name, f"{median:.3f}", f"{min(values):.3f}", f"{max(values):.3f}", share)
    Console().print(table)


if __name__ == "__main__":
    main()
