"""Two GPUs: engines apart from the trainer, prefill apart from decode, and an engine of two ranks.

Runs ``rlrecipes train recipe=smollm2_135m_reasoning`` for two steps, watched (watched_run.py), once a variant:

    disaggregated   trainer on GPU 0, engine on GPU 1; weights by NCCL
    pd              trainer with DP 2, prefill on GPU 0, decode on GPU 1, KV caches over NIXL; weights as handles
    tp2             trainer with DP 2 and one engine with TP 2, in turns on both GPUs; weights as handles

Needs SGLang, megatron-core and (pd) NIXL, no network::

    python benchmarks/gpu/two_gpus.py --model DIR --split-model DIR [--variants NAME ...] [--budget-s 540] [--at-once]

SmolLM2 has 9 heads, which two ranks cannot share: --split-model names a llama that tp2 can split. One train step
moves every weight by about 1e-4, so that the second rollout, held against the trainer token by token, tells old weights
from new.

Environment: MODEL stands for --model, SPLIT_MODEL for --split-model. ROLLOUT_PATH becomes the PYTHONPATH of engines,
where they must not see the trainer's packages; PD_PATH that of prefill and decode, with NIXL. Whatever happens, all
that was measured is printed, with the ends of the logs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import colocated
from watched_run import WatchedRun, print_failure, print_report, read_used_mib, watch

GPUS = (0, 1)
RECIPE = "smollm2_135m_reasoning"
GROUPS = "topology.served_models.policy.server_groups"
END_S = 35.0
"""What a run past its limit may take to end."""
LEAST_S = 120.0
"""What is kept for each variant that is still to come."""
FREE_S = 10.0
"""How long the driver may take to count what ended processes held."""
SHORT = (
    "cluster=h200_2",
    "tracking=local",
    "data.eval_path=null",
    "data.tasks.num_train_rows=256",
    "schedule.num_steps=2",
    "schedule.save_interval=2",
    "schedule.eval_interval=0",
    "schedule.should_eval_before=false",
    "schedule.should_export_hf=false",
    "algo.group_size=8",
    "rollout.sampling.max_new_tokens=128",
    "rollout.sampling.stop=[]",
    "algo.entropy_coef=0.01",  # a gradient even where all rewards are the same
    "optim.lr=1e-4",
    "optim.num_warmup_train_steps=0",
)
SGLANG = colocated.SGLANG | {
    "max_total_tokens": 400000,  # twice a step's tokens: what others hold on a GPU does not matter then
}
SPLIT = {
    "disable_custom_all_reduce": "true",  # both need NVLink multicast, which not every host has
    "enforce_disable_flashinfer_allreduce_fusion": "true",
}
TRANSPORTS = {"distributed": "NCCL", "tensor": "handles of GPU memory"}


@dataclass(frozen=True)
class Variant:
    """One arrangement.

    Attributes:
        overrides: of the recipe.
        groups: of engines.
        path: variable that holds the engines' PYTHONPATH.
        sglang: options beside the shared ones.
        is_split: whether it takes the model that two ranks can share.
    """

    overrides: tuple[str, ...]
    groups: tuple[str, ...] = ("main",)
    path: str = "ROLLOUT_PATH"
    sglang: tuple[tuple[str, Any], ...] = ()
    is_split: bool = False


VARIANTS = {
    "disaggregated": Variant(("topology=disaggregated",)),
    "pd": Variant(("topology=pd_colocated", "parallel=dp2"), ("prefill", "decode"), "PD_PATH"),
    "tp2": Variant(
        (
            "topology=colocated",
            "parallel=dp2",
            f"{GROUPS}.main.gpus_per_engine=2",
            "model=hf",
            "model.name=split",
            "model.family=llama",
            "model.dtype=bfloat16",
        ),
        sglang=tuple(SPLIT.items()),
        is_split=True,
    ),
}


def build_overrides(variant: Variant, model: str, run_dir: Path) -> list[str]:
    """What differs from the recipe; the model's shapes are read from its directory."""
    found = [f"recipe={RECIPE}", *SHORT, *variant.overrides, f"model.path={model}", "model.shapes=null"]
    found += [f"run_dir={run_dir}"]
    for group in variant.groups:
        found += [
            f"++{GROUPS}.{group}.sglang.{name}={value}" for name, value in (SGLANG | dict(variant.sglang)).items()
        ]
        found += [f"{GROUPS}.{group}.start_timeout_s=300"]
        if path := os.environ.get(variant.path):
            found.append(f"+{GROUPS}.{group}.env.PYTHONPATH={path}")
    return found


def run_variant(
    name: str, model: str, directory: Path, timeout_s: float, overrides: tuple[str, ...] = ()
) -> WatchedRun:
    """Train two steps of it.

    Args:
        name: of the variant.
        model: HF directory.
        directory: for everything written.
        timeout_s: of the whole run.
        overrides: further ones.
    """
    words = ["train", *build_overrides(VARIANTS[name], model, directory / "run"), *overrides]
    print(f"{name}: rlrecipes {' '.join(words)}", flush=True)
    return watch(words, directory, timeout_s, GPUS)


