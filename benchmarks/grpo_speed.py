"""GRPO on the quickstart model: rlrecipes against TRL's GRPOTrainer, as a ratio from one run.

    make trl && python benchmarks/grpo_speed.py [--rounds 3] [--model DIR]

Both start from one HF directory (the quickstart's first stage; trained here first where it has not run yet) and train
on one prompt file in one order with the group size, prompts per step, sampling, learning rate and reward of the recipe
quickstart, in fp32, with no evaluation, checkpoint or export among the steps that count. ``rlrecipes train`` runs as a
user runs it: two trainer ranks and an engine, two and two, one and one, the router beside them. TRL generates with
transformers' generate in its own process, the fastest of its paths on a CPU: with one thread, two threads, two
processes; its best counts. They take turns, fresh processes each. A step is timed from the end of the one before, so
everything counts.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

BENCHMARKS = Path(__file__).resolve().parent
RLRECIPES = Path(sys.executable).parent / "rlrecipes"
OUR_LAYOUTS = {
    "rlrecipes, as the recipe is": [],
    "rlrecipes, two engines": ["topology.served_models.policy.server_groups.main.num_engines=2"],
    "rlrecipes, one rank": ["parallel=single"],
}
"""Name -> overrides of the recipe."""
TRL_LAYOUTS = {"TRL, 1 thread": (1, 1), "TRL, 2 threads": (1, 2), "TRL, 2 processes": (2, 1)}
"""Name -> (processes, threads of each)."""
TIMEOUT_S = 900.0
PARTS = {
    "generate and score": "time/wait_s",
    "train": "train/time_s",
    "weight sync": "weight_sync/time_s",
}


@dataclass
class Measured:
    """Steps of one contender over all rounds; a rate is samples/s of one step."""

    rounds: list[list[float]] = field(default_factory=list)
    response_tokens: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)

    @property
    def rates(self) -> list[float]:
        return [rate for part in self.rounds for rate in part]

    def add(self, times: Sequence[float], num_samples: int, response_tokens: list[float], rewards: list[float]) -> None:
        """Take one process's steps; a step's duration is the time since the one before."""
        self.rounds.append([num_samples / (after - before) for before, after in zip(times, times[1:], strict=False)])
        self.response_tokens += response_tokens[1:]
        self.rewards += rewards[1:]


def run_process(command: list[str], log_path: Path, **environment: str) -> None:
    """Run to the end; a failure shows the end of its log."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment)
        try:
            code = process.wait(TIMEOUT_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60.0)
    if code != 0:
        raise SystemExit(f"{' '.join(command)}\nexited with {code}:\n{log_path.read_text(errors='replace')[-4000:]}")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run_ours(model: Path, run_dir: Path, num_steps: int, overrides: list[str]) -> list[dict[str, Any]]:
    """One run of the recipe; gives the metrics of its steps."""
    command = [str(RLRECIPES), "train", "recipe=quickstart", f"model.path={model}", f"run_dir={run_dir}"]
    command += ["data.should_shuffle=false", "reward.name=exact_match:verify"]
    command += ["schedule.eval_interval=0", "schedule.should_eval_before=false", "schedule.should_export_hf=false"]
    command += [f"schedule.num_steps={num_steps}", f"schedule.save_interval={num_steps}"]
    run_process([*command, *overrides], run_dir.with_suffix(".log"), PYTHONPATH=str(BENCHMARKS))
    records = [{"time": record["time"]} | record["metrics"] for record in read_jsonl(run_dir / "metrics.jsonl")]
    return [record for record in records if "time/step_s" in record]


def run_trl(
    python: str, plan: dict[str, Any], num_steps: int, layout: tuple[int, int], output: Path
) -> list[dict[str, Any]]:
    """One run of TRL with the numbers of our Plan; gives its steps."""
    num_processes, num_threads = layout
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    run_process(
        [
            python,
            *(torchrun if num_processes > 1 else []),
            str(BENCHMARKS / "trl_grpo.py"),
            f"--model={plan['model']['path']}",
            f"--prompts={plan['data']['train_path']}",
            f"--output={output}",
            f"--num-steps={num_steps}",
            f"--prompts-per-step={plan['batch']['prompts_per_step']}",
            f"--group-size={plan['batch']['group_size']}",
            f"--max-new-tokens={plan['rollout']['sampling']['max_new_tokens']}",
            f"--lr={plan['trainer']['optim']['lr']}",
        ],
        output.with_suffix(".log"),
        OMP_NUM_THREADS=str(num_threads),
        HF_HUB_OFFLINE="1",
        CUDA_VISIBLE_DEVICES="",
    )
    return read_jsonl(output)


