"""How the trainer is split (conf/parallel)."""

from __future__ import annotations

from rlrecipes.config.schema.section import NativeOptions, PositiveInt, Section


class ParallelConfig(Section):
    """How the trainer is split (conf/parallel)."""

    tensor_model_parallel_size: PositiveInt
    """TP."""
    pipeline_model_parallel_size: PositiveInt
    """PP."""
    data_parallel_size: PositiveInt
    """DP; ranks = TP x PP x DP."""
    sequence_parallel: bool
    """Whether activations outside attention are split over TP."""
    max_tokens_per_micro_batch: PositiveInt
    """Packed tokens of one micro-batch on one rank; also the longest trainable sample."""
    num_threads: PositiveInt
    """CPU threads of each trainer rank."""
    megatron: NativeOptions
    """Fields of Megatron's TransformerConfig under their own names."""
