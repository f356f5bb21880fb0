"""The composition root: turns the nodes of a Plan into objects. The only place that knows which class serves which."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlrecipes.config.schema import RlConfig, SamplingConfig
from rlrecipes.data.buffer import SampleBuffer
from rlrecipes.data.encoding import PromptEncoder
from rlrecipes.data.jsonl import JsonlPromptSource
from rlrecipes.data.observations import ObservationEncoder
from rlrecipes.data.sft import SftSource
from rlrecipes.data.tokenizer import load_tokenizer
from rlrecipes.engines.sglang.serving import ServingClient
from rlrecipes.errors import DataError
from rlrecipes.plan.hosts import read_visible_gpus
from rlrecipes.plan.nodes import POLICY, Plan, ServedModelNode
from rlrecipes.plan.nvml import read_busy_fraction, read_gpu_use
from rlrecipes.rewards.registry import build_reward
from rlrecipes.rollout.collector import Collector
from rlrecipes.rollout.environments import build_judge
from rlrecipes.rollout.filters import build_filters
from rlrecipes.rollout.generate import Policy
from rlrecipes.rollout.groups import GroupGenerator
from rlrecipes.rollout.protocols import Reward
from rlrecipes.rollout.registry import GenerateBuilder, build_generate
from rlrecipes.rollout.scoring import Role, Scorer, ScoringReward
from rlrecipes.runner.preparation import to_row_keys
from rlrecipes.tracking.sweeps import find_point
from rlrecipes.tracking.system import GpuLoad, SystemSampler
from rlrecipes.tracking.tracker import Tracker, build_tracker
from rlrecipes.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ServedClients(Mapping[str, ServingClient]):
    """The ways to the served models of a Plan. Their names are known at once, clients once they are opened.

    Args:
        plan: the Plan.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._clients: dict[str, ServingClient] = {}

    async def open(self, find_router: Callable[[str], str], stack: AsyncExitStack) -> None:
        """Open every client.

        Args:
            find_router: name of a served model -> where it is asked.
            stack: closes them.
        """
        for name in self:
            client = ServingClient(
                find_router(name),
                timeout_s=self._plan.rollout.request_timeout_s,
                max_connections=self._plan.rollout.max_concurrent_requests,
            )
            self._clients[name] = await stack.enter_async_context(client)

    def __getitem__(self, name: str) -> ServingClient:
        return self._clients[name]

    def __contains__(self, name: object) -> bool:
        return any(name == own for own in self)  # a Mapping would look for the client

    def __iter__(self) -> Iterator[str]:
        return (model.name for model in self._plan.served_models)

    def __len__(self) -> int:
        return len(self._plan.served_models)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything read from disk before a process starts: what is wrong in it is an input error.

    Attributes:
        tokenizer: the model's.
        prompts: training prompts; None for SFT.
        sft: training samples; None for RL.
        eval_prompts: held out; empty when nothing is.
        reward: what rewards groups.
        generate: what runs a rollout, once it is told whom to ask.
        clients: the ways to served models.
    """

    tokenizer: PreTrainedTokenizerFast
    prompts: JsonlPromptSource | None
    sft: SftSource | None
    eval_prompts: tuple[Prompt, ...]
    reward: Reward
    generate: GenerateBuilder
    clients: ServedClients


def build_plan_reward(plan: Plan, clients: ServedClients) -> Reward:
    """What rewards groups.

    Args:
        plan: the Plan.
        clients: of its served models, opened or not.

    Raises:
        ConfigError: its name, options or function do not fit.
    """
    reward = plan.reward
    return build_reward(reward.name, timeout_s=reward.timeout_s, options=reward.options, models=clients)


def build_inputs(plan: Plan, reward: Reward, clients: ServedClients, *, should_train: bool = True) -> Inputs:
    """Read tokenizer and data.

    Args:
        plan: the Plan.
        reward: built before, since it needs no file.
        clients: of the served models, opened or not.
        should_train: whether the training file is read.

    Raises:
        InputError: a file is missing or malformed, or a generate function or an environment does not fit.
    """
    tokenizer = load_tokenizer(plan.model.path)
    for role, model in _find_scorers(plan):
        _check_vocabulary(tokenizer, role, model)
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
    observations = ObservationEncoder(tokenizer, plan.data.apply_chat_template, plan.rollout.generate.observation_role)
    generate = build_generate(plan.rollout, judge=build_judge(reward), encoder=observations)
    return Inputs(tokenizer, prompts, sft, _read_eval_prompts(plan, encoder), reward, generate, clients)


def _find_scorers(plan: Plan) -> Iterator[tuple[Role, ServedModelNode]]:
    """Served models that say what they think of the rollouts' tokens."""
    if not isinstance(plan.algo, RlConfig):
        return
    distillation = plan.algo.distillation
    names: dict[Role, str | None] = {
        "reference": plan.algo.kl.reference_model,
        "teacher": distillation.teacher_model if distillation is not None else None,
    }
    models = {model.name: model for model in plan.served_models}
    yield from ((role, models[name]) for role, name in names.items() if name is not None)