def print_variant(name: str, run: WatchedRun) -> dict[str, Any]:
    """Everything that was measured of one, however far it came."""
    print(f"\n## {name}\n\n{run.describe()}")
    report: dict[str, Any] = {"code": run.code, "time_s": run.time_s, "gpus": {}, "transport": None}
    try:
        report |= describe_plan(run.directory / "run" / "plan.yaml")
        print("\n".join(f"GPU {gpu}: {', '.join(names)}" for gpu, names in report["gpus"].items()))
        report |= print_report(run.directory, run.directory / "run")
    except Exception as error:  # of this report alone: the other variants' are still to come
        print(f"the report ended early: {type(error).__name__}: {error}")
    if run.code != 0:
        print_failure(run.output, run.directory / "run")
    sys.stdout.flush()
    return report


def describe_plan(path: Path) -> dict[str, Any]:
    """Which process has which GPU, and how weights travel; from the Plan that ran."""
    from rlrecipes.plan.nodes import load_plan

    plan = load_plan(path)
    gpus: dict[str, list[str]] = {}
    owners = [(f"trainer rank {rank}", (device,)) for rank, device in enumerate(plan.trainer.devices)]
    owners += [(engine.name, engine.devices) for model in plan.served_models for engine in model.engines]
    for owner, devices in owners:
        for device in devices:
            gpus.setdefault(str(device.gpu), []).append(owner)
    return {"gpus": gpus, "transport": TRANSPORTS[plan.weight_sync.transport]}


def iter_summary(reports: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A Markdown table, a row a variant."""
    names = ("variant", "GPU 0", "GPU 1", "exit code", "weights by", "s a sync", "MB", "checksums")
    yield f"| {' | '.join(names)} | mean abs(logprob trainer - engine), each step |"
    yield "|---" * (len(names) + 1) + "|"
    for name, report in reports.items():
        steps = [step for step in report.get("steps", ()) if "weight_sync/time_s" in step]
        seconds = ", ".join(f"{step['weight_sync/time_s']:.2f}" for step in steps)
        sizes = ", ".join(dict.fromkeys(f"{step['weight_sync/num_bytes'] / 1e6:.0f}" for step in steps))
        verified = [bool(step["weight_sync/is_verified"]) for step in steps]
        checked = "all equal" if verified and all(verified) else "not compared" if verified else ""
        means = ", ".join(f"{line['mean']:.4f}" for line in report.get("differences", ()))
        places = " | ".join(", ".join(report["gpus"].get(str(gpu), ())) for gpu in GPUS)
        code = "stopped" if report["code"] is None else report["code"]
        cells = (name, places, code, report["transport"] or "", seconds, sizes, checked, means)
        yield f"| {' | '.join(map(str, cells))} |"


def wait_until_free(before: dict[int, float]) -> dict[int, float]:
    """MiB on each GPU once no more than before is held, or after FREE_S."""
    deadline = time.monotonic() + FREE_S
    while True:
        now = {gpu: read_used_mib(gpu) for gpu in before}
        if time.monotonic() > deadline or all(now[gpu] <= before[gpu] + 1 for gpu in before):
            return now
        time.sleep(0.2)


def run_all(arguments: argparse.Namespace, directory: Path) -> dict[str, dict[str, Any]]:
    """Variants one after another, each with its share of the time that is left, or all at once; told as they end."""
    begin_s = time.monotonic()
    before = {gpu: read_used_mib(gpu) for gpu in GPUS}
    reports: dict[str, dict[str, Any]] = {}
    num_workers = len(arguments.variants) if arguments.at_once else 1

    def run(number: int, name: str) -> WatchedRun:
        left_s = begin_s + arguments.budget_s - time.monotonic() - END_S
        if not arguments.at_once:
            left_s -= LEAST_S * (len(arguments.variants) - 1 - number)
        model = arguments.split_model if VARIANTS[name].is_split else arguments.model
        return run_variant(name, str(model), directory / name, max(1.0, left_s))

    with ThreadPoolExecutor(num_workers) as pool:
        names: dict[Future[WatchedRun], str] = {}
        for number, name in enumerate(arguments.variants):
            names[pool.submit(run, number, name)] = name
        for future in as_completed(names):
            name = names[future]
            try:
                reports[name] = print_variant(name, future.result())
            except Exception as error:  # one that did not even start
                print(f"\n## {name}\n\n{type(error).__name__}: {error}", flush=True)
                reports[name] = {"code": None, "gpus": {}, "transport": None}
            (directory / "results.json").write_text(json.dumps(reports, indent=1))
    after = wait_until_free(before)
    print("\n" + ", ".join(f"GPU {gpu}: {before[gpu]:,.0f} MiB before, {after[gpu]:,.0f} after" for gpu in GPUS))
    return reports


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("MODEL"), help="HF directory; MODEL of the environment")
    parser.add_argument("--split-model", default=os.environ.get("SPLIT_MODEL"), help="for tp2; SPLIT_MODEL")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds of everything")
    parser.add_argument("--at-once", action="store_true", help="side by side on the same two GPUs: sooner, slower each")
    parser.add_argument("--directory", type=Path, help="for everything written; a temporary one by default")
    arguments = parser.parse_args()
    for name in arguments.variants:
        model = arguments.split_model if VARIANTS[name].is_split else arguments.model
        if not model or not (Path(model) / "config.json").is_file():
            parser.error(f"{name} needs an HF directory: {'--split-model' if VARIANTS[name].is_split else '--model'}")
    # Ranks of an engine would refuse GPUs of which others hold memory.
    os.environ.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "false")
    directory = (arguments.directory or Path(tempfile.mkdtemp(prefix="two-gpus-"))).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    reports = run_all(arguments, directory)
    print("", *iter_summary(reports), sep="\n")
    return int(any(report["code"] != 0 for report in reports.values()))


if __name__ == "__main__":
    sys.exit(main())
