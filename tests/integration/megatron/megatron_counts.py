"""What megatron-core itself allocates for given shapes, on every rank of a layout, with collectives that do nothing.

Built by Megatron's own layer specs, not by the trainer: the trainer's families are fewer.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from rlrecipes.config.schema import ModelShapes, ParallelConfig
from rlrecipes.plan.parameters import compute_padded_vocab_size

_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type")
_RENAMED = {"norm_epsilon": "layernorm_epsilon"}
_ELSEWHERE = {  # arguments of GPTModel, or of no model of Megatron
    "vocab_size",
    "max_position_embeddings",
    "rotary_base",
    "rotary_percent",
    "use_rope_scaling",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "mscale",
    "mscale_all_dim",
    "untie_embeddings_and_output_weights",
    "post_self_attn_layernorm",
    "post_mlp_layernorm",
    "first_dense_layers",
}


def count_on_every_rank(rank: int, port: int, cases: list[tuple[ModelShapes, ParallelConfig, bool]]) -> list[Any]:
    """For each case and each rank of its layout: what stands in :func:`_measure`; or what Megatron said against it."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from rlrecipes.engines.megatron import cpu
    from rlrecipes.plan.placement import count_trainer_ranks

    cpu.run_patches()
    torch.set_num_threads(1)
    found = []
    for shapes, parallel, with_optimizer in cases:
        ranks: list[Any] = []
        for number in range(count_trainer_ranks(parallel)):
            dist.init_process_group("fake", store=FakeStore(), rank=number, world_size=count_trainer_ranks(parallel))
            try:
                ranks.append(_measure(shapes, parallel, with_optimizer))
            finally:
                parallel_state.destroy_model_parallel()
                dist.destroy_process_group()
        found.append(ranks)
    return found


