"""Rules across the fields of a recipe. One function a rule; all are run, and all they find is told together."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlrecipes.config.schema import ModelShapes, OffPolicyConfig, ParallelConfig, RlConfig, RunConfig, ServerGroupConfig
from rlrecipes.custom import Role, check_custom
from rlrecipes.errors import Problem
from rlrecipes.plan.nodes import POLICY
from rlrecipes.plan.packing import compute_micro_batch_multiple
from rlrecipes.suggest import did_you_mean

POLICY_LOSSES = ("clipped", "gspo", "cispo")
POLICY_LOSS = Role("algo.policy_loss", "algo.policy_loss_options", ("batch", "logprobs", "entropy"))
"""A policy loss of the user's own; see ``algos.objective.CustomLoss``."""
_NO_CORRECTION = OffPolicyConfig(correction="none", low=0.0, high=2.0, veto=None, opsm_delta=None, staleness_power=0.0)
_GREEDY_TEMPERATURE = 1e-6
"""Below it SGLang samples greedily."""
_UNBUILT: dict[str, tuple[Any, ...]] = {
    "expert_model_parallel_size": (1,),
    "expert_tensor_parallel_size": (None, 1),
}
_DENSE_RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp")
_UNSCALED = "SGLANG_RETURN_ORIGINAL_LOGPROB"
_ENGINE_MARGIN_TOKENS = 8
"""SGLang ends an answer 2 tokens before the context is full, and takes no prompt that leaves fewer than 7 there."""


def check_recipe(config: RunConfig, shapes: ModelShapes | None) -> list[Problem]:
    """Every cross-field problem of a recipe.

    Args:
        config: the recipe.
        shapes: of the model; None when they could not be known, and rules about them are passed over.
    """
    problems = [problem for rule in _RULES for problem in rule(config)]
    if shapes is not None:
        problems += [problem for shape_rule in _SHAPE_RULES for problem in shape_rule(config, shapes)]
    return problems


def _divisors_near(value: int, of: int) -> str:
    return ", ".join(
        str(d) for d in sorted((d for d in range(1, of + 1) if of % d == 0), key=lambda d: abs(d - value))[:3]
    )


def _batch(config: RunConfig) -> Iterator[Problem]:
    prompts, parts = config.schedule.prompts_per_step, config.schedule.num_train_steps
    if prompts % parts:
        fix = f"use one of {_divisors_near(parts, prompts)}, or prompts_per_step={math.ceil(prompts / parts) * parts}"
        yield Problem("schedule.num_train_steps", f"is {parts}, which does not divide prompts_per_step={prompts}", fix)


def _algorithm(config: RunConfig) -> Iterator[Problem]:
    algo = config.algo
    if not isinstance(algo, RlConfig):
        return
    for rule in (_policy_loss, _advantage, _critic, _kl, _off_policy, _overlong, _teacher):
        yield from rule(config, algo)


def _policy_loss(config: RunConfig, algo: RlConfig) -> Iterator[Problem]:
    if ":" in algo.policy_loss:
        yield from check_custom(POLICY_LOSS, algo.policy_loss, algo.policy_loss_options)
        if algo.off_policy != _NO_CORRECTION or algo.entropy_coef or algo.kl.placement == "loss":
            problem = (
                "of your own is all the loss there is: off_policy, entropy_coef and a KL in the loss are not added"
            )
            yield Problem("algo.policy_loss", problem, "compute them in it, and set them to their neutral values")
        return
    if algo.policy_loss not in POLICY_LOSSES:
        fix = did_you_mean(algo.policy_loss, [*POLICY_LOSSES, "module:function"])
        yield Problem("algo.policy_loss", f"there is no policy loss {algo.policy_loss!r}", fix)
    if algo.policy_loss_options:
        problem = f"{algo.policy_loss} has no options of its own"
        yield Problem("algo.policy_loss_options", problem, "set it to {}; clip_low and the others are keys of algo")
    if algo.clip_low >= 1 and algo.policy_loss != "cispo":
        yield Problem("algo.clip_low", f"is {algo.clip_low}: the lower bound 1 - clip_low is not positive", "use < 1")
    if algo.dual_clip is not None and algo.policy_loss == "cispo":
        yield Problem("algo.dual_clip", "cispo has none: its weight is clipped, not its loss", "set it to null")
    if algo.aggregation_divisor is not None and algo.aggregation != "constant":
        yield Problem("algo.aggregation_divisor", f"aggregation {algo.aggregation} divides by no constant", "set null")


