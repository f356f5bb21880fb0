"""Memory of one GPU in each phase, as the Plan predicts it and as it was measured; the model's constants fitted anew.

    python benchmarks/gpu/memory_phases.py --model DIR [--second-model DIR] [--gpu 0] [--budget-s 560]
    python benchmarks/gpu/memory_phases.py --read --directory DIR    # measured there, predicted by the model of today
    python benchmarks/gpu/memory_phases.py --device cpu --only 135m 1b-layers-again    # the plumbing, with a tiny model

Every configuration is a recipe, resolved as ``rlrecipes plan`` does it. Of most, the Plan's trainer runs alone: built,
offloaded and taken back, logprobs, train steps, all over full micro-batches, trained but for each sample's first token.
Two run as they are (watched_run.py), engine and trainer in turns. Each is a process group of its own, ended when it
takes too long; after ``--budget-s`` none is started that could end later, and whatever was measured is printed.

``measured`` is what the driver counts (NVML, less what the idle GPU had) at the phase's peak: torch's reserved memory
and all beside it. ``needed`` has torch's allocated memory instead of the reserved; no allocator does with less.

The directory of each configuration gets plan.yaml and memory.jsonl, which ``rlrecipes calibrate`` reads. Constants are
fitted by the same code: to all configurations, and for each to all others, a fit that has not seen what it is held to.
Phases of a trainer alone that have no micro-batch are compared with what was measured, and fitted to what was needed:
what the allocator holds above that are pieces of the phases before.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import colocated
from bare_trainer import build_micro_batches, build_model_node, build_objective, draw_weights, start_rank
from pynvml import NVMLError
from watched_run import (
    MEMORY,
    NO_COMPARISON,
    PHASES,
    ROOT,
    end,
    find_last,
    print_failure,
    read_lines,
    read_used_mib,
    watch,
)

MIB = 1 << 20
SAMPLE_TOKENS = 1024
NUM_MICRO_BATCHES = 3
SETTLED_S = 0.3
"""In which an engine's memory has left the GPU, and no trainer has come to it yet."""
FULL = ("parallel.recompute_granularity=full", "parallel.recompute_method=uniform", "parallel.recompute_num_layers=1")
MLP_AGAIN = ("parallel.recompute_granularity=selective", "parallel.recompute_modules=[mlp]")
SHAPES = {
    "135m": {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9},
    "352m": {"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
    "1b": {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32},
}
VOCABULARIES = {"135m": 49152, "352m": 49152, "1b": 128256}
KEY_HEADS = {"135m": 3, "352m": 8, "1b": 8}
TINY = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2}
TINY |= {"kv_channels": 16, "vocab_size": 512, "max_position_embeddings": 2048}


@dataclass(frozen=True)
class Configuration:
    """A recipe.

    Attributes:
        shape: of its model, of those above; None: the model of the command line, with an engine.
        num_tokens: of a micro-batch.
        overrides: what else differs.
    """

    shape: str | None
    num_tokens: int
    overrides: tuple[str, ...] = ()


LOCAL_FP32 = ("+parallel.megatron.transformer_impl=local", "+parallel.megatron.grad_reduce_in_fp32=true")
CONFIGURATIONS = {
    "135m": Configuration("135m", 16384),
    "1b": Configuration("1b", 8192),
    "1b-layers-again": Configuration("1b", 32768, FULL),
    "352m-mlp-again": Configuration("352m", 32768, MLP_AGAIN),
    "135m-local-fp32-gradients": Configuration("135m", 32768, LOCAL_FP32),
    "352m-host-optimizer": Configuration("352m", 8192, ("parallel.optimizer_cpu_offload=true",)),
    "engine": Configuration(None, 16384),
    "second-engine": Configuration(
        None,
        8192,
        tuple(
            f"++{colocated.GROUP}.sglang.{word}"
            for word in ("mem_fraction_static=0.5", "cuda_graph_max_bs_decode=64", "chunked_prefill_size=4096")
        ),
    ),
}
WITHOUT_MICRO_BATCH = ("init", "rollout", "update")
"""Phases of a trainer alone that are fitted to what was needed."""
FULL_WHATEVER_THE_DATA = ("init", "rollout", "weight_sync")
"""Phases of shared GPUs that are compared and fitted: in the others the data decide, by how full micro-batches are and
in how many sizes they come."""