def _measure(shapes: ModelShapes, parallel: ParallelConfig, with_optimizer: bool) -> dict[str, int]:
    """Parameters of one rank, and with an optimizer the bytes of weights, gradient buffers and Adam's state."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = _build_config(shapes, parallel)
    chunks = [
        _build_chunk(shapes, config, stage) for stage in range(parallel.virtual_pipeline_model_parallel_size or 1)
    ]
    sizes = [(name, parameter.numel()) for chunk in chunks for name, parameter in chunk.named_parameters()]
    experts = sum(size for name, size in sizes if ".experts." in name)
    counts = {
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "dense": sum(size for _, size in sizes) - experts,
        "experts": experts,
    }
    if with_optimizer:
        counts |= _measure_state(config, chunks)
    return counts


def _measure_state(config: Any, chunks: list[Any]) -> dict[str, int]:
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    ddp = [
        DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), chunk)
        for chunk in chunks
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1.0, use_distributed_optimizer=True, bf16=config.bf16, params_dtype=config.params_dtype
        ),
        ddp,
        use_gloo_process_groups=False,
    )
    state = 0
    for inner in optimizer.chained_optimizers:
        inner.init_state_fn(inner.optimizer, inner.config)
        held = [t for values in inner.optimizer.state.values() for t in values.values() if torch.is_tensor(t)]
        masters = [p for group in getattr(inner, "shard_fp32_from_float16_groups", []) for p in group]
        state += sum(tensor.nbytes for tensor in [*held, *masters] if tensor.dim())
    buffers = [buffer for chunk in ddp for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    return {
        "weight_bytes": sum(parameter.nbytes for chunk in chunks for parameter in chunk.parameters()),
        "gradient_bytes": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer_bytes": state,
    }


def _build_config(shapes: ModelShapes, parallel: ParallelConfig) -> Any:
    import torch
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    values = {name: value for name, value in shapes.model_dump().items() if name not in _ELSEWHERE | {*_LATENT}}
    values = {_RENAMED.get(name, name): value for name, value in values.items()}
    if shapes.num_moe_experts:
        dense = shapes.first_dense_layers
        values["moe_layer_freq"] = [0] * dense + [1] * (shapes.num_layers - dense)
        values["moe_token_dispatcher_type"] = "alltoall"
    if shapes.linear_attention_freq:
        values["experimental_attention_variant"] = "gated_delta_net"
    if shapes.dsa_indexer_n_heads:
        values |= {"experimental_attention_variant": "dsa", "cp_comm_type": "allgather"}
    sizes = {name: getattr(parallel, name) for name in ParallelConfig.model_fields if name.endswith("parallel_size")}
    del sizes["data_parallel_size"]
    values = {name: value for name, value in values.items() if value is not None}
    values |= {name: getattr(shapes, name) for name in _LATENT if shapes.multi_latent_attention}
    return (MLATransformerConfig if shapes.multi_latent_attention else TransformerConfig)(
        **values,
        **sizes,
        **parallel.megatron,
        sequence_parallel=parallel.sequence_parallel,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        deterministic_mode=shapes.linear_attention_freq is not None,
    )


def _build_chunk(shapes: ModelShapes, config: Any, stage: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.identity_op import IdentityOp

    vp_stage = stage if config.virtual_pipeline_model_parallel_size else None
    standard = copy.copy(config)
    standard.experimental_attention_variant = None
    block = get_gpt_decoder_block_spec(
        standard, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    for layer in block.layer_specs:  # Megatron's own core attention refuses CP, and holds no parameter
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = IdentityOp
        if config.multi_latent_attention:
            attention.q_layernorm = attention.q_layernorm if config.q_lora_rank else IdentityOp
            attention.linear_q_down_proj = attention.linear_kv_down_proj = _build_duplicated_linear()
    if config.experimental_attention_variant:
        _replace_attention(config, block, vp_stage)
    prediction = None
    if shapes.mtp_num_layers:
        prediction = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False, vp_stage=vp_stage)
    where = {"ignore_virtual": False, "vp_stage": vp_stage}
    return GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=compute_padded_vocab_size(shapes.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=not shapes.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        mtp_block_spec=prediction,
        vp_stage=vp_stage,
    ).bfloat16()


def _replace_attention(config: Any, block: Any, vp_stage: int | None) -> None:
    """Attention variants, whose specs are Transformer Engine's alone, over Megatron's own linear layers."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.ssm.gated_delta_net import common
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    class Backend(LocalSpecProvider):
        def column_parallel_layer_norm_linear(self) -> type:
            return self.column_parallel_linear()

        def layer_norm(self, rms_norm: bool = False, **options: bool) -> Any:
            return super().layer_norm(rms_norm=rms_norm, **options) if rms_norm else _build_layer_norm()

        def linear(self) -> type:
            return _build_duplicated_linear()

    common.HAVE_FLA = True  # its kernels are asked for in forward alone
    spec = variants.get_experimental_attention_variant_module_spec(config, Backend())
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    block.layer_specs = [copy.deepcopy(layer) for layer in block.layer_specs]
    for number, layer in enumerate(block.layer_specs, offset + 1):
        if config.linear_attention_freq is None or number % config.linear_attention_freq:
            layer.submodules.self_attention = spec


@functools.cache
def _build_layer_norm() -> type:
    """A LayerNorm with its bias: on a CPU, Megatron's own wrapper gives RMSNorm here."""
    import torch

    class LayerNorm(torch.nn.LayerNorm):
        def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
            super().__init__(hidden_size, eps)

    return LayerNorm


@functools.cache
def _build_duplicated_linear() -> type:
    """What ``TELinear(parallel_mode="duplicated")`` is: a linear layer that every TP rank has whole."""
    import torch
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla

    class DuplicatedLinear(torch.nn.Linear):
        def __init__(self, in_size: int, out_size: int, *, config: Any, **ignored: Any) -> None:
            super().__init__(in_size, out_size, bias=False, dtype=config.params_dtype)

    multi_latent_attention.TELinear = absorbed_mla.TELinear = DuplicatedLinear  # they ask for it by name
    return DuplicatedLinear
