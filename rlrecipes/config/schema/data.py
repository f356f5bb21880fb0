"""Prompts and what their rollouts are worth (conf/data, conf/reward)."""

from __future__ import annotations

from typing import Any

from rlrecipes.config.schema.section import NonNegativeInt, PositiveFloat, PositiveInt, Section


class TasksConfig(Section):
    """Tasks written by reasoning-gym when the files are absent."""

    datasets: dict[str, dict[str, Any]]
    """reasoning-gym dataset name -> its parameters."""
    num_train_rows: PositiveInt
    """Rows of the training file."""
    num_eval_rows: PositiveInt
    """Rows of the held-out file; no question stands in both."""
    seed: NonNegativeInt
    """Seed of the task generator."""
    prompt_template: str
    """How a question is put; {question} stands for it."""
    response_template: str
    """The answer written for SFT; {answer} stands for it."""


class DataConfig(Section):
    """Prompts (conf/data)."""

    name: str
    """Name in metrics."""
    train_path: str
    """JSONL of training prompts."""
    max_train_rows: PositiveInt | None
    """Only the first so many rows of train_path; null: all."""
    eval_path: str | None
    """JSONL of held-out prompts; null: no evaluation."""
    prompt_key: str
    """Key of the prompt: a string, or chat messages."""
    label_key: str
    """Key of what a verifier compares with."""
    metadata_key: str
    """Key of whatever else the reward needs."""
    response_key: str
    """Key of the response to imitate (SFT)."""
    apply_chat_template: bool
    """Whether prompts go through the tokenizer's chat template."""
    should_shuffle: bool
    """Whether each epoch is shuffled, by the run's seed."""
    max_prompt_tokens: PositiveInt
    """A longer prompt is an error."""
    tasks: TasksConfig | None
    """Generates both files when absent; null: the files must exist."""


class RewardConfig(Section):
    """What a rollout is worth (conf/reward)."""

    name: str
    """A verifier's name, or `module:function` of your own."""
    options: dict[str, Any]
    """Its keyword arguments."""
    timeout_s: PositiveFloat
    """Longest time for one rollout; then it counts as failed."""
