"""`rlrecipes plan`, cold: CPU seconds of whole processes, against the bare interpreter and the limit of one second.

    python benchmarks/plan_speed.py [--repeats 20]

Cold means a new process each time, with Python's bytecode written before. CPU is user plus system time, children
included; it does not depend on what else runs, but for caches and clocks.

Then the resolution alone, in this process: 10,000 GPUs of 1,250 nodes, four served models, 8,000 trainer ranks and
1,500 engines, memory and step time predicted; limit 2 seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rlrecipes.config.compose import compose
from rlrecipes.runner.resolution import resolve_recipe

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


LIMIT_RESOLUTION_S = 2.0
SERVED = "topology.served_models"
LARGE = [
    "model=qwen3_32b",
    "topology=multi_model",
    "cluster=h100_8",
    "cluster.num_nodes=1250",
    "parallel.tensor_model_parallel_size=8",
    "parallel.pipeline_model_parallel_size=2",
    "parallel.data_parallel_size=500",
    "parallel.sequence_parallel=true",
    "parallel.max_tokens_per_micro_batch=16384",
    "rollout.sampling.max_new_tokens=8192",
    "data.max_prompt_tokens=1024",
    "schedule.prompts_per_step=4096",
    "rollout.max_concurrent_requests=32768",
    f"{SERVED}.policy.server_groups.main.gpus_per_engine=8",
]
FROZEN = {"reference": 200, "reward": 100, "teacher": 200}
"""Served model -> engines of 4 GPUs."""
FROZEN_CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_parameters": {"rope_theta": 1e6},
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


def measure_resolution(repeats: int) -> list[float]:
    """CPU seconds of resolving the large recipe."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(FROZEN_CONFIG))
        words = [*LARGE]
        for name, number in FROZEN.items():
            words.append(f"{SERVED}.{name}.path={directory}")
            words.append(f"{SERVED}.{name}.server_groups.main.gpus_per_engine=4")
            words.append(f"{SERVED}.{name}.server_groups.main.num_engines={number}")
        recipe = compose(words)
        seconds = []
        for _ in range(repeats):
            started_s = time.process_time()
            resolve_recipe(recipe)
            seconds.append(time.process_time() - started_s)
    return seconds


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
    large = measure_resolution(repeats)
    median = statistics.median(large)
    spread = f"{min(large):.2f} to {max(large):.2f}"
    print(f"10,000 GPUs resolved in {median:.2f} s of CPU ({spread}), {median / LIMIT_RESOLUTION_S:.0%} of the limit")


if __name__ == "__main__":
    main()