def prepare_model(asked: Path | None, directory: Path) -> Path:
    """The model asked for, or the quickstart's first stage, which is run here when it has not been yet."""
    model = asked or Path("runs/quickstart_sft/hf")
    if asked is None and not (model / "config.json").is_file():
        print("training the quickstart's first stage", flush=True)
        model = directory / "quickstart_sft" / "hf"
        command = [str(RLRECIPES), "train", "recipe=quickstart_sft", f"run_dir={model.parent}"]
        run_process(command, directory / "quickstart_sft.log")
    return model.resolve()


def run(arguments: argparse.Namespace, directory: Path) -> tuple[dict[str, Measured], int]:
    """All rounds; gives the contenders and the samples of a step."""
    model = prepare_model(arguments.model, directory)
    measured = {name: Measured() for name in (*OUR_LAYOUTS, *TRL_LAYOUTS)}
    for number in range(arguments.rounds):
        for index, (name, overrides) in enumerate(OUR_LAYOUTS.items()):
            run_dir = directory / f"ours{index}_{number}"
            ours = run_ours(model, run_dir, arguments.steps, [*overrides, *arguments.overrides])[arguments.warmup :]
            plan = yaml.safe_load((run_dir / "plan.yaml").read_text(encoding="utf-8"))
            num_samples = plan["batch"]["rollouts_per_step"]
            assert all(step["rollout/num_rollouts"] == num_samples for step in ours)
            lengths = [step["response/mean_tokens"] for step in ours]
            measured[name].add([s["time"] for s in ours], num_samples, lengths, [s["reward/mean"] for s in ours])
            for part, key in PARTS.items():
                measured[name].parts.setdefault(part, []).extend(step[key] for step in ours)
        for index, (name, layout) in enumerate(TRL_LAYOUTS.items()):
            output = directory / f"trl{index}_{number}.jsonl"
            trl = run_trl(arguments.trl_python, plan, arguments.steps, layout, output)[arguments.warmup :]
            assert all(step["num_generated"] == step["num_trained"] == num_samples for step in trl)
            lengths = [step["response_tokens"] for step in trl]
            measured[name].add([s["time"] for s in trl], num_samples, lengths, [s["reward"] for s in trl])
        done = ", ".join(f"{name} {statistics.median(one.rounds[-1]):.0f}" for name, one in measured.items())
        print(f"round {number + 1}, samples/s: {done}", flush=True)
    return measured, num_samples


def report(measured: dict[str, Measured], num_samples: int) -> None:
    table = Table("", "samples/s, median (quartiles)", "s a step", "tokens a response", "reward")
    for name, one in measured.items():
        low, median, high = statistics.quantiles(one.rates, n=4)
        rate, step = f"{median:.0f}  ({low:.0f} to {high:.0f})", f"{num_samples / median:.3f}"
        length, reward = statistics.fmean(one.response_tokens), statistics.fmean(one.rewards)
        table.add_row(name, rate, step, f"{length:.2f}", f"{reward:.3f}")
    Console(width=120).print(table)
    best = max(TRL_LAYOUTS, key=lambda name: statistics.median(measured[name].rates))
    for name in OUR_LAYOUTS:
        pairs = [
            statistics.median(ours) / statistics.median(trl)
            for ours, trl in zip(measured[name].rounds, measured[best].rounds, strict=True)
        ]
        ratio = statistics.median(measured[name].rates) / statistics.median(measured[best].rates)
        print(f"{name} / {best}: {ratio:.2f} (rounds {min(pairs):.2f} to {max(pairs):.2f}; target at least 2)")
        parts = {part: statistics.median(values) for part, values in measured[name].parts.items()}
        print("    of its step: " + ", ".join(f"{part} {value:.3f} s" for part, value in parts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--warmup", type=int, default=5, help="first steps of each process that do not count")
    parser.add_argument("--model", type=Path, default=None, help="an HF directory instead of the quickstart's own")
    parser.add_argument("--trl-python", default=".venv-trl/bin/python")
    parser.add_argument("overrides", nargs="*", help="further overrides of our recipe, to try what helps")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the process under way ends too
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        report(*run(arguments, Path(directory)))


if __name__ == "__main__":
    main()
