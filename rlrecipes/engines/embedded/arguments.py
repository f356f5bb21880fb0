"""The command line, under SGLang's own flag names. Owns parsing; refuses flags it does not know."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ServerArguments:
    """What the server was started with.

    Attributes:
        model_path: a Hugging Face model directory.
        host, port: to listen on; port 0 takes a free one and prints it.
        served_model_name: what /v1/models says.
        tokenizer_path: where the tokenizer is.
        dtype: ``auto`` (bfloat16 where the weights are, else float32), ``float32`` or ``bfloat16``.
        context_length: shortens the model's.
        max_total_tokens: that the cache of keys and values holds; None for what a gigabyte holds.
        max_running_requests: that hold memory at once.
        chunked_prefill_size: prompt tokens computed in one step.
        weight_version: at the start.
        random_seed: of requests without a seed.
        enable_deterministic_inference: results do not depend on what else runs.
        skip_tokenizer_init: token ids only.
        log_level: of the server's own log.
    """

    model_path: Path
    host: str
    port: int
    served_model_name: str
    tokenizer_path: Path
    dtype: str
    context_length: int | None
    max_total_tokens: int | None
    max_running_requests: int
    chunked_prefill_size: int
    weight_version: str
    random_seed: int
    enable_deterministic_inference: bool
    skip_tokenizer_init: bool
    log_level: str


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def build_parser() -> argparse.ArgumentParser:
    """The flags and what they take; tools/inventory.py reads them for the Plan."""
    parser = argparse.ArgumentParser(prog="rlrecipes.engines.embedded.server", allow_abbrev=False)
    add = parser.add_argument
    add("--model-path", "--model", type=Path, required=True)
    add("--tokenizer-path", type=Path)
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000)
    add("--served-model-name")
    add("--dtype", choices=("auto", "float32", "float", "bfloat16"), default="auto")
    add("--context-length", type=_positive)
    add("--max-total-tokens", type=_positive)
    add("--max-running-requests", type=_positive, default=256)
    add("--chunked-prefill-size", type=_positive, default=2048)
    add("--weight-version", default="default")
    add("--random-seed", type=int, default=0)
    add("--enable-deterministic-inference", action="store_true")
    add("--skip-tokenizer-init", action="store_true")
    add("--log-level", choices=("critical", "error", "warning", "info", "debug"), default="warning")
    add("--device", choices=("cpu",), default="cpu")
    add("--tp-size", "--tensor-parallel-size", "--tp", type=int, choices=(1,), default=1)
    return parser


def parse_arguments(argv: Sequence[str]) -> ServerArguments:
    """Read the command line; an unknown flag or value ends the process with code 2 and one line."""
    values = build_parser().parse_args(argv)
    return ServerArguments(
        model_path=values.model_path,
        host=values.host,
        port=values.port,
        served_model_name=values.served_model_name or str(values.model_path),
        tokenizer_path=values.tokenizer_path or values.model_path,
        dtype="float32" if values.dtype == "float" else values.dtype,
        context_length=values.context_length,
        max_total_tokens=values.max_total_tokens,
        max_running_requests=values.max_running_requests,
        chunked_prefill_size=values.chunked_prefill_size,
        weight_version=values.weight_version,
        random_seed=values.random_seed,
        enable_deterministic_inference=values.enable_deterministic_inference,
        skip_tokenizer_init=values.skip_tokenizer_init,
        log_level=values.log_level,
    )
