"""How the trainer is split (conf/parallel)."""

from __future__ import annotations

from typing import Literal

from rlrecipes.config.schema.section import Count, NativeOptions, PositiveInt, Section


class ParallelConfig(Section):
    """How the trainer is split (conf/parallel)."""

    tensor_model_parallel_size: Count
    """TP."""
    pipeline_model_parallel_size: Count
    """PP."""
    virtual_pipeline_model_parallel_size: Count | None
    """VPP: model chunks of one rank, which shorten the pipeline's bubble; null: one."""
    context_parallel_size: Count
    """CP: each sequence is spread over so many ranks."""
    data_parallel_size: Count
    """DP; ranks = TP x PP x CP x DP."""
    expert_model_parallel_size: Count
    """EP: experts are spread over so many ranks of TP x CP x DP."""
    expert_tensor_parallel_size: Count | None
    """ETP: each expert is split over so many ranks; null: TP."""
    sequence_parallel: bool
    """SP: whether activations outside attention are split over TP."""
    recompute_granularity: Literal["selective", "full"] | None
    """What backward computes again instead of keeping it: parts of a layer, whole layers, or (null) nothing."""
    recompute_method: Literal["uniform", "block"] | None
    """Of full. uniform: every recompute_num_layers layers are one block. block: the first so many layers of a stage."""
    recompute_num_layers: PositiveInt | None
    """Of full."""
    recompute_modules: tuple[str, ...]
    """Of selective: core_attn, mlp, moe, layernorm ..., Megatron's names; empty: core_attn."""
    optimizer_cpu_offload: bool
    """Whether optimizer states and fp32 weights live in the host's memory, and Adam runs there."""
    max_tokens_per_micro_batch: PositiveInt
    """Packed tokens of one micro-batch on one rank (times CP); also the longest trainable sample."""
    num_threads: PositiveInt
    """CPU threads of each trainer rank."""
    megatron: NativeOptions
    """Fields of Megatron's TransformerConfig, OptimizerConfig and DistributedDataParallelConfig, by their own names."""
