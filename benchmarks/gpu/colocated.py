"""Engine and trainer on one GPU, taking turns: seconds and memory of each phase, the weight sync, and how far the
trainer's log probabilities lie from the engine's.

Runs ``rlrecipes train recipe=smollm2_135m_reasoning`` for a few steps, watched (watched_run.py). Needs a GPU, SGLang
and megatron-core, no network::

    python benchmarks/gpu/colocated.py --model DIR [--steps 5] [--timeout 420] [--json FILE] [--float32] [overrides ...]

With ``--float32`` both sides compute in float32, no product in TF32, so that their log probabilities show what is not
rounding.

Environment: MODEL stands for --model. ROLLOUT_PATH becomes the PYTHONPATH of engines, where they must not see the
trainer's packages. Whatever happens, what was measured is printed, with the ends of the logs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from watched_run import print_failure, print_report, watch

RECIPE = "smollm2_135m_reasoning"
GROUP = "topology.served_models.policy.server_groups.main"
SGLANG = {
    "attention_backend": "fa3",
    "sampling_backend": "pytorch",
    "cuda_graph_backend_prefill": "disabled",  # capturing its graphs takes longer than all steps here
    "cuda_graph_max_bs_decode": 256,
    "skip_server_warmup": "true",
    "mem_fraction_static": 0.8,
}
FLOAT32 = [
    "model.dtype=float32",
    f"{GROUP}.sglang.attention_backend=triton",  # fa3 has no float32
    "parallel.max_tokens_per_micro_batch=8192",
]
FLOAT32_ENV = {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}
"""For cuBLAS and for Triton, whose products of float32 are TF32 otherwise."""
FLOAT32_ENGINE = Path(__file__).resolve().parent / "float32_engine"
SMALL = [
    "data.tasks.num_train_rows=1024",
    "data.tasks.num_eval_rows=64",
    "rollout.evaluation.num_prompts=64",
    "schedule.should_eval_before=true",
    "schedule.should_export_hf=false",
    "schedule.eval_interval=0",
    "optim.num_warmup_train_steps=0",
    "tracking=local",
    "model.shapes=null",  # read from the directory: a converted model may have rounded a number
]


def build_overrides(arguments: argparse.Namespace, run_dir: Path) -> list[str]:
    """What differs from the recipe, the caller's words last."""
    found = [f"recipe={RECIPE}", f"model.path={arguments.model}", f"run_dir={run_dir}", *SMALL]
    found += [f"schedule.num_steps={arguments.steps}", f"schedule.save_interval={max(1, arguments.steps // 2)}"]
    found += [f"{GROUP}.start_timeout_s={arguments.timeout}"]
    found += build_engine_overrides()
    return [*found, *(FLOAT32 if arguments.float32 else ()), *arguments.overrides]


def build_engine_overrides() -> list[str]:
    """Flags of the engine, and its PYTHONPATH where ROLLOUT_PATH names one."""
    found = [f"+{GROUP}.sglang.{name}={value}" for name, value in SGLANG.items()]
    if path := os.environ.get("ROLLOUT_PATH"):
        found.append(f"+{GROUP}.env.PYTHONPATH={path}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("MODEL"), help="HF directory; MODEL of the environment")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=420.0, help="seconds of the whole run")
    parser.add_argument("--directory", type=Path, help="for everything written; a temporary one by default")
    parser.add_argument("--float32", action="store_true", help="on both sides")
    parser.add_argument("--json", type=Path, help="a file for all that is printed, as data")
    parser.add_argument("overrides", nargs="*", help="further ones of the recipe")
    arguments = parser.parse_args()
    if not arguments.model or not (Path(arguments.model) / "config.json").is_file():
        parser.error("--model or MODEL must name an HF directory")
    directory = (arguments.directory or Path(tempfile.mkdtemp(prefix="colocated-"))).absolute()
    run_dir = directory / "run"
    if arguments.float32:
        paths = [str(FLOAT32_ENGINE), *filter(None, [os.environ.get("ROLLOUT_PATH")])]
        os.environ.update(FLOAT32_ENV, ROLLOUT_PATH=os.pathsep.join(paths))
    words = ["train", *build_overrides(arguments, run_dir)]
    print("rlrecipes " + " ".join(words), flush=True)
    run = watch(words, directory, arguments.timeout)
    print(run.describe())
    report = print_report(directory, run_dir)
    if arguments.json:
        arguments.json.write_text(json.dumps({"code": run.code, "words": words, **report}, indent=1))
    if run.code != 0:
        print_failure(run.output, run_dir)
    return 1 if run.code is None else run.code


if __name__ == "__main__":
    sys.exit(main())
