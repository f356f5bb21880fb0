"""GRPO by TRL's GRPOTrainer, as fast as it goes on a CPU; grpo_speed.py runs it with .venv-trl's python.

Generation is transformers' generate, in the trainer's process: of TRL's other paths, vLLM needs a GPU, and continuous
batching made a step three times as long on a CPU (its cache set to fit). Everything that only costs time is off:
gradient checkpointing, progress bar, logging, saving, evaluation. Each step appends one JSON line to --output. Under
torchrun, the batch of a step is split over the processes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from exact_match import score
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

NUM_PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
IS_FIRST = os.environ.get("RANK", "0") == "0"


class CountingTrainer(GRPOTrainer):
    """Counts what is trained, so that the comparison does not rest on how the batch sizes are understood."""

    num_trained_samples = 0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.num_trained_samples += len(inputs["completion_ids"])
        return super().compute_loss(model, inputs, *args, **kwargs)


class StepRecorder(TrainerCallback):
    """Is the reward as well: what it is shown is what was generated. Writes what the first process sees."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8") if IS_FIRST else None
        self._lengths: list[int] = []
        self._rewards: list[float] = []
        self.trainer: CountingTrainer | None = None

    def reward(
        self, completions: list[str], completion_ids: list[list[int]], label: list[str], **_: Any
    ) -> list[float]:
        self._lengths += [len(ids) for ids in completion_ids]
        rewards = [score(completion, right) for completion, right in zip(completions, label, strict=True)]
        self._rewards += rewards
        return rewards

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        record = {
            "step": state.global_step,
            "time": time.time(),
            "num_generated": len(self._lengths) * NUM_PROCESSES,
            "num_trained": self.trainer.num_trained_samples * NUM_PROCESSES,
            "response_tokens": sum(self._lengths) / len(self._lengths),
            "reward": sum(self._rewards) / len(self._rewards),
        }
        self._lengths, self._rewards, self.trainer.num_trained_samples = [], [], 0
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()


def build_config(arguments: argparse.Namespace) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(arguments.output.parent / "trl_output"),
        max_steps=arguments.num_steps,
        # All rollouts of a step in one batch: one generation, one forward and backward pass, one update.
        per_device_train_batch_size=arguments.prompts_per_step * arguments.group_size // NUM_PROCESSES,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=arguments.group_size,
        num_iterations=1,
        max_completion_length=arguments.max_new_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        loss_type="grpo",
        scale_rewards="group",
        epsilon=0.2,
        learning_rate=arguments.lr,
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta1=0.9,
        adam_beta2=0.98,
        weight_decay=0.0,
        max_grad_norm=1.0,
        model_init_kwargs={"dtype": "float32"},
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        ddp_find_unused_parameters=False,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-steps", type=int, required=True)
    parser.add_argument("--prompts-per-step", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.prompts.read_text(encoding="utf-8").splitlines()]
    recorder = StepRecorder(arguments.output)
    trainer = CountingTrainer(
        model=arguments.model,
        reward_funcs=recorder.reward,
        args=build_config(arguments),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"], "label": row["label"]} for row in rows]),
        callbacks=[recorder],
    )
    recorder.trainer = trainer
    print(f"threads: {torch.get_num_threads()}, parameters: {next(trainer.model.parameters()).dtype}", flush=True)
    trainer.train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # without it, a process may abort at its exit


if __name__ == "__main__":
    main()
