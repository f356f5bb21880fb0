"""The trainer's layout against the model's shapes. Vocabularies are padded, so that any TP divides them."""

from __future__ import annotations

from collections.abc import Iterator

from rlrecipes.config.schema import ModelShapes, RunConfig
from rlrecipes.plan.rules.rule import Found, list_divisors_near, shape_rule

_TP = "parallel.tensor_model_parallel_size"
_PP = "parallel.pipeline_model_parallel_size"
_VPP = "parallel.virtual_pipeline_model_parallel_size"


@shape_rule(_TP, fix="use a divisor of all of them")
def tp_divides_the_model(config: RunConfig, shapes: ModelShapes) -> Iterator[Found]:
    """TP gives every rank the same heads and columns. Key and value heads are never copied."""
    tp = config.parallel.tensor_model_parallel_size
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "hidden_size"):
        value = getattr(shapes, name)
        if value % tp:
            problem = f"is {tp}, which does not divide {name}={value}"
            yield Found(_TP, problem, f"use {list_divisors_near(tp, value)}")


@shape_rule(_PP, fix="use a divisor")
def pp_divides_layers(config: RunConfig, shapes: ModelShapes) -> Iterator[Found]:
    """Every pipeline stage has the same number of layers."""
    pp = config.parallel.pipeline_model_parallel_size
    if shapes.num_layers % pp:
        fix = f"use {list_divisors_near(pp, shapes.num_layers)}"
        yield Found(_PP, f"is {pp}, which does not divide num_layers={shapes.num_layers}", fix)


@shape_rule(_VPP, fix="use a divisor")
def vpp_divides_a_stage(config: RunConfig, shapes: ModelShapes) -> Iterator[Found]:
    """Every model chunk of a stage has the same number of layers."""
    pp, chunks = config.parallel.pipeline_model_parallel_size, config.parallel.virtual_pipeline_model_parallel_size or 1
    layers = shapes.num_layers // pp
    if shapes.num_layers % pp == 0 and layers % chunks:
        problem = f"is {chunks}, which does not divide the {layers} layers of a pipeline stage"
        yield Found(_VPP, problem, f"use {list_divisors_near(chunks, layers)}")


@shape_rule("model.shapes.num_query_groups", fix="use a divisor")
def groups_divide_heads(config: RunConfig, shapes: ModelShapes) -> Iterator[Found]:
    """Every key and value head serves the same number of query heads."""
    if shapes.num_attention_heads % shapes.num_query_groups:
        problem = (
            f"is {shapes.num_query_groups}, which does not divide num_attention_heads={shapes.num_attention_heads}"
        )
        yield Found("model.shapes.num_query_groups", problem)


RULES = (tp_divides_the_model, pp_divides_layers, vpp_divides_a_stage, groups_divide_heads)