# ---- a trainer alone, in a process of its own


def write_config(shape: str, directory: Path) -> None:
    """What a Plan reads of a model."""
    config = {
        **SHAPES[shape],
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": KEY_HEADS[shape],
        "head_dim": 64,
        "vocab_size": VOCABULARIES[shape],
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))


def resolve_plan(configuration: Configuration, directory: Path) -> Any:
    """The Plan, written into the directory."""
    from rlrecipes.config.compose import compose
    from rlrecipes.runner.resolution import resolve_recipe

    write_config(configuration.shape or "", directory / "model")
    overrides = [f"recipe={colocated.RECIPE}", f"model.path={directory / 'model'}", "model.shapes=null"]
    overrides += [f"parallel.max_tokens_per_micro_batch={configuration.num_tokens}", *configuration.overrides]
    plan = resolve_recipe(compose(overrides))
    (directory / "plan.yaml").write_text(plan.to_yaml())
    return plan


class Meter:
    """Peaks of this process's GPU, phase by phase; on a CPU its resident memory, to try the rest.

    Args:
        directory: lines go to phases.jsonl there, each at once.
        gpu: the driver's number; None for a CPU.
        idle_mib: what the GPU had before.
    """

    def __init__(self, directory: Path, gpu: int | None, idle_mib: float) -> None:
        self._file = (directory / PHASES).open("a", buffering=1)
        self._gpu, self._idle_mib = gpu, idle_mib

    def begin(self) -> None:
        """Give back what nothing uses and cuBLAS makes again, and forget earlier peaks."""
        import torch

        gc.collect()
        if self._gpu is not None:
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()  # each keeps the whole block that it was taken from
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def end(self, phase: str) -> None:
        """Tell of what was there at most since :meth:`begin`."""
        import torch

        if self._gpu is None:
            beside, allocated, reserved = resource.getrusage(0).ru_maxrss * 1024, 0, 0
        else:
            torch.cuda.synchronize()
            used = round((read_used_mib(self._gpu) - self._idle_mib) * MIB)
            beside = used - torch.cuda.memory_reserved()
            allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        line = {"phase": phase, "beside": beside, "allocated": allocated, "reserved": reserved}
        self._file.write(json.dumps(line) + "\n")


