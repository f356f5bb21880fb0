"""(recipe, cluster) -> Plan, or every problem at once. Pure: reads config.json and file existence, starts nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rlrecipes.config.origins import Origins, origin_of, read_default_files
from rlrecipes.config.schema import CriticConfig, ModelConfig, ModelShapes, RlConfig, RunConfig, ScheduleConfig
from rlrecipes.errors import ConfigError, Problem, name_rule
from rlrecipes.plan.cluster import to_cluster_node
from rlrecipes.plan.difference import flatten
from rlrecipes.plan.facts import find_obstacles, read_shapes
from rlrecipes.plan.memory import compute_memory, find_memory_problems, find_served_engines, load_memory_constants
from rlrecipes.plan.memory_nodes import MemoryNode
from rlrecipes.plan.native import judge_native
from rlrecipes.plan.nodes import (
    PLAN_VERSION,
    BatchNode,
    ClusterNode,
    CriticNode,
    HostNode,
    ModelNode,
    Plan,
    TrainerNode,
)
from rlrecipes.plan.parameters import compute_flops_per_token, compute_num_parameters
from rlrecipes.plan.passes import find_logprob_passes
from rlrecipes.plan.placement import Placement, place
from rlrecipes.plan.rules.lengths import compute_longest_sample
from rlrecipes.plan.rules.rule import Facts
from rlrecipes.plan.rules.table import check_recipe
from rlrecipes.plan.serving import build_served_models, build_sync_routes
from rlrecipes.plan.step_inputs import StepInputs, to_step_inputs
from rlrecipes.plan.step_time import compute_step_time, load_time_constants
from rlrecipes.plan.time_constants import TimeConstants

_LAYOUT = ("topology", "parallel", "model", "cluster", "calibration")
"""Where something wrong leaves nothing to predict from."""


def resolve(
    config: RunConfig,
    hosts: tuple[HostNode, ...],
    origins: Mapping[str, str],
    earlier: Sequence[Problem] = (),
    others: Sequence[Problem] = (),
    cluster: ClusterNode | None = None,
    notes: Sequence[str] = (),
    choices: Mapping[str, str] = MappingProxyType({}),
) -> Plan:
    """Resolve a recipe into a Plan.

    Args:
        config: a valid recipe.
        hosts: the machines of the cluster; none where they could not be told, which is among the problems.
        origins: dotted path -> where it was set.
        earlier: problems of single values, to be told with those found here; defaults stand in for them.
        others: problems found elsewhere, of parts that this room cannot see; they get their origin here.
        cluster: settled; None: as the recipe says.
        notes: of what was settled elsewhere.
        choices: group -> option, for the record.

    Raises:
        ConfigError: every problem found.
    """
    model_problems: list[Problem] = []
    shapes, is_random = read_shapes(config.model, model_problems)
    native = judge_native(config)
    placement_problems: list[Problem] = []
    placement = place(config, hosts, placement_problems) if hosts else Placement()
    cluster = cluster or to_cluster_node(config.cluster)
    problems = [
        *others,
        *name_rule(model_problems, "model_facts"),
        *name_rule(native.problems, "native_options"),
        *name_rule(placement_problems, "placement"),
    ]
    problems += check_recipe(Facts(config, shapes, hosts, cluster, placement))
    constants = _read_constants(config, problems)
    is_laid_out = not any(problem.where.startswith(_LAYOUT) for problem in (*earlier, *problems))
    is_priced = constants is not None and placement.trainer and is_laid_out
    inputs = to_step_inputs(config, shapes, cluster, placement) if shapes is not None and is_priced else None
    memory = _predict_memory(config, inputs, placement, problems) if inputs is not None else None
    if earlier or problems or shapes is None:
        wrong = {problem.where for problem in earlier}
        found = [dataclasses.replace(p, origin=origin_of(dict(origins), p.where)) for p in problems]
        raise ConfigError.from_problems([*earlier, *(p for p in found if p.where not in wrong)])
    served = build_served_models(config, placement)
    model = _model(config.model, shapes, is_random, config.run_dir)
    return Plan(
        version=PLAN_VERSION,
        name=config.name,
        run_dir=config.run_dir,
        runs_dir=config.runs_dir,
        resume=config.resume,
        seed=config.seed,
        is_deterministic=config.deterministic,
        cluster=cluster,
        hosts=hosts,
        model=model,
        algo=config.algo,
        batch=_batch(config),
        trainer=_trainer(config, placement),
        should_offload_trainer=config.topology.should_offload_trainer,
        should_offload_engines=config.topology.should_offload_engines,
        served_models=served,
        weight_sync=config.weight_sync,
        sync_routes=build_sync_routes(config, served),
        data=config.data,
        reward=config.reward,
        rollout=config.rollout,
        schedule=config.schedule,
        tracking=config.tracking,
        pruner=config.pruner,
        notes=(*_notes(config), *_obstacles(model), *notes, *placement.notes, *native.notes),
        memory=memory,
        step_time=compute_step_time(inputs, constants, config.calibration) if inputs and constants else None,
        changes=_changes(config, dict(origins)),
        choices=dict(choices),
        provenance=dict(origins),
    )


def _read_constants(config: RunConfig, problems: list[Problem]) -> TimeConstants | None:
    """Constants of the predictions; None where nothing is predicted, or the recipe's file is wrong."""
    try:
        is_needed = config.topology.device == "cuda" or config.calibration is not None
        return load_time_constants(config.calibration) if is_needed else None
    except ConfigError as error:
        problems += name_rule(error.problems, "calibration")
        return None


