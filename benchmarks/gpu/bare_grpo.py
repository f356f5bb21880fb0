"""GRPO with nothing between SGLang and Megatron-Core: the floor that against_others.py measures ours against.

One process trains and steers one SGLang server on the same GPU, in turns. The work of a step (bare_grpo_steps.py) is
that of ``recipe=smollm2_135m_reasoning``: every rollout with the engine's log probabilities; both sides give their
memory back while the other works; one forward and backward pass over packed samples, logits only at trained tokens;
Adam over float32 copies; weights as one bucket of GPU memory. Of three ways to ask the server for a step's rollouts the
quickest counts. Before the first step it is shown that weights arrive: an answer changes with noisy ones, and comes
back.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
from against_others import ENGINE_ENV, SGLANG
from watched_run import LOG_LINES


class Server:
    """An SGLang server, started at once.

    Args:
        model_dir: what it serves.
        log: what it prints.
    """

    def __init__(self, model_dir: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._log, self.url = log, f"http://127.0.0.1:{port}"
        words = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model_dir), "--port", str(port)]
        words += ["--host", "127.0.0.1", "--dtype", "bfloat16", "--random-seed", "0", "--enable-memory-saver"]
        for name, value in SGLANG.items():
            words += [f"--{name.replace('_', '-')}", *(map(str, value) if isinstance(value, list) else [str(value)])]
        words = [word for word in words if word != "True"]
        path = os.environ.get("ROLLOUT_PATH")
        env = os.environ | ENGINE_ENV | ({"PYTHONPATH": path} if path else {})
        with log.open("w") as file:
            self._process = subprocess.Popen(words, env=env, stdout=file, stderr=subprocess.STDOUT)

    async def wait(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        """Until it answers; its log says why it does not."""
        begin = time.monotonic()
        while time.monotonic() < begin + timeout_s and self._process.poll() is None:
            try:
                async with session.get(f"{self.url}/health") as response:
                    if response.status == 200:
                        print(f"the server is up after {time.monotonic() - begin:.0f} s more", flush=True)
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.25)
        raise SystemExit("\n".join(["no server:", *self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]]))

    def stop(self) -> None:
        """In order, or at once where that takes long."""
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="HF directory of a Llama with tied embeddings")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL; NUM_PROMPTS of them a step")
    parser.add_argument("--output", type=Path, required=True, help="a line a step; the server's log lies beside it")
    parser.add_argument("--until", type=float, required=True, help="no step begins that would end later than this time")
    arguments = parser.parse_args()
    server = Server(arguments.model, arguments.output.with_suffix(".server.log"))
    try:
        from bare_grpo_steps import run  # importing it takes as long as half the server's start

        asyncio.run(run(arguments, server))
    finally:
        server.stop()


if __name__ == "__main__":
    main()