def _advantage(config: RunConfig, algo: RlConfig) -> Iterator[Problem]:
    has_baseline = algo.estimator == "group" and algo.baseline != "none"
    if has_baseline and algo.group_size == 1 and (algo.distillation is None or not algo.distillation.is_alone):
        problem = "is 1: a group of one has no baseline, every advantage is 0"
        yield Problem("algo.group_size", problem, "use 2 or more, or algo.baseline=none")
    if algo.estimator != "group" and algo.baseline != "none":
        yield Problem("algo.baseline", f"estimator {algo.estimator} compares with no group", "use none")
    if algo.normalize_std and not has_baseline:
        yield Problem("algo.normalize_std", "there is no group to take a standard deviation of", "set it false")
    if (algo.estimator == "gae") != (algo.critic is not None):
        problem = (
            "estimator gae needs a critic" if algo.critic is None else f"estimator {algo.estimator} asks no critic"
        )
        yield Problem("algo.critic", problem, "use algo=ppo, or set critic to null")
    if "nonzero_variance" in config.rollout.filters and algo.group_size == 1:
        problem = "nonzero_variance drops every group of one"
        yield Problem("rollout.filters", problem, "use a larger algo.group_size, or no filter")


def _critic(config: RunConfig, algo: RlConfig) -> Iterator[Problem]:
    if algo.critic is None:
        return
    if algo.critic.num_warmup_steps >= config.schedule.num_steps:
        problem = f"is {algo.critic.num_warmup_steps}; the run has {config.schedule.num_steps} steps, the policy none"
        yield Problem("algo.critic.num_warmup_steps", problem, "lower it")
    if algo.critic.path is not None and not (Path(algo.critic.path) / "config.json").is_file():
        problem = f"{algo.critic.path} holds no config.json"
        yield Problem("algo.critic.path", problem, "name an HF directory of the policy's shapes, or null")


def _kl(config: RunConfig, algo: RlConfig) -> Iterator[Problem]:
    kl = algo.kl
    if kl.placement == "none" and kl.coef > 0:
        yield Problem("algo.kl.coef", f"is {kl.coef} but kl.placement is none", "set kl.placement=loss or reward")
    if kl.placement == "loss" and kl.estimator == "k1" and not kl.is_unbiased:
        fix = "use k1_straight_through, k2 or k3, or kl.is_unbiased=true"
        yield Problem("algo.kl.estimator", "k1 in the loss has no gradient in expectation", fix)
    if kl.is_unbiased and kl.placement != "loss":
        yield Problem("algo.kl.is_unbiased", f"weights a KL in the loss; placement is {kl.placement}", "set it false")
    if kl.is_unbiased and kl.estimator == "k1_straight_through":
        yield Problem("algo.kl.estimator", "k1_straight_through cannot be weighted", "use k1, k2 or k3")
    if kl.placement == "advantage" and algo.estimator != "group":
        problem = f"estimator {algo.estimator} sums token rewards: the KL belongs into these"
        yield Problem("algo.kl.placement", problem, "use reward")


def _off_policy(config: RunConfig, algo: RlConfig) -> Iterator[Problem]:
    options = algo.off_policy
    if options.low > options.high:
        yield Problem("algo.off_policy.low", f"is {options.low}, above high={options.high}", "lower it")
    if options.correction != "none" and algo.old_logprobs == "rollout":
        problem = f"{options.correction} compares old with rollout logprobs, which are the same"
        yield Problem("algo.off_policy.correction", problem, "use algo.old_logprobs=recompute")
    if options.veto is not None and options.correction == "none":
        yield Problem("algo.off_policy.veto", "is part of a correction; there is none", "choose one, or set it null")
    if options.staleness_power and config.schedule.num_train_steps == 1:
        problem = "the loop collects with the newest weights: no sample is stale"
        yield Problem("algo.off_policy.staleness_power", problem, "set it to 0")


