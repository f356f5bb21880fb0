"""A GRPO step of ours against TRL's, and against bare SGLang with bare Megatron-Core: seconds by phase, from one call
on one GPU.

All sides take SmolLM2-135M-Instruct in bfloat16, the same prompts in one order, 64 of them x 16 rollouts x exactly 128
new tokens a step, one reward, and one optimizer step. All prompts have one length: TRL pads, and so has nothing to pad.
They run one after the other, each in processes of its own:

* ours: ``rlrecipes train recipe=smollm2_135m_reasoning``, watched (watched_run.py), with the recipe's checksums;
* the floor: bare_grpo.py, the same engine options without router or framework;
* TRL: trl_on_gpu.py, by transformers' generate.

Steps after the first count. Needs a GPU, SGLang, megatron-core, Transformer Engine and TRL, no network::

    python benchmarks/gpu/against_others.py --model DIR [--gpu 0] [--steps 5] [--budget-s 280]

Environment: MODEL stands for --model. ROLLOUT_PATH becomes the PYTHONPATH of engines, TRL_PATH that of TRL, where they
must not see the trainer's packages. Whatever happens, what was measured is printed, with the ends of the logs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from watched_run import LOG_LINES, NO_COMPARISON, PHASES, end, print_failure, read_lines, watch

if TYPE_CHECKING:
    from rlrecipes.types import Rollout

HERE = Path(__file__).resolve().parent
NUM_PROMPTS, GROUP_SIZE, NUM_NEW_TOKENS = 64, 16, 128
MAX_TOKENS = 49152
"""Of a packed micro-batch: 256 rollouts, as TRL's. With fewer the CPU's launches are what a step of all sides takes."""
LR = 5e-6
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
RECIPE = "smollm2_135m_reasoning"
GROUP = "topology.served_models.policy.server_groups.main"
SGLANG = {
    "attention_backend": "fa3",
    "sampling_backend": "pytorch",
    "cuda_graph_backend_prefill": "disabled",  # capturing its graphs takes longer than all steps here
    "cuda_graph_bs_decode": [1, 64, 256, 512, 768, 1024],  # all rollouts of a step are decoded at once
    "skip_server_warmup": True,
    "mem_fraction_static": 0.8,
}
ENGINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    "SGLANG_TIMEOUT_KEEP_ALIVE": "120",  # its 5 s end connections that a client is about to use again
}
"""What ours gives its engines too."""
HAND_OVER = ("turn to the trainer", "state off, engine weights on", "trainer weights off, cache on")
"""Phases of ours in which memory changes hands."""
SETTLING_S = 8.0
"""What a side has left for its end when its last step has ended."""
LEAST_S = 40.0
"""A side that has less is not begun."""
ROWS = ("rollout", "reward", "logprobs", "train", "weights", "memory", "other", "total")
MEANINGS = {"weights": "weights to the engine", "memory": "memory changes hands"}


def score(response: str) -> float:
    """The share of one letter: rollouts of a group nearly always differ, so that all of them are trained."""
    return response.count("e") / max(1, len(response))


def verify(rollout: Rollout) -> float:
    return score(rollout.text)


def read_prompts(path: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]


def write_prompts(path: Path, num_steps: int) -> None:
    """Sums of three numbers of two digits, a token each, in the model's chat form: 64 tokens."""
    rng = random.Random(0)
    lines = []
    for _ in range(num_steps * NUM_PROMPTS):
        terms = " + ".join(str(rng.randint(10, 99)) for _ in range(3))
        question = f'State the answer to the following sum: {terms} =\n\nEnd with a line that holds "Answer:" and it.'
        chat = (
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        )
        lines.append(json.dumps({"prompt": chat, "label": ""}))
    path.write_text("\n".join(lines) + "\n")


@dataclass(frozen=True)
class Step:
    """One step of one side.

    Attributes:
        seconds: by name of ROWS; what a side does not do, or not apart from another phase, is absent.
        num_samples: rollouts.
        mean_tokens: new ones of a rollout.
        reward: mean.
        name: of the way the side went.
    """

    seconds: dict[str, float]
    num_samples: int
    mean_tokens: float
    reward: float
    name: str


def build_step(phases: dict[str, float], total_s: float, **others: Any) -> Step:
    """What no phase has is ``other``."""
    return Step(phases | {"other": total_s - sum(phases.values()), "total": total_s}, **others)


# ---- the sides


