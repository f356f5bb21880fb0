"""How many parameters a model has, in all, for one token, and on one trainer rank. Owns Megatron's way of splitting.

A parameter is either split over TP, or whole on every TP rank, or part of a routed expert, which is split over EP and
ETP. All counts are exact: what megatron-core builds, padding of the vocabulary included.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlrecipes.config.schema import ModelShapes, ParallelConfig

VOCABULARY_MULTIPLE = 128


def compute_padded_vocab_size(vocab_size: int, tensor_model_parallel_size: int) -> int:
    """Rows of the embedding: a multiple of 128 that TP divides.

    For the usual TP (a power of 2 up to 128) it does not depend on TP, so a checkpoint keeps its shapes.

    Args:
        vocab_size: rows that are no padding.
        tensor_model_parallel_size: TP.
    """
    multiple = math.lcm(VOCABULARY_MULTIPLE, tensor_model_parallel_size)
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Counts:
    """Parameters by how they are split.

    Attributes:
        split: over TP.
        whole: on every TP rank.
        experts: of routed experts, over EP x ETP.
    """

    split: int = 0
    whole: int = 0
    experts: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.split + other.split, self.whole + other.whole, self.experts + other.experts)

    @property
    def total(self) -> int:
        """All of them, each once."""
        return self.split + self.whole + self.experts


@dataclass(frozen=True, slots=True)
class RankCounts:
    """Parameters that one trainer rank holds.

    Attributes:
        dense: all but routed experts; their state is sharded over DP x CP.
        experts: of routed experts; their state is sharded over the ranks that hold the same ones.
    """

    dense: int
    experts: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts


def is_linear_layer(shapes: ModelShapes, layer: int) -> bool:
    """Whether a layer has a gated delta net instead of attention.

    Args:
        shapes: the model.
        layer: from 0.
    """
    return shapes.linear_attention_freq is not None and (layer + 1) % shapes.linear_attention_freq != 0


def is_moe_layer(shapes: ModelShapes, layer: int) -> bool:
    """Whether a layer has experts.

    Args:
        shapes: the model.
        layer: from 0.
    """
    return shapes.num_moe_experts is not None and layer >= shapes.first_dense_layers


def has_indexer(shapes: ModelShapes, layer: int) -> bool:
    """Whether a layer chooses by an indexer of its own what a token attends to.

    Args:
        shapes: the model.
        layer: from 0.
    """
    if shapes.dsa_indexer_n_heads is None:
        return False
    offset = max(shapes.dsa_indexer_skip_topk_offset, 1)
    return max(layer + 1 - offset, 0) % shapes.dsa_indexer_topk_freq == 0


def _count_attention(shapes: ModelShapes) -> Counts:
    width, head = shapes.hidden_size, shapes.kv_channels
    query, key = shapes.num_attention_heads * head, shapes.num_query_groups * head
    rows = query * (1 + shapes.attention_output_gate) + 2 * key
    split = width * (rows + query) + rows * shapes.add_qkv_bias
    return Counts(split=split, whole=2 * head * shapes.qk_layernorm)


def _count_latent_attention(shapes: ModelShapes) -> Counts:
    """MLA; its down-projections are whole on every TP rank, as Transformer Engine's layers have them."""
    width, heads = shapes.hidden_size, shapes.num_attention_heads
    latent, position = shapes.kv_lora_rank or 0, shapes.qk_pos_emb_head_dim or 0
    key, value = shapes.qk_head_dim or 0, shapes.v_head_dim or 0
    query_latent = shapes.q_lora_rank or 0
    split = (query_latent or width) * heads * (key + position) + latent * heads * (key + value) + heads * value * width
    whole = width * (query_latent + latent + position) + (query_latent + latent) * shapes.qk_layernorm
    return Counts(split=split, whole=whole)


def _count_indexer(shapes: ModelShapes) -> Counts:
    heads, head, width = shapes.dsa_indexer_n_heads or 0, shapes.dsa_indexer_head_dim or 0, shapes.hidden_size
    return Counts(whole=(shapes.q_lora_rank or width) * heads * head + width * (head + heads) + 2 * head)