def _overlong(config: RunConfig, algo: RlConfig) -> Iterator[Problem]:
    limit = config.rollout.sampling.max_new_tokens
    if algo.overlong is not None and algo.overlong.buffer_tokens > limit:
        problem = f"is {algo.overlong.buffer_tokens}; a response has at most {limit} tokens"
        yield Problem("algo.overlong.buffer_tokens", problem, "lower it, usually to a fifth of max_new_tokens")


def _teacher(config: RunConfig, algo: RlConfig) -> Iterator[Problem]:
    if algo.distillation is None:
        return
    path = algo.distillation.teacher_path
    if path is None:
        problem = "is null: there is nobody to learn from"
        yield Problem("algo.distillation.teacher_path", problem, "name an HF directory of the policy's shapes")
    elif not (Path(path) / "config.json").is_file():
        yield Problem("algo.distillation.teacher_path", f"{path} holds no config.json", "name an HF directory")
    sampling = config.rollout.sampling
    if algo.distillation.form == "topk" and (sampling.top_p < 1 or sampling.top_k != -1):
        problem = "topk compares whole distributions; rollout.sampling cuts them"
        yield Problem("algo.distillation.form", problem, "use sampled, or top_p=1.0 and top_k=-1")


def _sampling(config: RunConfig) -> Iterator[Problem]:
    if not isinstance(config.algo, RlConfig):
        return
    sampling = config.rollout.sampling
    fix = "use 1.0; evaluation has a sampling section of its own"
    if sampling.temperature < _GREEDY_TEMPERATURE:
        problem = f"is {sampling.temperature:g}: greedy siblings are equal and teach nothing"
        yield Problem("rollout.sampling.temperature", problem, fix)
    if sampling.top_k == 1:
        yield Problem("rollout.sampling.top_k", "is 1: greedy siblings are equal and teach nothing", "use 2 or more")
    if sampling.min_new_tokens > 0:
        problem = "forbids end tokens, which the trainer's logprobs allow: their ratios would be wrong"
        yield Problem("rollout.sampling.min_new_tokens", problem, "use 0; let the reward refuse short answers")
    if (sampling.top_p < 1 or sampling.top_k != -1) and config.algo.old_logprobs == "rollout":
        problem = "is rollout, but engines report logprobs from before top_p and top_k cut: ratios would be wrong"
        yield Problem("algo.old_logprobs", problem, "use recompute, or top_p=1.0 and top_k=-1")
    for name, model in config.topology.served_models.items():
        for group_name, group in model.server_groups.items():
            if group.env.get(_UNSCALED, "").lower() in ("1", "true"):
                where = f"topology.served_models.{name}.server_groups.{group_name}.env.{_UNSCALED}"
                yield Problem(where, "engines would report logprobs from before the temperature", "remove it")


def _sampling_ranges(config: RunConfig) -> Iterator[Problem]:
    sections = {
        "rollout.sampling": config.rollout.sampling,
        "rollout.evaluation.sampling": config.rollout.evaluation.sampling,
    }
    for where, sampling in sections.items():
        if sampling.top_k == 0 or sampling.top_k < -1:
            yield Problem(f"{where}.top_k", f"is {sampling.top_k}", "use -1 for all, or at least 1")
        if sampling.min_new_tokens > sampling.max_new_tokens:
            problem = f"is {sampling.min_new_tokens}, above max_new_tokens={sampling.max_new_tokens}"
            yield Problem(f"{where}.min_new_tokens", problem, "lower it")


