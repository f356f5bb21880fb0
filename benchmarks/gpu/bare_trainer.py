"""A trainer rank without a run around it: random weights drawn where they lie, full micro-batches of made-up samples.

What benchmarks of the trainer share. Imports of torch and Megatron wait until they are needed, so that a script can
start processes of its own without them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any


def build_model_node(name: str, family: str, dtype: str, **shapes: Any) -> Any:
    """A model without an HF directory; its embedding is its output layer.

    Args:
        name: of the model.
        family: of its layers.
        dtype: of its weights.
        shapes: fields of ModelShapes, beside those that are alike here.
    """
    from rlrecipes.config.schema import ModelShapes
    from rlrecipes.plan.nodes import ModelNode
    from rlrecipes.plan.parameters import compute_flops_per_token, compute_num_parameters

    fields = {"qk_layernorm": False, "add_qkv_bias": False, "untie_embeddings_and_output_weights": False}
    built = ModelShapes(**fields | shapes)
    return ModelNode(
        name=name,
        family=family,
        path="",
        is_random=True,
        init_seed=0,
        alphabet=None,
        shapes=built,
        dtype=dtype,
        num_parameters=compute_num_parameters(built),
        flops_per_token=compute_flops_per_token(built),
    )


def build_trainer_node(device: str, **changes: Any) -> Any:
    """One rank that does nothing special.

    Args:
        device: ``cuda`` or ``cpu``.
        changes: fields of TrainerNode that differ.
    """
    from rlrecipes.config.schema import OptimConfig
    from rlrecipes.plan.nodes import DeviceNode, TrainerNode

    optim = OptimConfig(
        lr=1e-6,
        min_lr=1e-6,
        lr_decay_style="constant",
        num_warmup_train_steps=0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=1e-8,
        weight_decay=0.1,
        clip_grad=1.0,
    )
    fields = {
        "device": device,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "data_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": False,
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
        "recompute_modules": (),
        "optimizer_cpu_offload": False,
        "num_threads": 1,
        "is_deterministic": False,
        "needs_reference": False,
        "seed": 0,
        "temperature": 1.0,
        "num_train_steps_total": 1000,
        "optim": optim,
        "teacher_path": None,
        "critic": None,
        "megatron": {},
        "devices": (DeviceNode(node=0, gpu=0 if device == "cuda" else None),),
    }
    return TrainerNode(**fields | changes)


def start_rank(trainer: Any, model: Any) -> Any:
    """The only rank of a trainer, its weights undefined.

    Args:
        trainer: a TrainerNode.
        model: a ModelNode.
    """
    from rlrecipes.engines.megatron.rank import TrainerRank

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return TrainerRank(trainer, model, rank=0, master_address="127.0.0.1", master_port=port)


def draw_weights(rank: Any) -> None:
    """Random weights where they lie: writing and reading gigabytes would take longer than what is measured."""
    import torch

    from rlrecipes.engines.megatron.optimizer import run_reload_weights

    generator = torch.Generator(rank._trainer.device).manual_seed(0)
    for name, parameter in rank._policy.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, 0.02, generator=generator)
    run_reload_weights(rank._policy.optimizer)


def build_micro_batches(
    num_micro_batches: int, lengths: Sequence[int], vocab_size: int, prompt_fraction: float
) -> tuple[list[Any], dict[str, float]]:
    """Full micro-batches, and what they hold: tokens, trained tokens, and pairs of tokens in causal attention.

    Args:
        num_micro_batches: all alike.
        lengths: tokens of each sample of one.
        vocab_size: tokens are drawn from it.
        prompt_fraction: of each sample, which is not trained.
    """
    import numpy as np

    from rlrecipes.batching.grid import build_grid
    from rlrecipes.types import Sample

    rng = np.random.default_rng(0)
    num_prompt = [int(length * prompt_fraction) for length in lengths]
    num_trained = num_micro_batches * (sum(lengths) - sum(num_prompt))
    micro_batches = []
    for _ in range(num_micro_batches):
        samples = []
        for number, (length, start) in enumerate(zip(lengths, num_prompt, strict=True)):
            mask = np.arange(length) >= start
            logprobs = (-np.log(vocab_size) + 0.05 * rng.standard_normal(length)).astype(np.float32)
            samples.append(
                Sample(
                    token_ids=tuple(rng.integers(0, vocab_size, length).tolist()),
                    loss_mask=tuple(mask.tolist()),
                    rollout_logprobs=tuple(np.where(mask, logprobs, 0.0).tolist()),
                    prompt_index=number,
                    sibling=0,
                    old_logprobs=logprobs,
                    advantages=np.full(length, rng.standard_normal(), np.float32),
                    loss_weights=(mask / num_trained).astype(np.float32),
                )
            )
        micro_batches += build_grid(samples, num_ranks=1, max_tokens=sum(lengths))[0]
    assert len(micro_batches) == num_micro_batches
    pairs = num_micro_batches * sum(length * (length + 1) / 2 for length in lengths)
    return micro_batches, {"tokens": num_micro_batches * sum(lengths), "trained": num_trained, "pairs": pairs}


def build_objective() -> Callable[..., Any]:
    """GRPO's clipped objective, without KL or entropy."""
    from rlrecipes.algos.objective import compute_policy_objective

    return partial(
        compute_policy_objective,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=None,
        kl_coef_in_loss=0.0,
        kl_estimator="k3",
        entropy_coef=0.0,
    )
