"""The embedded engine against the real SGLang on the same CPU and model: tokens/s and their ratio, from one run.

    python benchmarks/engine_speed.py [--repeats 5] [--sglang-python .venv-sglang/bin/python]

Both servers run at the same time with one thread each; the load goes to one of them at a time, in turns (an idle SGLang
sleeps here; by default it spins on a core). SGLang needs its own environment (`make sglang`). The model is random, so
answers are all as long as they may be.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlrecipes.engines.sglang.process import STANDINS, ServerProcess, find_free_port

START_TIMEOUT_S = 300.0
NUM_PROMPT_TOKENS = 32
NUM_NEW_TOKENS = 128
CONCURRENCIES = (1, 8, 64)
SGLANG_FLAGS = [
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    "--sampling-backend",
    "pytorch",
    "--grammar-backend",
    "none",
    "--disable-cuda-graph",
    "--skip-server-warmup",
    "--sleep-on-idle",
]


def save_model(path: Path) -> None:
    """A random Qwen3 of the quickstart's size, without a tokenizer: requests are token ids."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)


def start(kind: str, python: str, model_path: Path, log_dir: Path) -> tuple[ServerProcess, str]:
    port = find_free_port()
    module = "rlrecipes.engines.embedded.server" if kind == "embedded" else "sglang.launch_server"
    command = [python, "-m", module, "--model-path", str(model_path), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-total-tokens", "32768", "--skip-tokenizer-init"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if kind == "sglang":
        command += SGLANG_FLAGS
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(STANDINS)}
    return ServerProcess(kind, command, env, log_dir / f"{kind}.log"), f"http://127.0.0.1:{port}"


async def measure(session: aiohttp.ClientSession, url: str, concurrency: int, turn: int) -> float:
    """Tokens/s of waves of ``concurrency`` requests; prompts are new in every turn, so no prefix is cached."""

    async def ask(number: int) -> None:
        prompt = [(7 * number + 13 * turn + 3 * place * place) % 120 + 3 for place in range(NUM_PROMPT_TOKENS)]
        sampling = {"max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True, "temperature": 1.0}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        async with session.post(url + "/generate", json=body) as response:
            answer = await response.json()
            assert len(answer["output_ids"]) == NUM_NEW_TOKENS, answer

    num_waves = 4 if concurrency == 1 else 2
    started_s = time.perf_counter()
    for wave in range(num_waves):
        await asyncio.gather(*(ask(1000 * wave + number) for number in range(concurrency)))
    return num_waves * concurrency * NUM_NEW_TOKENS / (time.perf_counter() - started_s)


async def run(arguments: argparse.Namespace) -> dict[tuple[str, int], list[float]]:
    rates: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        save_model(Path(directory) / "model")
        pythons = {"embedded": sys.executable, "sglang": arguments.sglang_python}
        servers = {
            kind: start(kind, python, Path(directory) / "model", Path(directory)) for kind, python in pythons.items()
        }
        try:
            for process, url in servers.values():
                await process.wait_until_ready(url, START_TIMEOUT_S)
            timeout = aiohttp.ClientTimeout(total=600)
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
                for turn in range(-1, arguments.repeats):  # turn -1 warms up
                    for concurrency in CONCURRENCIES:
                        for kind, (_, url) in servers.items():
                            rate = await measure(session, url, concurrency, turn)
                            if turn >= 0:
                                rates.setdefault((kind, concurrency), []).append(rate)
        finally:
            for process, _ in servers.values():
                process.stop()
    return rates


def describe(rates: Sequence[float]) -> str:
    return f"{statistics.median(rates):7.0f}  ({min(rates):.0f} to {max(rates):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sglang-python", default=".venv-sglang/bin/python")
    arguments = parser.parse_args()
    rates = asyncio.run(run(arguments))
    table = Table("requests at once", "embedded, tokens/s", "SGLang, tokens/s", "ratio")
    for concurrency in CONCURRENCIES:
        ours, theirs = rates["embedded", concurrency], rates["sglang", concurrency]
        pairs = [our / their for our, their in zip(ours, theirs, strict=True)]
        ratio = f"{statistics.median(pairs):.2f}  ({min(pairs):.2f} to {max(pairs):.2f})"
        table.add_row(str(concurrency), describe(ours), describe(theirs), ratio)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