def _predict_memory(config: RunConfig, inputs: StepInputs, placement: Placement, problems: list[Problem]) -> MemoryNode:
    """Memory of every GPU; what does not fit is a problem."""
    constants = load_memory_constants(config.calibration)
    served = find_served_engines(config, inputs.shapes, placement)
    memory = compute_memory(inputs, constants, served)
    problems += name_rule(find_memory_problems(inputs, constants, memory, served), "memory")
    return memory


def _changes(config: RunConfig, origins: Origins) -> dict[str, Any]:
    defaults = read_default_files()
    leaves = flatten(config.model_dump(mode="json"))
    return {path: value for path, value in leaves if origin_of(origins, path).rpartition(":")[0] not in defaults}


def _model(model: ModelConfig, shapes: ModelShapes, is_random: bool, run_dir: str) -> ModelNode:
    return ModelNode(
        name=model.name,
        family=model.family,
        path=model.path or (f"{run_dir}/initial" if is_random else ""),
        is_random=is_random,
        init_seed=model.init_seed,
        alphabet=model.alphabet,
        shapes=shapes,
        dtype=model.dtype,
        num_parameters=compute_num_parameters(shapes),
        flops_per_token=compute_flops_per_token(shapes),
    )


def _obstacles(model: ModelNode) -> list[str]:
    return [f"{problem.where} {problem.problem}; {problem.fix}" for problem in find_obstacles(model)]


def _batch(config: RunConfig) -> BatchNode:
    prompts, parts = config.schedule.prompts_per_step, config.schedule.num_train_steps
    group = config.algo.group_size if isinstance(config.algo, RlConfig) else 1
    return BatchNode(
        prompts_per_step=prompts,
        group_size=group,
        rollouts_per_step=prompts * group,
        num_train_steps=parts,
        prompts_per_train_step=prompts // parts,
        rollouts_per_train_step=prompts // parts * group,
        max_sample_tokens=compute_longest_sample(config),
    )


def _trainer(config: RunConfig, placement: Placement) -> TrainerNode:
    parallel, schedule = config.parallel, config.schedule
    algo = config.algo if isinstance(config.algo, RlConfig) else None
    critic = algo.critic if algo is not None else None
    num_policy_steps = schedule.num_steps - (critic.num_warmup_steps if critic else 0)
    return TrainerNode(
        device=config.topology.device,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        data_parallel_size=parallel.data_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        recompute_granularity=parallel.recompute_granularity,
        recompute_method=parallel.recompute_method,
        recompute_num_layers=parallel.recompute_num_layers,
        recompute_modules=parallel.recompute_modules,
        optimizer_cpu_offload=parallel.optimizer_cpu_offload,
        max_tokens_per_micro_batch=parallel.max_tokens_per_micro_batch,
        num_threads=parallel.num_threads,
        is_deterministic=config.deterministic,
        needs_reference=algo is not None and "reference" in find_logprob_passes(algo, schedule.num_train_steps),
        seed=config.seed,
        temperature=config.rollout.sampling.temperature if algo is not None else 1.0,
        top_p=config.rollout.sampling.top_p if algo is not None else 1.0,
        top_k=config.rollout.sampling.top_k if algo is not None else -1,
        num_train_steps_total=num_policy_steps * schedule.num_train_steps,
        optim=config.optim,
        teacher_path=algo.distillation.teacher_path if algo is not None and algo.distillation else None,
        critic=_critic(critic, schedule) if critic else None,
        megatron=parallel.megatron,
        devices=placement.trainer,
    )


def _critic(critic: CriticConfig, schedule: ScheduleConfig) -> CriticNode:
    return CriticNode(
        path=critic.path,
        optim=critic.optim,
        num_train_steps_total=schedule.num_steps * schedule.num_train_steps,
    )


def _notes(config: RunConfig) -> list[str]:
    notes = []
    algo = config.algo
    if isinstance(algo, RlConfig):
        sampling = config.rollout.sampling
        if sampling.top_p < 1 or sampling.top_k != -1:
            notes.append(
                "top_p or top_k cuts the distribution: logprobs, entropy and KL are of the tokens that are kept, found "
                "again from the trainer's logits; a sampled token always counts as kept"
            )
        if config.schedule.num_train_steps == 1 and algo.old_logprobs == "recompute":
            notes.append("one train step per step on its own weights: the ratio is 1 and clipping cannot act")
        if algo.name == "dapo" and not config.rollout.filters:
            notes.append("DAPO's dynamic sampling is off: rollout.filters=[nonzero_variance] turns it on")
        if algo.kl.placement != "none" and algo.kl.coef == 0:
            notes.append("kl.coef is 0: the KL to the reference is only measured, at the price of one forward pass")
    if config.data.eval_path is None:
        notes.append("nothing is held out: the run cannot say whether it generalises")
    if config.pruner is not None and config.tracking.sweep is None:
        notes.append("pruner stops points of a sweep; a run by itself goes to its end")
    if config.weight_sync.verify_interval == 0:
        notes.append("weight syncs are not verified: a tensor that arrives wrong will not be noticed")
    return notes
