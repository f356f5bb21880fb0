"""Whether a layout can fit at all: the parts of memory that are large, roughly. Owns no promise that it does."""

from __future__ import annotations

from rlrecipes.plan.engine_costs import DEFAULT_MEMORY_FRACTION, compute_engine_kv_bytes, compute_engine_weight_bytes
from rlrecipes.plan.parameters import compute_rank_parameters, compute_stage_layers
from rlrecipes.plan.step_inputs import EngineGroup, StepInputs
from rlrecipes.plan.train_time import compute_num_shards

_TRAINER_FRACTION = 0.9
_KEPT_VALUES = 17
"""Of hidden size, that backward needs of a layer and token when nothing is recomputed and attention keeps no scores."""
_LOGIT_BYTES = 6
"""A logit in bf16 and its gradient in fp32."""
_STATE_BYTES = 12
_GRADIENT_BYTES = 4


def does_trainer_fit(inputs: StepInputs) -> bool:
    """Weights, gradients, optimizer, activations and logits of the fullest stage against nine tenths of a GPU.

    Args:
        inputs: of the step.
    """
    parallel, shapes = inputs.parallel, inputs.shapes
    ranks, expert_ranks = compute_num_shards(parallel)
    state = 0 if parallel.optimizer_cpu_offload else _STATE_BYTES
    tokens = parallel.max_tokens_per_micro_batch
    num_stages = parallel.pipeline_model_parallel_size
    split = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    token_bytes = tokens * shapes.hidden_size * inputs.dtype_bytes / split
    is_full = parallel.recompute_granularity == "full"
    logits = tokens * shapes.vocab_size / parallel.tensor_model_parallel_size * _LOGIT_BYTES
    worst = 0.0
    stages = zip(compute_rank_parameters(shapes, parallel), compute_stage_layers(shapes, parallel), strict=True)
    for number, (counts, chunks) in enumerate(stages):
        num_layers = sum(len(chunk) for chunk in chunks)
        in_flight = num_stages - number
        kept = in_flight * num_layers * (1 if is_full else _KEPT_VALUES) + (_KEPT_VALUES if is_full else 0)
        held = counts.total * (inputs.dtype_bytes + _GRADIENT_BYTES) + kept * token_bytes
        held += state * (counts.dense / ranks + counts.experts / expert_ranks)
        worst = max(worst, held + (logits if number == num_stages - 1 else 0))
    return worst <= _TRAINER_FRACTION * inputs.gpu.memory_bytes


def does_engine_fit(inputs: StepInputs, group: EngineGroup) -> bool:
    """Its weights and the KV cache of one longest rollout.

    Args:
        inputs: of the step.
        group: whose engine.
    """
    longest = inputs.max_prompt_tokens + inputs.max_new_tokens
    cache = longest * compute_engine_kv_bytes(inputs, group) / group.pipeline_parallel_size
    room = (group.native.get("mem_fraction_static") or DEFAULT_MEMORY_FRACTION) * inputs.gpu.memory_bytes
    return compute_engine_weight_bytes(inputs, group) + cache <= room
