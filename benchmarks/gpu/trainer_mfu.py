"""Train steps of a 1B-shaped dense model on one GPU, variant by variant: seconds, tokens/s, MFU, memory, and a profile.

    python benchmarks/gpu/trainer_mfu.py [--variants te-4-micro-batches local ...] [--budget-s 540] [--out DIR]
    python benchmarks/gpu/trainer_mfu.py --device cpu --steps 2    # the plumbing, with a tiny model

Shapes of Llama-3.2-1B, random weights, 8192 packed tokens a micro-batch of seven samples (512 to 2048 tokens, an eighth
of each is prompt), GRPO's clipped objective, Adam, all through ``TrainerRank.train_step``. Each variant runs in a
process of its own, so one that fails ends no other; after ``--budget-s`` none is started any more.

``MFU`` is what ``train/mfu_fraction`` says: 6 operations a weight and token, prompts included, without attention's
quadratic part, over 989 TFLOP/s. ``work`` counts what is really asked for: the output layer only at trained tokens, and
causal attention; nothing that is computed again counts in either. ``busy`` is the time kernels ran in a profiled step
over an unprofiled step's; ``launches`` and the CPU's time in them are of one profiled step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bare_trainer import (
    build_micro_batches,
    build_model_node,
    build_objective,
    build_trainer_node,
    draw_weights,
    start_rank,
)

PEAK_FLOPS = 989e12
LENGTHS = (2048, 1536, 1536, 1024, 1024, 512, 512)
MARK = "RESULT "
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
WAITS = ("Synchronize", "cudaMemcpy")
KINDS = {
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "splitk"),
    "logprobs": ("_sum_rows", "_grade_rows"),
    "Adam and clipping": ("adam", "multi_tensor", "l2norm"),
    "norms": ("norm",),
    "rotary embedding": ("rope", "rotary"),
    "copies": ("memcpy", "memset", "copy"),
}
"""What a kernel is for, by a part of its name; the first that fits."""


@dataclass(frozen=True)
class Variant:
    """What differs from Transformer Engine with four micro-batches a step.

    Attributes:
        native: ``parallel.megatron``.
        parallel: other keys of ``parallel``.
        num_micro_batches: of one train step.
        env: of the process.
        has_kernels: whether logprobs come from the fused kernels; False: torch, chunk by chunk.
    """

    native: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    num_micro_batches: int = 4
    env: dict[str, str] = field(default_factory=dict)
    has_kernels: bool = True


LOCAL = {"transformer_impl": "local"}
UNFUSED = dict.fromkeys(("bias_activation_fusion", "bias_dropout_fusion"), False)
VARIANTS = {
    "te-4-micro-batches": Variant(),
    "local": Variant(LOCAL),
    "te-logprobs-in-torch": Variant(has_kernels=False),
    "te-1-micro-batch": Variant(num_micro_batches=1),
    "te-8-micro-batches": Variant(num_micro_batches=8),
    "te-attention-again": Variant(parallel={"recompute_granularity": "selective"}),
    "te-layers-again": Variant(parallel=FULL),
    "te-fused-residual": Variant({"fused_residual_rmsnorm": True}),
    "te-one-connection": Variant(env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
    "te-expandable-segments": Variant(env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    "te-float32-gradients": Variant({"grad_reduce_in_fp32": True}),
    "te-op-fuser": Variant({"use_transformer_engine_op_fuser": True}),
    "te-activation": Variant({"use_te_activation_func": True, "bias_activation_fusion": False}),
    "te-no-rope-fusion": Variant({"apply_rope_fusion": False}),
    "te-no-swiglu-fusion": Variant(UNFUSED),
    "local-no-swiglu-fusion": Variant({**LOCAL, **UNFUSED}),
    "local-attention-again": Variant(LOCAL, parallel={"recompute_granularity": "selective"}),
    "local-layers-again": Variant(LOCAL, parallel=FULL),
    "te-fused-gradient-accumulation": Variant({"gradient_accumulation_fusion": True}),
}


# ---- in the process of one variant


def build_llama(is_tiny: bool) -> Any:
    return build_model_node(
        "llama_1b",
        "llama",
        "float32" if is_tiny else "bfloat16",
        num_layers=2 if is_tiny else 16,
        hidden_size=64 if is_tiny else 2048,
        ffn_hidden_size=128 if is_tiny else 8192,
        num_attention_heads=4 if is_tiny else 32,
        num_query_groups=2 if is_tiny else 8,
        kv_channels=16 if is_tiny else 64,
        vocab_size=512 if is_tiny else 128256,
        rotary_base=500000.0,
        norm_epsilon=1e-5,
        max_position_embeddings=131072,
    )


def compute_work(shapes: Any, counts: dict[str, float]) -> float:
    """Operations of forward and backward: output layer at trained tokens, causal attention included."""
    from rlrecipes.plan.model_costs import compute_layer_costs
    from rlrecipes.plan.parameters import compute_flops_per_token

    output = 6.0 * shapes.vocab_size * shapes.hidden_size
    context = 3.0 * sum(layer.context_flops for layer in compute_layer_costs(shapes))
    layers = compute_flops_per_token(shapes) - output
    return layers * counts["tokens"] + output * counts["trained"] + context * counts["pairs"]


def build_rank(variant: Variant, node: Any, device: str) -> Any:
    from rlrecipes.engines.megatron import logprobs

    if not variant.has_kernels:
        logprobs.has_kernels = lambda logits: False
    fields = {"max_tokens_per_micro_batch": sum(LENGTHS), "megatron": variant.native, **variant.parallel}
    rank = start_rank(build_trainer_node(device, **fields), node)
    draw_weights(rank)
    return rank


def run_variant(name: str, device: str, num_steps: int, traces: Path | None) -> dict[str, Any]:
    """Warm up, time and profile train steps of one variant."""
    import torch

    variant, is_tiny, begin = VARIANTS[name], device == "cpu", time.perf_counter()
    node = build_llama(is_tiny)
    rank = build_rank(variant, node, device)
    lengths = [length // 32 for length in LENGTHS] if is_tiny else [*LENGTHS]
    batches, counts = build_micro_batches(variant.num_micro_batches, lengths, node.shapes.vocab_size, 1 / 8)
    step = partial(rank.train_step, batches, build_objective())
    first = step()
    start = time.perf_counter()
    setup_s = start - begin
    step(), step()
    warm_s = (time.perf_counter() - start) / 2
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(max(3, min(num_steps, int(20 / warm_s)))):
        start = time.perf_counter()
        step()  # returns once loss and norm are on the CPU; Adam may still run
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    used = torch.cuda.max_memory_allocated() if device == "cuda" else resource.getrusage(0).ru_maxrss * 1024
    step_s = statistics.median(times)
    found = {
        "step_s": [step_s, min(times), max(times)],
        "tokens_per_s": counts["tokens"] / step_s,
        "mfu": node.flops_per_token * counts["tokens"] / step_s / PEAK_FLOPS,
        "work": compute_work(node.shapes, counts) / step_s / PEAK_FLOPS,
        "peak_bytes": used,
        "loss": first["loss"],
        "grad_norm": first["grad_norm"],
        "setup_s": setup_s,
        "num_parameters": node.num_parameters,
    }
    found["profile"] = profile_step(step, device, step_s, traces and traces / f"{name}.json")
    rank.close()
    return found


def profile_step(step: Callable[[], Any], device: str, step_s: float, trace: Path | None) -> dict[str, Any]:
    """One step under torch.profiler: kernels by time and kind, launches, waits, and where the GPU stood still."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profile(activities=activities) as profiler:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = trace or Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    launches = [event["dur"] for event in calls if event["name"].startswith(LAUNCHES)]
    waits = [event["dur"] for event in calls if any(part in event["name"] for part in WAITS)]
    kernels = sorted(
        (event["ts"], event["dur"], event["name"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    return {
        "num_launches": len(launches),
        "launch_ms": sum(launches) / 1e3,
        "wait_ms": sum(waits) / 1e3,
        **summarise_kernels(kernels, step_s),
    }


def summarise_kernels(kernels: list[tuple[float, float, str]], step_s: float) -> dict[str, Any]:
    """Of (start, duration, name) in microseconds, by start."""
    if not kernels:
        return {"busy": 0.0, "busy_ms": 0.0, "span_ms": 0.0, "kernels": [], "kinds": {}, "gaps": []}
    busy, end, before, gaps = 0.0, kernels[0][0], "", []
    for start, duration, name in kernels:
        if start > end:
            gaps.append((start - end, before, name))
        busy += max(0.0, start + duration - max(start, end))
        if start + duration > end:
            end, before = start + duration, name
    totals: dict[str, list[float]] = {}
    kinds: dict[str, float] = {}
    for _, duration, name in kernels:
        total = totals.setdefault(name, [0.0, 0])
        total[0] += duration
        total[1] += 1
        lowered = name.lower()
        kind = next((kind for kind, parts in KINDS.items() if any(part in lowered for part in parts)), "the rest")
        kinds[kind] = kinds.get(kind, 0.0) + duration
    top = sorted(((total, count, name) for name, (total, count) in totals.items()), reverse=True)[:14]
    return {
        "busy": busy / 1e6 / step_s,
        "busy_ms": busy / 1e3,
        "span_ms": (end - kernels[0][0]) / 1e3,
        "kernels": [(total / 1e3, count, name) for total, count, name in top],
        "kinds": {kind: kinds[kind] / 1e3 for kind in sorted(kinds, key=lambda kind: -kinds[kind])},
        "gaps": [(gap / 1e3, before, name) for gap, before, name in sorted(gaps, reverse=True)[:5]],
    }


def measure_products() -> dict[str, float]:
    """What this GPU multiplies in bfloat16 at these shapes, TFLOP/s: no train step can be faster."""
    import torch

    found = {}
    for what, (rows, inner, columns) in {
        "8192 x 8192 x 8192": (8192, 8192, 8192),
        "FFN, first": (8192, 2048, 16384),
        "FFN, second": (8192, 8192, 2048),
        "output layer": (7168, 2048, 128256),
    }.items():
        left, right = (torch.randn(shape, device="cuda").bfloat16() for shape in ((rows, inner), (columns, inner)))
        for _ in range(5):
            left @ right.T
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            left @ right.T
        torch.cuda.synchronize()
        found[what] = 20 * 2 * rows * inner * columns / (time.perf_counter() - start) / 1e12
    return found


def run_child(arguments: argparse.Namespace) -> None:
    """Say what was found, or in one line why nothing was."""
    from rlrecipes.errors import RecipeError

    try:
        if arguments.variant == "products":
            found: dict[str, Any] = {"products": measure_products(), "host": describe_host()}
        else:
            found = run_variant(arguments.variant, arguments.device, arguments.steps, arguments.out)
    except RecipeError as error:
        found = {"failure": " ".join(str(error).split())}
    except Exception as error:
        traceback.print_exc()
        found = {"failure": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    print(MARK + json.dumps(found), flush=True)


def describe_host() -> str:
    import torch

    version = importlib.util.find_spec("transformer_engine") and __import__("transformer_engine").__version__
    return (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"cuDNN {torch.backends.cudnn.version()}, Transformer Engine {version or 'not installed'}"
    )


# ---- around them


def run_alone(name: str, arguments: argparse.Namespace, timeout_s: float) -> dict[str, Any]:
    """One variant in a process group of its own, ended when it takes too long."""
    command = [sys.executable, __file__, "--variant", name, "--device", arguments.device]
    command += ["--steps", str(arguments.steps)] + (["--out", str(arguments.out)] if arguments.out else [])
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    env |= VARIANTS[name].env if name in VARIANTS else {}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env, start_new_session=True
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return {"failure": f"not done after {timeout_s:.0f} s"}
        answers = [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
        errors.seek(0)
        told = errors.read()
    if not answers:
        return {"failure": f"exit code {process.returncode}: {told.strip()[-300:]}"}
    found: dict[str, Any] = json.loads(answers[-1])
    if "failure" in found and "Traceback" in told:
        print(told[-1500:], file=sys.stderr)
    return found


def render_row(name: str, found: dict[str, Any]) -> str:
    if "failure" in found:
        return f"| {name} | {found['failure']} |"
    step_s, profile = found["step_s"], found["profile"]
    times = f"{step_s[0] * 1e3:.1f} ({step_s[1] * 1e3:.1f} .. {step_s[2] * 1e3:.1f})"
    return (
        f"| {name} | {times} | {found['tokens_per_s']:,.0f} | {found['mfu']:.1%} | {found['work']:.1%} "
        f"| {found['peak_bytes'] / 2**30:.1f} | {profile['busy']:.0%} | {profile['num_launches']:,} "
        f"| {profile['launch_ms']:.1f} | {found['loss']:.5f} | {found['grad_norm']:.4f} |"
    )


def iter_profile_lines(name: str, profile: dict[str, Any]) -> Iterator[str]:
    spans = f"kernels {profile['busy_ms']:.1f} ms of {profile['span_ms']:.1f} ms profiled"
    yield f"{name}: {spans}, the CPU waits {profile['wait_ms']:.1f} ms"
    yield "  " + ", ".join(f"{kind} {spent:.1f} ms" for kind, spent in profile["kinds"].items())
    for spent, count, kernel in profile["kernels"]:
        yield f"  {spent:8.2f} ms {count:5} x {kernel[:100]}"
    for gap, before, after in profile["gaps"]:
        yield f"  {gap:8.2f} ms idle between {before[:50]} and {after[:50]}"


HEAD = (
    "| variant | ms a step (lowest .. highest) | tokens/s | MFU | work | peak GiB | busy | launches | CPU ms in them "
    "| loss | gradient norm |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS], metavar="NAME")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a variant, at most 20 s of them")
    parser.add_argument("--timeout-s", type=float, default=120, help="longest time of one variant")
    parser.add_argument("--budget-s", type=float, default=540, help="no variant starts that could end later")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="folder for results.json, and for traces with --traces")
    parser.add_argument("--traces", action="store_true", help="keep each variant's Chrome trace")
    parser.add_argument("--variant", choices=["products", *VARIANTS], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        run_child(arguments)
        return
    results, out, begin = {}, arguments.out, time.monotonic()
    arguments.out = out if arguments.traces else None
    if out:
        out.mkdir(parents=True, exist_ok=True)
    if arguments.device == "cuda":
        found = run_alone("products", arguments, 60)
        print(found.get("host", found), flush=True)
        print(", ".join(f"{what}: {rate:.0f} TFLOP/s" for what, rate in found.get("products", {}).items()), flush=True)
    longest = 30.0
    for name in arguments.variants:
        left = arguments.budget_s - (time.monotonic() - begin)
        if left < longest:
            results[name] = {"failure": "not started: no time was left"}
            continue
        start = time.monotonic()
        results[name] = run_alone(name, arguments, min(arguments.timeout_s, left))
        took = time.monotonic() - start
        longest = max(longest, took if took < arguments.timeout_s else 0.0)
        print(f"{render_row(name, results[name])} {took:.0f} s", flush=True)
        for line in iter_profile_lines(name, results[name]["profile"]) if "profile" in results[name] else ():
            print(line, flush=True)
        if out:
            (out / "results.json").write_text(json.dumps(results, indent=1))
    print("", HEAD, *(render_row(name, found) for name, found in results.items()), sep="\n")
    variants = {name: asdict(VARIANTS[name]) for name in results}
    if out:
        (out / "results.json").write_text(json.dumps({"variants": variants, "results": results}, indent=1))


if __name__ == "__main__":
    main()
