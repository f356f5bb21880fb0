"""GRPO by TRL's GRPOTrainer on one GPU, as fast as it goes there; against_others.py runs it.

Generation is by transformers' generate, in the trainer's process. (TRL's other paths want packages: vLLM, or flash-attn
for transformers' continuous batching, whose attention by torch alone is of every request to the cache of all.) Weights
and Adam are bfloat16, without float32 copies, which is less work than the other sides do. Everything that only costs
time is off: autocast, gradient checkpointing, progress bar, logging, saving, evaluation.
"""

from __future__ import annotations

import argparse
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from against_others import GROUP_SIZE, LR, NUM_NEW_TOKENS, NUM_PROMPTS, read_prompts, score
from datasets import Dataset
from datasets.table import InMemoryTable
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from watched_run import Recorder

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_MICRO_BATCHES = 4
"""Of 256 rollouts each: more at once would not fit beside their activations."""


class TimedTrainer(GRPOTrainer):
    """Notes the seconds of what a step consists of, and how many rollouts were trained."""

    num_trained = 0

    def __init__(self, **keywords: Any) -> None:
        self.spent: dict[str, float] = {}
        super().__init__(**keywords)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - start

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self.timed("rollout"):
            return super()._generate_single_turn(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self.timed("reward"):
            return super()._calculate_rewards(*args, **kwargs)

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        with self.timed("generate and score"):
            return super()._generate_and_score_completions(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.num_trained += len(inputs["completion_ids"])
        return super().compute_loss(model, inputs, *args, **kwargs)


class StepRecorder(TrainerCallback):
    """Is the reward as well: what it is shown is what was generated. Ends the run when no step would end in time."""

    def __init__(self, recorder: Recorder, until: float) -> None:
        self._recorder, self._until = recorder, until
        self._lengths: list[int] = []
        self._rewards: list[float] = []
        self._began = 0.0
        self.trainer: TimedTrainer | None = None

    def reward(self, completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        self._lengths += [len(ids) for ids in completion_ids]
        rewards = [score(completion) for completion in completions]
        self._rewards += rewards
        return rewards

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        total_s, spent = time.perf_counter() - self._began, self.trainer.spent
        phases = {name: spent[name] for name in ("rollout", "reward")}
        phases["train"] = total_s - spent["generate and score"]
        record = {
            "name": "transformers' generate",
            "phases": phases,
            "total_s": total_s,
            "num_samples": len(self._lengths),
            "mean_tokens": sum(self._lengths) / len(self._lengths),
            "reward": sum(self._rewards) / len(self._rewards),
            "num_trained": self.trainer.num_trained,
        }
        self._recorder.tell(**record)
        print(record, flush=True)
        if not all(weight.isfinite().all() for weight in self.trainer.model.parameters()):
            raise SystemExit("after this step weights are not finite")
        self._lengths, self._rewards, self._began = [], [], time.perf_counter()
        self.trainer.spent, self.trainer.num_trained = {}, 0
        control.should_training_stop = control.should_training_stop or time.time() + total_s > self._until


def build_config(output_dir: Path, num_steps: int) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(output_dir),
        max_steps=num_steps,
        # All rollouts of a step are generated at once and trained in micro-batches, with one update.
        per_device_train_batch_size=NUM_PROMPTS * GROUP_SIZE // NUM_MICRO_BATCHES,
        gradient_accumulation_steps=NUM_MICRO_BATCHES,
        steps_per_generation=NUM_MICRO_BATCHES,
        num_generations=GROUP_SIZE,
        num_iterations=1,
        max_completion_length=NUM_NEW_TOKENS,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        loss_type="grpo",
        scale_rewards="group",
        epsilon=0.2,
        learning_rate=LR,
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta1=0.9,
        adam_beta2=0.98,
        weight_decay=0.0,
        max_grad_norm=1.0,
        model_init_kwargs={"dtype": "bfloat16"},
        bf16=False,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        generation_kwargs={"min_new_tokens": NUM_NEW_TOKENS},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="HF directory")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL; NUM_PROMPTS of them a step")
    parser.add_argument("--output", type=Path, required=True, help="a line a step")
    parser.add_argument("--until", type=float, required=True, help="no step begins that would end later than this time")
    arguments = parser.parse_args()
    # Its backward pass under a mask gives NaN where a length is 64 + a multiple of 128 (pytorch/pytorch#196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    prompts = read_prompts(arguments.prompts)
    recorder = StepRecorder(Recorder(arguments.output), arguments.until)
    trainer = TimedTrainer(
        model=arguments.model,
        reward_funcs=recorder.reward,
        args=build_config(arguments.output.parent, len(prompts) // NUM_PROMPTS),
        # With a fingerprint: working one out fails where pyarrow lies outside Python's own site-packages.
        train_dataset=Dataset(InMemoryTable.from_pydict({"prompt": prompts}), fingerprint="prompts"),
        callbacks=[recorder],
    )
    recorder.trainer = trainer
    model = trainer.model
    print(f"{next(model.parameters()).dtype}, attention {model.config._attn_implementation}", flush=True)
    trainer.train()


if __name__ == "__main__":
    main()
