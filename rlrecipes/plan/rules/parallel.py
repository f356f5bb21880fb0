"""How the trainer is split, apart from what the model's shapes say of it."""

from __future__ import annotations

from collections.abc import Iterator

from rlrecipes.config.schema import RunConfig
from rlrecipes.plan.rules.rule import Found, rule
from rlrecipes.suggest import did_you_mean

_DENSE_RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp")


@rule("parallel.expert_tensor_parallel_size", fix="use 1")
def experts_are_whole_on_cpu(config: RunConfig) -> Iterator[Found]:
    """Ranks that split an expert gather unequal numbers of tokens, which gloo cannot."""
    parallel = config.parallel
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    if config.topology.device == "cpu" and parallel.expert_model_parallel_size > 1 and etp > 1:
        problem = f"is {etp}: on CPU, experts that are spread over ranks cannot be split as well"
        yield Found("parallel.expert_tensor_parallel_size", problem)


@rule("parallel.sequence_parallel", fix="raise TP or set it false")
def sequence_parallel_has_tp(config: RunConfig) -> Iterator[Found]:
    """SP splits activations over the TP ranks."""
    if config.parallel.sequence_parallel and config.parallel.tensor_model_parallel_size == 1:
        yield Found("parallel.sequence_parallel", "splits over TP, which is 1")


@rule("parallel.virtual_pipeline_model_parallel_size", fix="raise PP or use null")
def model_chunks_have_a_pipeline(config: RunConfig) -> Iterator[Found]:
    """Model chunks take turns between stages."""
    chunks = config.parallel.virtual_pipeline_model_parallel_size
    if chunks is not None and chunks > 1 and config.parallel.pipeline_model_parallel_size == 1:
        problem = "model chunks take turns in a pipeline; pipeline_model_parallel_size is 1"
        yield Found("parallel.virtual_pipeline_model_parallel_size", problem)


@rule("parallel.optimizer_cpu_offload", fix="use false, or topology.device=cuda")
def offload_has_somewhere_to_go(config: RunConfig) -> Iterator[Found]:
    """Offloading moves the optimizer and float32 weights from a GPU to the host."""
    if not config.parallel.optimizer_cpu_offload:
        return
    if config.topology.device == "cpu":
        problem = "the trainer runs on CPU: there is nowhere to offload from"
        yield Found("parallel.optimizer_cpu_offload", problem)
    elif config.model.dtype == "float32":
        problem = "the host would keep float32 weights of a bfloat16 model; this one is float32"
        yield Found("parallel.optimizer_cpu_offload", problem, "use false, or model.dtype=bfloat16")


@rule(
    "parallel.recompute_method",
    "parallel.recompute_num_layers",
    "parallel.recompute_modules",
    fix="give full its method and number of layers, selective its modules, and neither the other's",
)
def recomputing_is_said_once(config: RunConfig) -> Iterator[Found]:
    """Whole layers are chosen by method and number, parts of a layer by name; options of the other would do nothing."""
    granularity = config.parallel.recompute_granularity
    belonging = {"recompute_method": "full", "recompute_num_layers": "full", "recompute_modules": "selective"}
    for name, owner in belonging.items():
        value = getattr(config.parallel, name)
        if value and granularity != owner:
            fix = f"use recompute_granularity={owner}, or {'[]' if name == 'recompute_modules' else 'null'}"
            yield Found(f"parallel.{name}", f"belongs to recompute_granularity={owner}", fix)
        if value is None and granularity == owner:
            fix = "use uniform or block" if name == "recompute_method" else "use 1, or more layers at a time"
            yield Found(f"parallel.{name}", "is null: full recomputing needs it", fix)


@rule("parallel.recompute_modules", fix="name modules that the model has and the device can recompute")
def recomputed_modules_exist(config: RunConfig) -> Iterator[Found]:
    """What a model lacks would be recomputed silently never; layernorm is Transformer Engine's, which needs CUDA."""
    for module in config.parallel.recompute_modules:
        if module not in _DENSE_RECOMPUTE_MODULES:
            fix = did_you_mean(module, _DENSE_RECOMPUTE_MODULES)
            yield Found("parallel.recompute_modules", f"these models have no {module!r} to recompute", fix)
        elif module == "layernorm" and config.topology.device == "cpu":
            yield Found(
                "parallel.recompute_modules", "layernorm needs Transformer Engine, which needs CUDA", "remove it"
            )


RULES = (
    experts_are_whole_on_cpu,
    sequence_parallel_has_tp,
    model_chunks_have_a_pipeline,
    offload_has_somewhere_to_go,
    recomputing_is_said_once,
    recomputed_modules_exist,
)