def _count_delta_net(shapes: ModelShapes) -> Counts:
    key = (shapes.linear_num_key_heads or 0) * (shapes.linear_key_head_dim or 0)
    heads, head = shapes.linear_num_value_heads or 0, shapes.linear_value_head_dim or 0
    value, width = heads * head, shapes.hidden_size
    split = width * (2 * key + 2 * value + 2 * heads) + value * width
    split += (shapes.linear_conv_kernel_dim or 0) * (2 * key + value) + 2 * heads
    return Counts(split=split, whole=head)


def _count_mlp(shapes: ModelShapes) -> Counts:
    return Counts(split=3 * shapes.hidden_size * shapes.ffn_hidden_size)


def _count_moe(shapes: ModelShapes) -> Counts:
    width, experts = shapes.hidden_size, shapes.num_moe_experts or 0
    shared = shapes.moe_shared_expert_intermediate_size or 0
    return Counts(
        split=3 * width * shared,
        whole=experts * width + width * shapes.moe_shared_expert_gate,
        experts=experts * 3 * width * (shapes.moe_ffn_hidden_size or 0),
    )


def count_layer(shapes: ModelShapes, layer: int) -> Counts:
    """Parameters of one transformer layer.

    Args:
        shapes: the model.
        layer: from 0.
    """
    if is_linear_layer(shapes, layer):
        attention = _count_delta_net(shapes)
    elif shapes.multi_latent_attention:
        attention = _count_latent_attention(shapes)
    else:
        attention = _count_attention(shapes)
    if has_indexer(shapes, layer):
        attention += _count_indexer(shapes)
    num_norms = 2 + shapes.post_self_attn_layernorm + shapes.post_mlp_layernorm
    mlp = _count_moe(shapes) if is_moe_layer(shapes, layer) else _count_mlp(shapes)
    return attention + mlp + Counts(whole=num_norms * shapes.hidden_size)


@functools.lru_cache(maxsize=64)
def _count_layers(shapes: ModelShapes) -> tuple[Counts, ...]:
    return tuple(count_layer(shapes, layer) for layer in range(shapes.num_layers))


def _count_prediction_layers(shapes: ModelShapes) -> Counts:
    """Multi-token prediction: each joins two inputs, has a layer like the last one, and norms of its own."""
    if shapes.mtp_num_layers is None:
        return Counts()
    width = shapes.hidden_size
    one = count_layer(shapes, shapes.num_layers - 1) + Counts(split=2 * width * width, whole=3 * width)
    return Counts(*(shapes.mtp_num_layers * part for part in (one.split, one.whole, one.experts)))


def compute_num_parameters(shapes: ModelShapes) -> int:
    """All parameters, embedding included, tied weights once, without padding.

    Args:
        shapes: the model.
    """
    embeddings = shapes.vocab_size * shapes.hidden_size * (1 + shapes.untie_embeddings_and_output_weights)
    layers = sum(counts.total for counts in _count_layers(shapes)) + _count_prediction_layers(shapes).total
    return layers + embeddings + shapes.hidden_size


def compute_num_active_parameters(shapes: ModelShapes) -> int:
    """Parameters that one token meets: all, but for the experts it is not sent to.

    Args:
        shapes: the model.
    """
    if shapes.num_moe_experts is None:
        return compute_num_parameters(shapes)
    experts = sum(counts.experts for counts in _count_layers(shapes)) + _count_prediction_layers(shapes).experts
    asleep = shapes.num_moe_experts - (shapes.moe_router_topk or 0)
    return compute_num_parameters(shapes) - experts * asleep // shapes.num_moe_experts


def compute_flops_per_token(shapes: ModelShapes) -> float:
    """Floating-point operations of forward and backward per token: 6 per weight that multiplies.

    The embedding lookup multiplies nothing, the output layer does, once more for each prediction layer; attention's
    quadratic part is left out.

    Args:
        shapes: the model.
    """
    embedding = shapes.vocab_size * shapes.hidden_size
    lookup = embedding if shapes.untie_embeddings_and_output_weights else 0
    return 6.0 * (compute_num_active_parameters(shapes) - lookup + embedding * (shapes.mtp_num_layers or 0))