def measure_trainer(name: str, directory: Path, gpu: int | None, idle_mib: float) -> None:
    """Take the Plan's trainer through its phases."""
    configuration = CONFIGURATIONS[name]
    plan = resolve_plan(configuration, directory)
    trainer, model, num_tokens = plan.trainer, plan.model, configuration.num_tokens
    if gpu is None:
        trainer, model, num_tokens = to_cpu(trainer), build_tiny_model(), 2 * SAMPLE_TOKENS
    import torch

    meter = Meter(directory, gpu, idle_mib)
    if gpu is not None:
        torch.zeros(1, device="cuda")
    meter.end("context")
    meter.begin()
    rank = start_rank(trainer, model)
    draw_weights(rank)
    meter.end("init")
    lengths = [SAMPLE_TOKENS] * (num_tokens // SAMPLE_TOKENS)
    batches, _ = build_micro_batches(NUM_MICRO_BATCHES, lengths, model.shapes.vocab_size, 1 / SAMPLE_TOKENS)
    objective = build_objective()
    rank.train_step(batches[:1], objective)  # makes Adam's moments, and whatever kernels make when they first run
    for _ in range(2):
        meter.begin()
        rank.offload_state()
        rank.offload_weights()
        meter.begin()
        meter.end("rollout")
        rank.reload()
        meter.begin()
        meter.end("(state)")
        meter.begin()
        rank.compute_logprobs(batches, which="policy")
        meter.end("logprobs")
        split_train_step(rank, meter, batches, objective)
    rank.close()


def split_train_step(rank: Any, meter: Meter, batches: list[Any], objective: Any) -> None:
    """A train step, of which the optimizer's part is told alone."""
    optimizer = rank._policy.optimizer
    original = optimizer.step

    def update() -> Any:
        meter.end("train")
        meter.begin()
        found = original()
        meter.end("update")
        return found

    optimizer.step = update
    try:
        meter.begin()
        rank.train_step(batches, objective)
    finally:
        optimizer.step = original


def to_cpu(trainer: Any) -> Any:
    devices = tuple(device.model_copy(update={"gpu": None}) for device in trainer.devices)
    changes = {"device": "cpu", "devices": devices, "optimizer_cpu_offload": False, "num_threads": 1}
    return trainer.model_copy(update={**changes, "megatron": {}})


def build_tiny_model() -> Any:
    return build_model_node("tiny", "llama", "float32", rotary_base=1e4, norm_epsilon=1e-5, **TINY)


def run_child(arguments: argparse.Namespace) -> int:
    try:
        gpu = None if arguments.device == "cpu" else arguments.gpu
        measure_trainer(arguments.child, arguments.directory, gpu, arguments.idle_mib)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


# ---- around them


def run_trainer(name: str, directory: Path, arguments: argparse.Namespace, timeout_s: float) -> str | None:
    """Why it came to nothing, if it did."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / PHASES).unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--child", name, "--directory", str(directory)]
    command += ["--device", arguments.device, "--gpu", str(arguments.gpu), "--idle-mib", str(arguments.idle_mib)]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": str(arguments.gpu)}
    log = directory / "output.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                end(process)
    if code == 0:
        return None
    print("\n".join(log.read_text(errors="replace").splitlines()[-20:]))
    return f"not done after {timeout_s:.0f} s" if code is None else f"exit code {code}"


def run_engine(name: str, directory: Path, arguments: argparse.Namespace, timeout_s: float) -> str | None:
    """Why it came to nothing, if it did."""
    configuration = CONFIGURATIONS[name]
    run_dir = directory / "run"
    is_second = name == "second-engine" and arguments.second_model is not None
    asked = argparse.Namespace(
        float32=False,
        model=arguments.second_model if is_second else arguments.model,
        steps=2,
        timeout=timeout_s,
        overrides=[
            f"parallel.max_tokens_per_micro_batch={configuration.num_tokens}",
            "schedule.should_eval_before=false",
            "schedule.save_interval=1000",
            "optim.num_warmup_train_steps=0",
            *configuration.overrides,
        ],
    )
    run = watch(
        [NO_COMPARISON, "train", *colocated.build_overrides(asked, run_dir)], directory, timeout_s, (arguments.gpu,)
    )
    if run.code == 0:
        return None
    print(run.describe())
    print_failure(run.output, run_dir)
    return f"exit code {run.code}"


def read_trainer(directory: Path) -> list[dict[str, Any]]:
    """Of each phase the fullest time it ran: what was measured and needed, in bytes; and ``context``."""
    found: dict[str, dict[str, Any]] = {}
    for line in read_lines(directory / PHASES):
        measured, needed = line["beside"] + line["reserved"], line["beside"] + line["allocated"]
        one = {"phase": line["phase"], "owner": "trainer", "measured": measured, "needed": needed}
        if measured >= found.get(line["phase"], one)["measured"]:
            found[line["phase"]] = one
    return list(found.values())


def read_engine(directory: Path) -> list[dict[str, Any]]:
    """What the GPU held in each phase of a watched run, in bytes; only its driver's count is known."""
    samples = [(line["at_s"], max(line["used_mib"])) for line in read_lines(directory / MEMORY) if "at_s" in line]
    idle_mib = min((mib for _, mib in samples), default=0.0)  # before anything had started
    samples = [(at_s, mib - idle_mib) for at_s, mib in samples]
    spans: dict[str, list[tuple[float, float]]] = {}
    for line in read_lines(directory / PHASES):
        if "ended_s" in line:
            spans.setdefault(line["phase"], []).append((line["started_s"], line["ended_s"]))
    found = []

    def add(phase: str, owner: str, mib: float) -> None:
        if mib > 0:
            found.append({"phase": phase, "owner": owner, "measured": mib * MIB, "needed": None})

    def at_end(name: str) -> float:
        return find_last(samples, spans[name][0][1]) if name in spans else 0.0

    def just_before(name: str) -> float:
        return find_last(samples, spans[name][-1][0]) if name in spans else 0.0

    def just_after(name: str) -> float:
        stop_s = spans[name][0][1] if name in spans else 0.0
        return min((mib for at, mib in samples if stop_s < at < stop_s + SETTLED_S), default=0.0)

    def at_most(name: str) -> float:
        inside = [mib for at, mib in samples for start, stop in spans.get(name, ()) if start <= at <= stop]
        return max(inside, default=0.0)

    add("rollout", "engine", at_end("engine starts"))
    add("init", "engine", just_after("engine releases"))
    add("init", "both", at_end("trainer starts"))
    add("rollout", "both", at_most("rollout"))
    add("(state)", "both", just_before("train"))
    add("train", "both", at_most("train"))
    add("weight_sync", "both", at_most("weights travel"))
    return found


def print_capacity(run_dir: Path, inputs: Any, constants: Any) -> None:
    """Tokens of the KV cache, as predicted and as SGLang says."""
    from rlrecipes.plan.memory import compute_memory

    logs = "\n".join(path.read_text(errors="replace") for path in sorted((run_dir / "logs").glob("*.log")))
    said = re.findall(r"max_total_num_tokens=(\d+)", logs)
    if said:
        predicted, found = compute_memory(inputs, constants).engines[0].capacity_tokens, int(said[0])
        print(f"KV cache: {predicted:,} tokens predicted, {found:,} in SGLang's log, ratio {predicted / found:.3f}")


def report(name: str, directory: Path) -> tuple[Any, Any] | None:
    """Print one configuration's table and write what constants are fitted to; return what was measured, and the latter.

    None where nothing was measured.
    """
    from rlrecipes.plan.memory import load_memory_constants
    from rlrecipes.plan.memory_fitting import MemoryMeasurement, MemoryObservation, predict_memory
    from rlrecipes.plan.nodes import load_plan
    from rlrecipes.plan.step_inputs import read_step_inputs

    is_alone = CONFIGURATIONS[name].shape is not None
    home = directory if is_alone else directory / "run"
    if not (home / "plan.yaml").is_file():
        return None
    inputs, constants = read_step_inputs(load_plan(home / "plan.yaml")), load_memory_constants(None)
    assert inputs is not None
    rows = read_trainer(directory) if is_alone else read_engine(directory)
    print(f"\n{name}: {inputs.parallel.max_tokens_per_micro_batch} tokens, {' '.join(CONFIGURATIONS[name].overrides)}")
    print("| phase | of | predicted GB | measured GB | off by GB | ratio | needed GB | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    observed, fitting = [], []
    for row in rows:
        phase = "update" if row["phase"] == "(state)" else row["phase"]
        observation = MemoryObservation(phase, row["owner"], row["measured"])
        predicted = predict_memory(inputs, constants, [observation])[0]
        if row["phase"] == "(state)":  # what is held between all others
            predicted -= count_part(inputs, constants, "update", "trainer.gradient_copies")
        elif row["owner"] != "both" or phase in FULL_WHATEVER_THE_DATA:
            observed.append(observation)
            is_needed = row["needed"] and phase in WITHOUT_MICRO_BATCH
            fitting.append(replace(observation, num_bytes=row["needed"]) if is_needed else observation)
        needed = row["needed"]
        beside = f"{needed / 1e9:.2f} | {predicted / needed:.3f}" if needed else " | "
        off = f"{(predicted - row['measured']) / 1e9:+.2f} | {predicted / row['measured']:.3f}"
        measured = f"{row['measured'] / 1e9:.2f}"
        print(f"| {row['phase']} | {row['owner']} | {predicted / 1e9:.2f} | {measured} | {off} | {beside} |")
    if not is_alone:
        print_capacity(home, inputs, constants)
    sys.stdout.flush()
    lines = [{"phase": one.phase, "owner": one.owner, "num_bytes": one.num_bytes} for one in fitting]
    (home / "memory.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if not observed:
        return None
    return MemoryMeasurement(name, inputs, tuple(observed)), MemoryMeasurement(name, inputs, tuple(fitting))


def count_part(inputs: Any, constants: Any, phase: str, part: str) -> int:
    from rlrecipes.plan.memory import compute_memory

    return next((role.parts[phase].get(part, 0) for role in compute_memory(inputs, constants).roles), 0)


def print_fit(measurements: Sequence[Any], fitting: Sequence[Any]) -> None:
    """Constants fitted to all, and the errors as shipped, fitted to all, and of each fitted to all others."""
    from rlrecipes.plan.memory import load_memory_constants
    from rlrecipes.plan.memory_fitting import fit_memory, predict_memory

    constants = load_memory_constants(None)
    whole = fit_memory(fitting, constants)
    print("\n| constant | shipped | fitted to all | fitted to all but one, lowest and highest |\n|---|---|---|---|")
    others = [fit_memory([*fitting[:number], *fitting[number + 1 :]], constants) for number in range(len(fitting))]
    for name in whole.fitted:
        values = [getattr(fit.constants, name) for fit in others if name in fit.fitted]
        spread = f"{min(values):.4g} to {max(values):.4g}" if values else "by none"
        print(f"| {name} | {getattr(constants, name):.4g} | {getattr(whole.constants, name):.4g} | {spread} |")
    print("\n| configuration | phase | of | measured GB | shipped | fitted to all | fitted to the others |")
    print("|---|---|---|---|---|---|---|")
    errors: dict[str, list[float]] = {"shipped": [], "fitted to all": [], "fitted to the others": []}
    for one, other in zip(measurements, others, strict=True):
        tried = [predict_memory(one.inputs, c, one.observed) for c in (constants, whole.constants, other.constants)]
        for seen, *predictions in zip(one.observed, *tried, strict=True):
            off = [value / seen.num_bytes - 1 for value in predictions]
            for found, value in zip(errors.values(), off, strict=True):
                found.append(abs(value))
            told = " | ".join(f"{value:+.1%}" for value in off)
            print(f"| {one.name} | {seen.phase} | {seen.owner} | {seen.num_bytes / 1e9:.2f} | {told} |")
    print("\n| error | median | highest | within 5% |\n|---|---|---|---|")
    for name, found in errors.items():
        within = sum(value <= 0.05 for value in found)
        print(f"| {name} | {statistics.median(found):.1%} | {max(found):.1%} | {within} of {len(found)} |")


def wait_until_idle(arguments: argparse.Namespace) -> None:
    """What ended may take a moment to leave the GPU."""
    for _ in range(40):
        if arguments.device == "cpu" or read_used_mib(arguments.gpu) <= arguments.idle_mib + 64:
            return
        time.sleep(0.25)
    print(f"note: {read_used_mib(arguments.gpu):.0f} MiB are in use still, {arguments.idle_mib:.0f} were at first")


def iter_runs(arguments: argparse.Namespace, begin_s: float) -> Iterator[tuple[str, Path, bool]]:
    """Run one after another while there is time; name, directory, and whether it came to its end."""
    longest_s = {True: 30.0, False: 100.0}
    for name in arguments.only:
        is_alone = CONFIGURATIONS[name].shape is not None
        limit_s = arguments.timeout_s if is_alone else arguments.engine_timeout_s
        left_s = arguments.budget_s - (time.monotonic() - begin_s) - 15
        if left_s < longest_s[is_alone]:
            print(f"\n{name}: not started, no time was left", flush=True)
            continue
        wait_until_idle(arguments)
        start_s, directory = time.monotonic(), arguments.directory / name
        run = run_trainer if is_alone else run_engine
        failure = run(name, directory, arguments, min(limit_s, left_s))
        print(f"\n{name}: {failure or 'done'}, {time.monotonic() - start_s:.0f} s", flush=True)
        yield name, directory, failure is None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, default=[*CONFIGURATIONS], metavar="NAME")
    parser.add_argument("--model", default=os.environ.get("MODEL"), help="HF directory of engines; MODEL stands for it")
    parser.add_argument("--second-model", help="HF directory of the second engine; --model by default")
    parser.add_argument("--gpu", type=int, default=0, help="the driver's number")
    parser.add_argument("--budget-s", type=float, default=560)
    parser.add_argument("--timeout-s", type=float, default=90, help="longest time of a trainer alone")
    parser.add_argument("--engine-timeout-s", type=float, default=240, help="longest time of a run with an engine")
    parser.add_argument("--directory", type=Path, help="for everything written; a temporary one by default")
    parser.add_argument("--read", action="store_true", help="run nothing: the tables of what --directory has")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: trainers alone")
    parser.add_argument("--child", choices=CONFIGURATIONS, help=argparse.SUPPRESS)
    parser.add_argument("--idle-mib", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read and arguments.directory is None:
        parser.error("--read needs --directory")
    engines = [name for name in arguments.only if CONFIGURATIONS[name].shape is None]
    if arguments.read:
        arguments.only = [name for name in arguments.only if (arguments.directory / name / PHASES).is_file()]
    elif engines and arguments.device == "cpu":
        arguments.only = [name for name in arguments.only if name not in engines]
    elif engines and not arguments.child and not (Path(arguments.model or "") / "config.json").is_file():
        parser.error("--model or MODEL must name an HF directory")
    arguments.directory = (arguments.directory or Path(tempfile.mkdtemp(prefix="memory-"))).absolute()
    return arguments


def main() -> int:
    arguments, begin_s = parse_arguments(), time.monotonic()
    if arguments.child:
        return run_child(arguments)
    if arguments.device == "cuda" and not arguments.read:
        try:
            arguments.idle_mib = read_used_mib(arguments.gpu)
        except NVMLError as error:
            print(f"no GPU {arguments.gpu} is known: {error}")
            return 1
    sys.path.insert(0, str(ROOT))
    if arguments.read:
        runs = iter([(name, arguments.directory / name, True) for name in arguments.only])
    else:
        idle = f"GPU {arguments.gpu}: {arguments.idle_mib:.0f} MiB in use before"
        print(f"{idle}; all is in {arguments.directory}", flush=True)
        runs = iter_runs(arguments, begin_s)
    measurements, num_whole = [], 0
    for name, directory, is_whole in runs:
        num_whole += is_whole
        try:
            if (found := report(name, directory)) is not None:
                measurements.append(found)
        except Exception:  # the next may do better
            traceback.print_exc(file=sys.stdout)
    if len(measurements) > 1:
        print_fit(*zip(*measurements, strict=True))
    if not arguments.read:
        print(f"\n{num_whole} of {len(arguments.only)} came to their end, {time.monotonic() - begin_s:.0f} s")
    return 0 if num_whole == len(arguments.only) else 1


if __name__ == "__main__":
    sys.exit(main())