def _check_vocabulary(tokenizer: PreTrainedTokenizerFast, role: Role, model: ServedModelNode) -> None:
    """Token ids must mean the same to both; a model that is elsewhere cannot be looked at."""
    if not (Path(model.path) / "tokenizer_config.json").is_file():
        return
    theirs = load_tokenizer(model.path).get_vocab()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if theirs.get(token, index) != index:
            problem = f"{model.path}: token {token!r} is {theirs[token]} there and {index} in the policy's vocabulary"
            fix = f"take a {role} with the policy's vocabulary"
            raise DataError(f"topology.served_models.{model.name}.path", problem, fix)


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


def build_collector(plan: Plan, inputs: Inputs) -> Collector:
    """What asks training prompts.

    Raises:
        ValueError: the Plan is not one of RL.
    """
    if inputs.prompts is None:
        raise ValueError("a collector needs prompts")
    return Collector(
        _build_generator(plan, inputs, plan.rollout.sampling, plan.batch.group_size, "train"),
        source=inputs.prompts,
        buffer=SampleBuffer(max_groups=plan.batch.prompts_per_step),
        max_concurrent_requests=plan.rollout.max_concurrent_requests,
        filters=build_filters(plan.rollout.filters),
        max_failed_fraction=plan.rollout.max_failed_fraction,
    )


def build_eval_generator(plan: Plan, inputs: Inputs) -> GroupGenerator:
    """What answers held-out prompts."""
    evaluation = plan.rollout.evaluation
    return _build_generator(plan, inputs, evaluation.sampling, evaluation.num_samples_per_prompt, "eval")


def _build_generator(
    plan: Plan, inputs: Inputs, sampling: SamplingConfig, group_size: int, purpose: Literal["train", "eval"]
) -> GroupGenerator:
    run_id = f"{plan.name}-{purpose}"
    policy = Policy(
        inputs.clients[POLICY],
        tokenizer=inputs.tokenizer,
        sampling=to_sampling_params(sampling),
        seed=plan.seed,
        run_id=run_id,
    )
    scorers = _build_scorers(plan, inputs.clients) if purpose == "train" else {}
    reward = ScoringReward(inputs.reward, scorers, run_id=run_id) if scorers else inputs.reward
    return GroupGenerator(inputs.generate(policy), reward, group_size)


def _build_scorers(plan: Plan, clients: ServedClients) -> dict[Role, Scorer]:
    distillation = plan.algo.distillation if isinstance(plan.algo, RlConfig) else None
    num_top = distillation.top_k if distillation is not None and distillation.form == "topk" else 0
    return {
        role: Scorer(clients[model.name], num_top if role == "teacher" else 0, _read_vocab_size(model.path))
        for role, model in _find_scorers(plan)
    }


def _read_vocab_size(path: str) -> int | None:
    """Of a model's config.json; None where it is elsewhere."""
    file = Path(path) / "config.json"
    if not file.is_file():
        return None
    config = json.loads(file.read_text(encoding="utf-8"))
    size: int | None = config.get("text_config", config).get("vocab_size")
    return size


def build_run_tracker(plan: Plan, run_id: str | None) -> Tracker:
    """Metrics of the run, in files and in MLflow.

    Args:
        plan: the Plan.
        run_id: of the MLflow run to continue; None starts one.
    """
    sweep = find_point(Path(plan.runs_dir), plan.tracking.sweep, Path(plan.run_dir))
    parent = sweep[0].parent if sweep else None
    uri, experiment = to_tracking_uri(plan), plan.tracking.experiment
    return build_tracker(Path(plan.run_dir), uri, experiment, plan.name, run_id, parent=parent)


def build_system_sampler(plan: Plan) -> SystemSampler:
    """What watches this machine and those of the Plan's GPUs that are in it; slices of GPUs cannot be watched.

    Args:
        plan: the Plan.
    """
    devices = [*plan.trainer.devices, *(d for m in plan.served_models for e in m.engines for d in e.devices)]
    here = _find_own_machine(plan)
    used = {device.gpu for device in devices if device.node == here} or {None}
    visible = read_visible_gpus() if used != {None} else []
    indices = [gpu.index for number, gpu in enumerate(visible) if number in used and gpu.index is not None]

    def read_gpus() -> list[GpuLoad]:
        return [GpuLoad(read_busy_fraction(index), read_gpu_use(index).used_bytes) for index in indices]

    return SystemSampler(Path(plan.run_dir), read_gpus)


def _find_own_machine(plan: Plan) -> int | None:
    """Which machine of the Plan this is: by name, else the first, but none where others started the cluster."""
    names = [host.name for host in plan.hosts]
    if socket.gethostname() in names:
        return names.index(socket.gethostname())
    return None if plan.cluster.source == "ray" else 0


def to_tracking_uri(plan: Plan) -> str | None:
    """Where MLflow is; None when it is off."""
    if not plan.tracking.is_mlflow_enabled:
        return None
    return plan.tracking.tracking_uri or f"sqlite:///{Path(plan.runs_dir).absolute() / 'mlflow.db'}"