def compute_stage_layers(shapes: ModelShapes, parallel: ParallelConfig) -> tuple[tuple[range, ...], ...]:
    """Which layers each pipeline stage holds, model chunk by model chunk.

    Megatron's own options for uneven stages are heeded: num_layers_in_first_pipeline_stage, ..._last_...,
    account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split.

    Args:
        shapes: the model.
        parallel: the trainer's layout; PP x VPP divides the layers.

    Returns:
        [stage][chunk], layers from 0.
    """
    num_stages = parallel.pipeline_model_parallel_size
    num_chunks = (parallel.virtual_pipeline_model_parallel_size or 1) if num_stages > 1 else 1
    sizes = [size // num_chunks for size in _stage_sizes(shapes.num_layers, num_stages, parallel.megatron)]
    stages: list[list[range]] = [[] for _ in sizes]
    start = 0
    for chunk in range(num_chunks):
        for stage, size in enumerate(sizes):
            is_first = chunk == 0 and stage == 0
            is_last = chunk == num_chunks - 1 and stage == num_stages - 1
            size -= is_first and bool(parallel.megatron.get("account_for_embedding_in_pipeline_split"))
            size -= is_last and bool(parallel.megatron.get("account_for_loss_in_pipeline_split"))
            stages[stage].append(range(start, start + size))
            start += size
    return tuple(tuple(chunks) for chunks in stages)


def _stage_sizes(num_layers: int, num_stages: int, native: Mapping[str, Any]) -> Sequence[int]:
    first = native.get("num_layers_in_first_pipeline_stage")
    last = native.get("num_layers_in_last_pipeline_stage")
    if num_stages == 1 or (first is None and last is None):
        extra = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
        return [(num_layers + sum(bool(native.get(name)) for name in extra)) // num_stages] * num_stages
    between = num_stages - (first is not None) - (last is not None)
    size = (num_layers - (first or 0) - (last or 0)) // between if between else 0
    return [*([first] if first is not None else []), *[size] * between, *([last] if last is not None else [])]


def compute_rank_parameters(shapes: ModelShapes, parallel: ParallelConfig) -> tuple[RankCounts, ...]:
    """Parameters that a trainer rank of each pipeline stage holds; all ranks of a stage hold as many.

    The first stage has the embedding; the last one the output layer (a copy of the embedding, where the two are tied
    and on different stages), the final norm, and prediction layers with the embedding that these read.

    Args:
        shapes: the model.
        parallel: the trainer's layout.
    """
    counts = _count_layers(shapes)
    stages = [
        _sum(counts[layer] for chunk in chunks for layer in chunk) for chunks in compute_stage_layers(shapes, parallel)
    ]
    tp = parallel.tensor_model_parallel_size
    embedding = Counts(split=compute_padded_vocab_size(shapes.vocab_size, tp) * shapes.hidden_size)
    stages[0] += embedding
    if shapes.untie_embeddings_and_output_weights or len(stages) > 1:
        stages[-1] += embedding
    stages[-1] += Counts(whole=shapes.hidden_size) + _count_prediction_layers(shapes)
    if shapes.mtp_num_layers and len(stages) > 1:
        stages[-1] += embedding
    experts_over = parallel.expert_model_parallel_size * (parallel.expert_tensor_parallel_size or tp)
    return tuple(RankCounts(stage.split // tp + stage.whole, stage.experts // experts_over) for stage in stages)


def compute_critic_parameters(shapes: ModelShapes, parallel: ParallelConfig) -> tuple[RankCounts, ...]:
    """Of a critic, as :func:`compute_rank_parameters`: the policy's, with a head of one row instead of an output layer.

    Args:
        shapes: of the policy.
        parallel: the trainer's layout.
    """
    *others, last = compute_rank_parameters(shapes, parallel)
    if shapes.untie_embeddings_and_output_weights or others:
        tp = parallel.tensor_model_parallel_size
        output = compute_padded_vocab_size(shapes.vocab_size, tp) * shapes.hidden_size // tp
        last = RankCounts(last.dense - output + shapes.hidden_size, last.experts)
    return (*others, last)


def _sum(counts: Iterable[Counts]) -> Counts:
    total = Counts()
    for one in counts:
        total += one
    return total