def build_overrides(model: str, prompts: Path, run_dir: Path, num_steps: int) -> list[str]:
    """What differs from the recipe."""
    found = [f"recipe={RECIPE}", f"model.path={model}", "model.shapes=null", f"run_dir={run_dir}", "tracking=local"]
    found += [f"data.train_path={prompts}", "data.eval_path=null", "data.tasks=null"]
    found += ["data.apply_chat_template=false", "data.should_shuffle=false"]
    found += ["reward=reasoning_gym", "reward.name=against_others:verify"]
    found += [f"schedule.prompts_per_step={NUM_PROMPTS}", f"algo.group_size={GROUP_SIZE}", f"optim.lr={LR}"]
    found += [f"rollout.sampling.max_new_tokens={NUM_NEW_TOKENS}", "rollout.sampling.ignore_eos=true"]
    found += ["rollout.sampling.stop=[]", "rollout.max_concurrent_requests=1024"]
    found += [f"parallel.max_tokens_per_micro_batch={MAX_TOKENS}", f"schedule.num_steps={num_steps}"]
    found += [f"schedule.save_interval={num_steps}", "schedule.eval_interval=0", "schedule.should_eval_before=false"]
    found += ["schedule.should_export_hf=false", "optim.num_warmup_train_steps=0"]
    found += [f"+{GROUP}.sglang.{name}={json.dumps(value)}" for name, value in SGLANG.items()]
    if path := os.environ.get("ROLLOUT_PATH"):
        found.append(f"+{GROUP}.env.PYTHONPATH={path}")
    return found


def run_ours(model: str, prompts: Path, directory: Path, num_steps: int, gpu: int, timeout_s: float) -> list[Step]:
    """The recipe, watched."""
    words = ["train", *build_overrides(model, prompts, directory / "run", num_steps)]
    print("rlrecipes " + " ".join(words), flush=True)
    run = watch([NO_COMPARISON, *words], directory, timeout_s, [gpu])
    print(run.describe(), flush=True)
    steps = read_ours(directory)
    if run.code != 0:
        print_failure(run.output, directory / "run")
    return steps


def read_ours(directory: Path) -> list[Step]:
    """Steps from the run's metrics, divided by the phases that were noted; the reward is part of the rollout."""
    merged: dict[int, dict[str, float]] = {}
    for line in read_lines(directory / "run" / "metrics.jsonl"):
        merged.setdefault(line["step"], {}).update(line["metrics"])
    metrics = [merged[step] for step in sorted(merged) if "time/step_s" in merged[step]]
    lines = [line for line in read_lines(directory / PHASES) if "ended_s" in line]
    found = []
    rollouts = [line for line in lines if line["phase"] == "rollout"]
    for step, (rollout, metric) in enumerate(zip(rollouts, metrics, strict=False)):
        until = rollouts[step + 1]["started_s"] if step + 1 < len(rollouts) else float("inf")
        own = [line for line in lines if rollout["started_s"] <= line["started_s"] < until]
        until = next(line["ended_s"] for line in own if line["phase"] == "whole sync")  # a checkpoint may follow
        spent: dict[str, float] = {}
        for line in own:
            if line["ended_s"] <= until:
                spent[line["phase"]] = spent.get(line["phase"], 0.0) + line["ended_s"] - line["started_s"]
        in_sync = sum(spent.get(name, 0.0) for name in HAND_OVER[1:])
        phases = {name: spent.get(name, 0.0) for name in ("rollout", "logprobs", "train")}
        phases |= {"weights": spent["whole sync"] - in_sync, "memory": in_sync + spent.get(HAND_OVER[0], 0.0)}
        found.append(
            build_step(
                phases,
                metric["time/step_s"],
                num_samples=round(metric["rollout/num_rollouts"]),
                mean_tokens=metric["response/mean_tokens"],
                reward=metric["reward/mean"],
                name=RECIPE,
            )
        )
    return found


def run_script(script: str, words: list[str], output: Path, timeout_s: float, **env: str) -> list[Step]:
    """Another side, in a process group of its own that ends with it."""
    command = [sys.executable, str(HERE / script), *words, "--output", str(output)]
    command += ["--until", f"{time.time() + timeout_s - SETTLING_S:.0f}"]
    log = output.with_suffix(".log")
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=os.environ | env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # children that outlived it hold the GPU
    print(f"{script} ended with code {code} after {time.monotonic() - start:.0f} s (None: stopped); {log}", flush=True)
    steps = [build_step(line.pop("phases"), line.pop("total_s"), **pick(line)) for line in read_lines(output)]
    if code != 0:
        for path in sorted(log.parent.glob(f"{output.stem}*.log")):
            lines = path.read_text(errors="replace").splitlines()[-LOG_LINES:]
            print(f"\n==== {path.name}", *(line[:300] for line in lines), sep="\n", flush=True)
    return steps