def _data(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    for name in ("train_path", "eval_path"):
        path = getattr(data, name)
        if path is not None and data.tasks is None and not Path(path).is_file():
            yield Problem(f"data.{name}", f"{path} does not exist", "name an existing JSONL file, or set data.tasks")
    if data.eval_path is None and config.schedule.eval_interval > 0:
        fix = "set schedule.eval_interval=0, or give data.eval_path"
        yield Problem("schedule.eval_interval", f"is {config.schedule.eval_interval} but nothing is held out", fix)
    if data.tasks is not None and not data.tasks.datasets:
        yield Problem("data.tasks.datasets", "is empty", "name at least one reasoning-gym dataset")
    if data.tasks is not None and config.rollout.evaluation.num_prompts > data.tasks.num_eval_rows:
        fix = f"use at most {data.tasks.num_eval_rows}"
        yield Problem("rollout.evaluation.num_prompts", "is more than data.tasks.num_eval_rows", fix)


def _topology(config: RunConfig) -> Iterator[Problem]:
    topology = config.topology
    if POLICY not in topology.served_models:
        names = ", ".join(sorted(topology.served_models)) or "nothing"
        yield Problem("topology.served_models", f"holds {names}", f"name the model being trained {POLICY}")
    for name, model in topology.served_models.items():
        where = f"topology.served_models.{name}"
        if name == POLICY and not model.is_updated:
            yield Problem(f"{where}.is_updated", "is false for the model being trained", "set it true")
        if model.is_updated and model.path is not None:
            problem = "is given, but weight syncs would replace its weights by the trained model's"
            yield Problem(f"{where}.path", problem, "set it null, or is_updated=false")
        if not model.server_groups and not model.num_joining_engines:
            fix = "give a group of engines, or num_joining_engines that others register"
            yield Problem(f"{where}.server_groups", "is empty", fix)
        kinds = {group.worker_type for group in model.server_groups.values()}
        if ("prefill" in kinds) != ("decode" in kinds):
            present, missing = ("prefill", "decode") if "prefill" in kinds else ("decode", "prefill")
            problem = f"has {present} engines and no {missing} engines: no request could be answered"
            yield Problem(f"{where}.server_groups", problem, f"add a group of worker_type {missing}")
        if "regular" in kinds and kinds & {"prefill", "decode"}:
            problem = "mixes regular with prefill and decode engines, which one router cannot serve"
            yield Problem(f"{where}.server_groups", problem, "use either kind")
        for group_name, group in model.server_groups.items():
            yield from _server_group(config, f"{where}.server_groups.{group_name}", group)


def _server_group(config: RunConfig, where: str, group: ServerGroupConfig) -> Iterator[Problem]:
    is_embedded = group.engine == "embedded"
    if is_embedded and config.topology.device != "cpu":
        yield Problem(f"{where}.engine", "the embedded engine runs on CPU only", "use engine=sglang")
    if is_embedded and group.gpus_per_engine > 1:
        yield Problem(f"{where}.gpus_per_engine", "the embedded engine is one process", "use 1")
    if is_embedded and group.worker_type not in ("regular", "placeholder"):
        yield Problem(f"{where}.worker_type", "the embedded engine does all of it", "use regular, or engine=sglang")
    if group.gpus_per_engine % group.pipeline_parallel_size:
        problem = f"is {group.pipeline_parallel_size}, which does not divide gpus_per_engine={group.gpus_per_engine}"
        yield Problem(f"{where}.pipeline_parallel_size", problem, "use a divisor")
    tp = max(1, group.gpus_per_engine // group.pipeline_parallel_size)
    for name in ("attention_data_parallel_size", "expert_parallel_size"):
        if tp % getattr(group, name):
            problem = f"is {getattr(group, name)}, which does not divide the engine's TP of {tp}"
            yield Problem(f"{where}.{name}", problem, f"use {_divisors_near(getattr(group, name), tp)}")
    yield from _engine_addresses(where, group)


def _engine_addresses(where: str, group: ServerGroupConfig) -> Iterator[Problem]:
    if (group.engine == "external") != bool(group.urls):
        problem = "is empty: nobody is there" if group.engine == "external" else f"is given to engine={group.engine}"
        yield Problem(f"{where}.urls", problem, "give urls to engine=external, and to no other")
    for url in group.urls:
        if not re.fullmatch(r"https?://[^/\s:]+:\d+", url):
            yield Problem(f"{where}.urls", f"holds {url!r}", "write http://host:port")
    if group.python is not None and not Path(group.python).is_file():
        fix = "name an interpreter; `make sglang` makes .venv-sglang/bin/python"
        yield Problem(f"{where}.python", f"{group.python} does not exist", fix)


def _weight_sync(config: RunConfig) -> Iterator[Problem]:
    if config.topology.device != "cuda" or config.weight_sync.transport != "distributed":
        return
    for name, model in config.topology.served_models.items():
        shared = [key for key, group in model.server_groups.items() if group.placement == "colocated"]
        if model.is_updated and shared:
            fix = f"use weight_sync=tensor, or placement=disaggregated in topology.served_models.{name}.server_groups"
            yield Problem("weight_sync.transport", "NCCL cannot join two processes that share a GPU", fix)


def _parallel(config: RunConfig) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        yield Problem("parallel.sequence_parallel", "splits over TP, which is 1", "raise TP or set it false")
    chunks = parallel.virtual_pipeline_model_parallel_size
    if chunks is not None and chunks > 1 and parallel.pipeline_model_parallel_size == 1:
        problem = "model chunks take turns in a pipeline; pipeline_model_parallel_size is 1"
        yield Problem("parallel.virtual_pipeline_model_parallel_size", problem, "raise PP or use null")
    if parallel.optimizer_cpu_offload and config.topology.device == "cpu":
        problem = "the trainer runs on CPU: there is nowhere to offload from"
        yield Problem("parallel.optimizer_cpu_offload", problem, "use false, or topology.device=cuda")
    yield from _recompute(parallel, config.topology.device)
    for name, neutral in _UNBUILT.items():
        if getattr(parallel, name) not in neutral:
            yield Problem(f"parallel.{name}", "is not offered by the trainer yet", f"use {neutral[0]}")


def _recompute(parallel: ParallelConfig, device: str) -> Iterator[Problem]:
    granularity = parallel.recompute_granularity
    belonging = {"recompute_method": "full", "recompute_num_layers": "full", "recompute_modules": "selective"}
    for name, owner in belonging.items():
        value = getattr(parallel, name)
        if value and granularity != owner:
            fix = f"use recompute_granularity={owner}, or {'[]' if name == 'recompute_modules' else 'null'}"
            yield Problem(f"parallel.{name}", f"belongs to recompute_granularity={owner}", fix)
        if value is None and granularity == owner:
            fix = "use uniform or block" if name == "recompute_method" else "use 1, or more layers at a time"
            yield Problem(f"parallel.{name}", "is null: full recomputing needs it", fix)
    if device == "cpu" and "layernorm" in parallel.recompute_modules:
        yield Problem("parallel.recompute_modules", "layernorm needs Transformer Engine, which needs CUDA", "remove it")
    for module in parallel.recompute_modules:
        if module not in _DENSE_RECOMPUTE_MODULES:
            fix = did_you_mean(module, _DENSE_RECOMPUTE_MODULES)
            yield Problem("parallel.recompute_modules", f"these models have no {module!r} to recompute", fix)


def _determinism(config: RunConfig) -> Iterator[Problem]:
    if not config.deterministic:
        return
    if config.topology.device != "cpu":
        yield Problem("deterministic", "bit-for-bit reruns are offered on CPU only", "use topology.device=cpu")
    for name, model in config.topology.served_models.items():
        for group_name, group in model.server_groups.items():
            if group.engine != "embedded":
                where = f"topology.served_models.{name}.server_groups.{group_name}.engine"
                yield Problem(where, "results of the real SGLang on CPU depend on its batch", "use engine=embedded")


def _optimizer(config: RunConfig) -> Iterator[Problem]:
    if config.optim.min_lr > config.optim.lr:
        yield Problem("optim.min_lr", f"is {config.optim.min_lr}, above lr={config.optim.lr}", "lower it")
    total = config.schedule.num_steps * config.schedule.num_train_steps
    if config.optim.num_warmup_train_steps > total:
        problem = f"is {config.optim.num_warmup_train_steps}; the run has {total} train steps"
        yield Problem("optim.num_warmup_train_steps", problem, "lower it")


def _teacher_tokens(config: RunConfig, shapes: ModelShapes) -> Iterator[Problem]:
    distillation = config.algo.distillation if isinstance(config.algo, RlConfig) else None
    if distillation is not None and distillation.top_k > shapes.vocab_size:
        problem = f"is {distillation.top_k}; the vocabulary has {shapes.vocab_size} tokens"
        yield Problem("algo.distillation.top_k", problem, "lower it")


def _lengths(config: RunConfig, shapes: ModelShapes) -> Iterator[Problem]:
    prompt = config.data.max_prompt_tokens
    for where, sampling in (
        ("sampling", config.rollout.sampling),
        ("evaluation.sampling", config.rollout.evaluation.sampling),
    ):
        longest = prompt + sampling.max_new_tokens
        if longest > shapes.max_position_embeddings:
            room = shapes.max_position_embeddings
            problem = f"{prompt} prompt + {sampling.max_new_tokens} new tokens exceed the model's {room}"
            fix = "lower it, or data.max_prompt_tokens"
            yield Problem(f"rollout.{where}.max_new_tokens", problem, fix)
    longest = prompt + max(config.rollout.sampling.max_new_tokens, config.rollout.evaluation.sampling.max_new_tokens)
    if longest + _ENGINE_MARGIN_TOKENS > shapes.max_position_embeddings >= longest:
        room = shapes.max_position_embeddings - _ENGINE_MARGIN_TOKENS
        problem = f"{longest} tokens with the prompt; engines cut an answer at {room}, silently"
        yield Problem("rollout.sampling.max_new_tokens", problem, "lower it, or data.max_prompt_tokens")
    yield from _micro_batch(config.parallel, longest)
    for name, model in config.topology.served_models.items():
        for group_name, group in model.server_groups.items():
            held = group.sglang.get("max_total_tokens")
            if isinstance(held, int) and held < longest + _ENGINE_MARGIN_TOKENS:
                where = f"topology.served_models.{name}.server_groups.{group_name}.sglang.max_total_tokens"
                yield Problem(
                    where,
                    f"is {held}; one longest rollout has {longest} tokens",
                    f"use at least {longest + _ENGINE_MARGIN_TOKENS}",
                )


def _micro_batch(parallel: ParallelConfig, longest: int) -> Iterator[Problem]:
    cp = parallel.context_parallel_size
    multiple = compute_micro_batch_multiple(parallel.tensor_model_parallel_size, cp, parallel.sequence_parallel)
    needed = math.ceil(longest / multiple) * multiple // cp  # the multiple is one of CP
    if parallel.max_tokens_per_micro_batch < needed:
        problem = f"is {parallel.max_tokens_per_micro_batch}; the longest sample has {longest} tokens"
        yield Problem("parallel.max_tokens_per_micro_batch", problem, f"use at least {needed}")


def _divisibility(config: RunConfig, shapes: ModelShapes) -> Iterator[Problem]:
    tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "hidden_size"):
        value = getattr(shapes, name)
        if value % tp:
            where = "parallel.tensor_model_parallel_size"
            yield Problem(where, f"is {tp}, which does not divide {name}={value}", f"use {_divisors_near(tp, value)}")
    if shapes.num_layers % pp:
        fix = f"use {_divisors_near(pp, shapes.num_layers)}"
        problem = f"is {pp}, which does not divide num_layers={shapes.num_layers}"
        yield Problem("parallel.pipeline_model_parallel_size", problem, fix)
    chunks = config.parallel.virtual_pipeline_model_parallel_size or 1
    if shapes.num_layers % pp == 0 and shapes.num_layers // pp % chunks:
        layers = shapes.num_layers // pp
        fix = f"use {_divisors_near(chunks, layers)}"
        problem = f"is {chunks}, which does not divide the {layers} layers of a pipeline stage"
        yield Problem("parallel.virtual_pipeline_model_parallel_size", problem, fix)
    if shapes.num_attention_heads % shapes.num_query_groups:
        problem = (
            f"is {shapes.num_query_groups}, which does not divide num_attention_heads={shapes.num_attention_heads}"
        )
        yield Problem("model.shapes.num_query_groups", problem, "use a divisor")


_RULES = (
    _batch,
    _algorithm,
    _sampling,
    _sampling_ranges,
    _data,
    _topology,
    _weight_sync,
    _parallel,
    _determinism,
    _optimizer,
)
_SHAPE_RULES = (_lengths, _divisibility, _teacher_tokens)
