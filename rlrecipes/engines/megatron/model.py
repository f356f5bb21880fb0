"""The GPT of one pipeline stage. Owns what its layers are made of; refuses weights."""

from __future__ import annotations

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from rlrecipes.engines.megatron.attention import PackedAttention
from rlrecipes.engines.megatron.configuration import DTYPES
from rlrecipes.plan.nodes import ModelNode, TrainerNode
from rlrecipes.plan.packages import uses_transformer_engine
from rlrecipes.plan.parameters import compute_padded_vocab_size


def build_model(model: ModelNode, trainer: TrainerNode, config: TransformerConfig) -> list[GPTModel]:
    """Build this rank's part of the model, weights undefined, in ``model.dtype`` on its device.

    Needs Megatron's parallel state, and on CPU :func:`rlrecipes.engines.megatron.cpu.run_patches`.

    Args:
        model: what to build.
        trainer: device and layout.
        config: from :func:`build_transformer_config`.

    Returns:
        The model chunks of this rank, first layers first; one without virtual pipeline stages.
    """
    if config.virtual_pipeline_model_parallel_size is None:
        return [_build_chunk(model, trainer, config, None)]
    return [_build_chunk(model, trainer, config, stage) for stage in range(trainer.num_model_chunks)]


def _build_chunk(model: ModelNode, trainer: TrainerNode, config: TransformerConfig, stage: int | None) -> GPTModel:
    shapes = model.shapes
    if uses_transformer_engine(trainer):
        spec = get_gpt_layer_with_transformer_engine_spec(
            shapes.num_moe_experts,
            qk_layernorm=shapes.qk_layernorm,
            use_te_op_fuser=config.use_transformer_engine_op_fuser,
            use_te_activation_func=config.use_te_activation_func,
        )
    else:
        spec = get_gpt_layer_local_spec(
            shapes.num_moe_experts, qk_layernorm=shapes.qk_layernorm, normalization="RMSNorm"
        )
        spec.submodules.self_attention.submodules.core_attention = PackedAttention
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=compute_padded_vocab_size(shapes.vocab_size, trainer.tensor_model_parallel_size),
        max_sequence_length=shapes.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=not shapes.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=shapes.rotary_base,
        parallel_output=True,
        vp_stage=stage,
    )
    return gpt.to(device=trainer.device, dtype=DTYPES[model.dtype])