def pick(line: dict[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in ("num_samples", "mean_tokens", "reward", "name")}


# ---- the report


def describe(side: str, steps: Sequence[Step]) -> str:
    counted = steps[1:]
    if not counted:
        return f"{side}: {len(steps)} steps, none counts"
    samples, lengths = {step.num_samples for step in counted}, {step.mean_tokens for step in counted}
    rewards = " ".join(f"{step.reward:.4f}" for step in steps)
    return (
        f"{side} ({steps[-1].name}): {len(counted)} steps count; {samples} rollouts of {lengths} tokens a step; "
        f"first step {steps[0].seconds['total']:.2f} s; rewards {rewards}"
    )


def find_median(steps: Sequence[Step], row: str) -> float | None:
    values = [step.seconds[row] for step in steps[1:] if row in step.seconds]
    return statistics.median(values) if values else None


def render(steps: Sequence[Step], row: str) -> str:
    values = [step.seconds[row] for step in steps[1:] if row in step.seconds]
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})" if values else ""


def report(sides: dict[str, list[Step]]) -> None:
    """A table by phase, and the ratios of totals."""
    print("", *(describe(side, steps) for side, steps in sides.items()), sep="\n")
    print("\n| s a step, median (lowest to highest) | " + " | ".join(sides) + " |")
    print("|---" * (1 + len(sides)) + "|")
    for row in ROWS:
        print(f"| {MEANINGS.get(row, row)} | " + " | ".join(render(steps, row) for steps in sides.values()) + " |")
    ours, floor, trl = (find_median(sides.get(side, []), "total") for side in ("ours", "floor", "TRL"))
    print("\nA reward of ours is counted with the rollout it ends.")
    if ours and floor:
        print(f"ours / floor: {ours / floor:.2f} (target at most 1.1)")
    if ours and trl:
        print(f"ours / TRL: {ours / trl:.2f} (target at most 0.4)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("MODEL"), help="HF directory; MODEL of the environment")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5, help="of each side, at most; the first does not count")
    parser.add_argument("--budget-s", type=float, default=280.0, help="of everything")
    parser.add_argument("--directory", type=Path, help="for everything written; a temporary one by default")
    arguments = parser.parse_args()
    if not arguments.model or not (Path(arguments.model) / "config.json").is_file():
        parser.error("--model or MODEL must name an HF directory")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the side under way ends too
    begin = time.monotonic()
    directory = (arguments.directory or Path(tempfile.mkdtemp(prefix="others-"))).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    prompts = directory / "prompts.jsonl"
    write_prompts(prompts, arguments.steps)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ["--model", arguments.model, "--prompts", str(prompts)]
    trl_path = os.environ.get("TRL_PATH")
    gpu = {"CUDA_VISIBLE_DEVICES": str(arguments.gpu)}
    trl_env = gpu | ({"PYTHONPATH": trl_path} if trl_path else {})

    def left(kept_s: float = 0.0) -> float:
        return arguments.budget_s - kept_s - (time.monotonic() - begin)

    sides: dict[str, list[Step]] = {}
    try:
        if (time_s := left(140)) > LEAST_S:
            sides["ours"] = run_ours(
                arguments.model, prompts, directory / "ours", arguments.steps, arguments.gpu, time_s
            )
        if (time_s := left(70)) > LEAST_S:
            sides["floor"] = run_script("bare_grpo.py", words, directory / "floor.jsonl", time_s, **gpu)
        if (time_s := left()) > LEAST_S:
            sides["TRL"] = run_script("trl_on_gpu.py", words, directory / "trl.jsonl", time_s, **trl_env)
    finally:
        report(sides)
        (directory / "steps.json").write_text(json.dumps({s: [vars(step) for step in own] for s, own in sides.items()}))
    return 0 if all(len(sides.get(side, [])) > 1 for side in ("ours", "floor", "TRL")) else 1


if __name__ == "__main__":
    sys.exit(main())
