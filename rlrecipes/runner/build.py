"""The composition root: turns the nodes of a Plan into objects. The only place that knows which class serves which."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlrecipes.config.schema import RlConfig, SamplingConfig
from rlrecipes.data.buffer import SampleBuffer
from rlrecipes.data.encoding import PromptEncoder
from rlrecipes.data.jsonl import JsonlPromptSource
from rlrecipes.data.sft import SftSource
from rlrecipes.data.tokenizer import load_tokenizer
from rlrecipes.engines.sglang.serving import ServingClient
from rlrecipes.errors import DataError
from rlrecipes.plan.nodes import Plan
from rlrecipes.rewards.registry import build_reward
from rlrecipes.rollout.collector import Collector
from rlrecipes.rollout.filters import build_filters
from rlrecipes.rollout.generate import SingleTurn
from rlrecipes.rollout.groups import GroupGenerator
from rlrecipes.rollout.protocols import Reward
from rlrecipes.runner.preparation import to_row_keys
from rlrecipes.tracking.tracker import Tracker, build_tracker
from rlrecipes.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything read from disk before a process starts: what is wrong in it is an input error.

    Attributes:
        tokenizer: the model's.
        prompts: training prompts; None for SFT.
        sft: training samples; None for RL.
        eval_prompts: held out; empty when nothing is.
        reward: what rewards groups.
    """

    tokenizer: PreTrainedTokenizerFast
    prompts: JsonlPromptSource | None
    sft: SftSource | None
    eval_prompts: tuple[Prompt, ...]
    reward: Reward


def build_plan_reward(plan: Plan) -> Reward:
    """What rewards groups.

    Raises:
        ConfigError: its name, options or function do not fit.
    """
    return build_reward(plan.reward.name, timeout_s=plan.reward.timeout_s, options=plan.reward.options)


def build_inputs(plan: Plan, reward: Reward, *, should_train: bool = True) -> Inputs:
    """Read tokenizer and data.

    Args:
        plan: the Plan.
        reward: built before, since it needs no file.
        should_train: whether the training file is read.

    Raises:
        InputError: a file is missing or malformed.
    """
    tokenizer = load_tokenizer(plan.model.path)
    encoder = PromptEncoder(tokenizer, plan.data.apply_chat_template, plan.data.max_prompt_tokens)
    common: dict[str, Any] = {
        "encoder": encoder,
        "keys": to_row_keys(plan),
        "seed": plan.seed,
        "should_shuffle": plan.data.should_shuffle,
        "max_rows": plan.data.max_train_rows,
    }
    path, prompts, sft = plan.data.train_path, None, None
    if should_train and isinstance(plan.algo, RlConfig):
        prompts = JsonlPromptSource(path, name=plan.data.name, **common)
    elif should_train:
        sft = SftSource(path, max_sample_tokens=plan.batch.max_sample_tokens, **common)
    return Inputs(tokenizer, prompts, sft, _read_eval_prompts(plan, encoder), reward)


def _read_eval_prompts(plan: Plan, encoder: PromptEncoder) -> tuple[Prompt, ...]:
    if plan.data.eval_path is None:
        return ()
    source = JsonlPromptSource(
        plan.data.eval_path, encoder=encoder, keys=to_row_keys(plan), seed=0, should_shuffle=False, name=plan.data.name
    )
    wanted = plan.rollout.evaluation.num_prompts
    if source.num_rows < wanted:
        problem = f"{plan.data.eval_path} has {source.num_rows} rows; rollout.evaluation.num_prompts is {wanted}"
        raise DataError("data.eval_path", problem, f"set rollout.evaluation.num_prompts={source.num_rows} or less")
    return tuple(source.prompt(index) for index in range(wanted))


def to_sampling_params(config: SamplingConfig) -> SamplingParams:
    """The recipe's sampling section as engines get it."""
    return SamplingParams(**config.model_dump())


def build_client(plan: Plan, router_url: str) -> ServingClient:
    """The way to the engines of one model."""
    return ServingClient(
        router_url,
        timeout_s=plan.rollout.request_timeout_s,
        max_connections=plan.rollout.max_concurrent_requests,
    )


def build_collector(plan: Plan, inputs: Inputs, client: ServingClient) -> Collector:
    """What asks training prompts.

    Raises:
        ValueError: the Plan is not one of RL.
    """
    if inputs.prompts is None:
        raise ValueError("a collector needs prompts")
    return Collector(
        _build_generator(plan, inputs, client, plan.rollout.sampling, plan.batch.group_size, "train"),
        source=inputs.prompts,
        buffer=SampleBuffer(max_groups=plan.batch.prompts_per_step),
        max_concurrent_requests=plan.rollout.max_concurrent_requests,
        filters=build_filters(plan.rollout.filters),
        max_failed_fraction=plan.rollout.max_failed_fraction,
    )


def build_eval_generator(plan: Plan, inputs: Inputs, client: ServingClient) -> GroupGenerator:
    """What answers held-out prompts."""
    evaluation = plan.rollout.evaluation
    return _build_generator(plan, inputs, client, evaluation.sampling, evaluation.num_samples_per_prompt, "eval")


def _build_generator(
    plan: Plan, inputs: Inputs, client: ServingClient, sampling: SamplingConfig, group_size: int, purpose: str
) -> GroupGenerator:
    generate = SingleTurn(
        client,
        tokenizer=inputs.tokenizer,
        sampling=to_sampling_params(sampling),
        seed=plan.seed,
        run_id=f"{plan.name}-{purpose}",
    )
    return GroupGenerator(generate, inputs.reward, group_size)


def build_run_tracker(plan: Plan, run_id: str | None) -> Tracker:
    """Metrics of the run, in files and in MLflow.

    Args:
        plan: the Plan.
        run_id: of the MLflow run to continue; None starts one.
    """
    return build_tracker(Path(plan.run_dir), to_tracking_uri(plan), plan.tracking.experiment, plan.name, run_id)


def to_tracking_uri(plan: Plan) -> str | None:
    """Where MLflow is; None when it is off."""
    if not plan.tracking.is_mlflow_enabled:
        return None
    return plan.tracking.tracking_uri or f"sqlite:///{Path(plan.runs_dir).absolute() / 'mlflow.db'}"
