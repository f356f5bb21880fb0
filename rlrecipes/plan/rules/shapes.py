"""The trainer's layout against the model's shapes. Vocabularies are padded, so that any TP divides them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlrecipes.config.schema import ModelShapes, RunConfig
from rlrecipes.plan.parameters import compute_stage_layers
from rlrecipes.plan.rules.rule import Found, list_divisors_near, shape_rule

_TP = "parallel.tensor_model_parallel_size"
_PP = "parallel.pipeline_model_parallel_size"
_VPP = "parallel.virtual_pipeline_model_parallel_size"
_CP = "parallel.context_parallel_size"
_EP = "parallel.expert_model_parallel_size"
_ETP = "parallel.expert_tensor_parallel_size"


@shape_rule(_TP, fix="use a divisor of all of them")
def tp_divides_the_model(config: RunConfig, shapes: ModelShapes) -> Iterator[Found]:
    """TP gives every rank the same heads and columns. Key and value heads are never copied."""
    tp = config.parallel.tensor_model_parallel_size
    names = ["num_attention_heads", "num_query_groups", "hidden_size", "moe_shared_expert_intermediate_size"]
    if shapes.num_moe_experts is None or shapes.first_dense_layers:
        names.append("ffn_hidden_size")
    for name in names:
        value = getattr(shapes, name)
        if value is not None and value % tp:
            problem = f"is {tp}, which does not divide {name}={value}"
            yield Found(_TP, problem, f"use {list_divisors_near(tp, value)}")


@shape_rule(_TP, _CP, fix="lower TP or CP")
def tp_and_cp_divide_linear_heads(config: RunConfig, shapes: ModelShapes) -> Iterator[Found]:
    """A gated delta net spreads its heads over TP and CP: it reads a sequence from its start."""
    tp, cp = config.parallel.tensor_model_parallel_size, config.parallel.context_parallel_size
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        value = getattr(shapes, name)
        if shapes.linear_attention_freq is not None and value is not None and value % (tp * cp):
            problem = f"is {cp if cp > 1 else tp}: TP x CP = {tp * cp} does not divide {name}={value}"
            yield Found(_CP if cp > 1 else _TP, problem)


@shape_rule(_PP, fix="use a divisor")
def pp_divides_layers(config: RunConfig, shapes: ModelShapes) -> Iterator[Found]:
    """Every pipeline stage has the same number of layers, but where Megatron's own options say what is in the ends."""
    pp = config.parallel.pipeline_model_parallel_size
    whole = config.parallel.model_copy(update={"virtual_pipeline_model_parallel_size": None})
    sizes = [sum(map(len, chunks)) for chunks in compute_stage_layers(shapes, whole)]
    if sum(sizes) == shapes.num_layers and min(sizes) > 0:
        return
    even = list_divisors_near(pp, shapes.num_layers)
    last = shapes.num_layers - (pp - 1) * math.ceil(shapes.num_layers / pp)
    fix = f"use {even}"
    if last > 0:
        fix += f", or +parallel.megatron.num_layers_in_last_pipeline_stage={last}"
    yield Found(_PP, f"is {pp}, which does not divide num_layers={shapes.num_layers}", fix)


@shape_rule(_VPP, fix="use a divisor")
def vpp_divides_a_stage(config: RunConfig, shapes: ModelShapes) -> Iterator[Found]:
    """Every model chunk of a stage has the same number of layers."""
    pp, chunks = config.parallel.pipeline_model_parallel_size, config.parallel.virtual_pipeline_model_parallel_size or 1
    layers = shapes.num_layers // pp
    if shapes.num_layers % pp == 0 and layers % chunks:
        problem = f"is {chunks}, which does not divide the {layers} layers of a pipeline stage"
        yield Found(_VPP, problem, f"use {list_divisors_near(chunks, layers)}")


@shape_rule(_EP, fix="use a divisor of the experts, 1 without any")
def ep_divides_experts(config: RunConfig, shapes: ModelShapes) -> Iterator[Found]:
    """EP gives every rank the same number of whole experts."""
    ep, experts = config.parallel.expert_model_parallel_size, shapes.num_moe_experts
    if ep > 1 and (experts is None or experts % ep):
        fix = f"use {list_divisors_near(ep, experts)}" if experts else "use 1"
        yield Found(_EP, f"is {ep}; the model has {experts or 'no'} experts", fix)


@shape_rule(_ETP, fix="use a divisor, such as 1")
def etp_divides_an_expert(config: RunConfig, shapes: ModelShapes) -> Iterator[Found]:
    """ETP gives every rank the same columns of an expert."""
    parallel, width = config.parallel, shapes.moe_ffn_hidden_size
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    if shapes.num_moe_experts is None and (parallel.expert_tensor_parallel_size or 1) > 1:
        yield Found(_ETP, f"is {etp}; the model has no experts", "use null")
    if shapes.num_moe_experts is not None and width is not None and width % etp:
        fix = f"use {list_divisors_near(etp, width)}"
        yield Found(_ETP, f"is {etp}, which does not divide moe_ffn_hidden_size={width}", fix)


@shape_rule(_EP, fix="lower EP or ETP, or raise data_parallel_size")
def expert_layout_fills_a_stage(config: RunConfig, shapes: ModelShapes) -> Iterator[Found]:
    """The ranks of a pipeline stage are TP x CP x DP for attention and EP x ETP x their own DP for experts."""
    parallel = config.parallel
    tp, ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    ranks = tp * parallel.context_parallel_size * parallel.data_parallel_size
    etp = parallel.expert_tensor_parallel_size or tp
    if shapes.num_moe_experts is not None and ranks % (ep * etp):
        yield Found(_EP, f"is {ep}: EP x ETP = {ep * etp} does not divide the {ranks} ranks of a pipeline stage")


@shape_rule("parallel.sequence_parallel", fix="set it true, or use TP=1")
def experts_under_tp_have_sp(config: RunConfig, shapes: ModelShapes) -> Iterator[Found]:
    """Without SP each TP rank would send the same tokens to the experts; Megatron refuses to train so."""
    parallel = config.parallel
    if shapes.num_moe_experts and parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield Found("parallel.sequence_parallel", "is false; a model with experts needs it where TP is above 1")


@shape_rule("model.shapes.num_query_groups", fix="use a divisor")
def groups_divide_heads(config: RunConfig, shapes: ModelShapes) -> Iterator[Found]:
    """Every key and value head serves the same number of query heads."""
    heads, groups = shapes.num_attention_heads, shapes.num_query_groups
    if heads % groups:
        yield Found("model.shapes.num_query_groups", f"is {groups}, which does not divide num_attention_heads={heads}")


RULES = (
    tp_divides_the_model,
    tp_and_cp_divide_linear_heads,
    pp_divides_layers,
    vpp_divides_a_stage,
    ep_divides_experts,
    etp_divides_an_expert,
    expert_layout_fills_a_stage,
    experts_under_tp_have_sp,
    groups_divide_heads,
)
