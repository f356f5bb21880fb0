"""What a train step costs over a bare Megatron-Core loop on the same packed batches, as a ratio from one run.

    python benchmarks/trainer_overhead.py [--rounds 30]

Both loops drive the same GPTModel, DistributedDataParallel and optimizer through Megatron's own schedule, in turns. The
bare one does what Megatron's training loop does with a language-model loss; ours adds batches from arrays, the
temperature, entropy, a clipped policy objective, metrics and the checks for finite numbers.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from rlrecipes.algos.objective import compute_policy_objective
from rlrecipes.batching.grid import build_grid
from rlrecipes.config.schema import ModelShapes, OptimConfig
from rlrecipes.engines.megatron.initial import run_write_random_model
from rlrecipes.engines.megatron.rank import TrainerRank
from rlrecipes.plan.nodes import DeviceNode, ModelNode, TrainerNode
from rlrecipes.types import MicroBatch, Sample

OBJECTIVE = partial(
    compute_policy_objective,
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=None,
    kl_coef_in_loss=0.0,
    kl_estimator="k3",
    entropy_coef=0.0,
)
MODELS = {
    "4 layers x 128, vocabulary 32": {"num_layers": 4, "hidden_size": 128, "vocab_size": 32},
    "8 layers x 256, vocabulary 16000": {"num_layers": 8, "hidden_size": 256, "vocab_size": 16000},
}


def build_model_node(num_layers: int, hidden_size: int, vocab_size: int) -> ModelNode:
    shapes = ModelShapes(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=3 * hidden_size,
        num_attention_heads=hidden_size // 32,
        num_query_groups=hidden_size // 64,
        kv_channels=32,
        vocab_size=vocab_size,
        rotary_base=10000.0,
        norm_epsilon=1e-6,
        max_position_embeddings=512,
        qk_layernorm=True,
        add_qkv_bias=False,
        untie_embeddings_and_output_weights=False,
    )
    return ModelNode(
        name="benchmark",
        family="qwen3",
        path="",
        is_random=True,
        init_seed=0,
        alphabet=None,
        shapes=shapes,
        dtype="float32",
        num_parameters=0,
        flops_per_token=0.0,
    )


def build_trainer_node(num_threads: int) -> TrainerNode:
    optim = OptimConfig(
        lr=1e-5,
        min_lr=1e-5,
        lr_decay_style="constant",
        num_warmup_train_steps=0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=1e-8,
        weight_decay=0.1,
        clip_grad=1.0,
    )
    return TrainerNode(
        device="cpu",
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        context_parallel_size=1,
        data_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=1,
        sequence_parallel=False,
        recompute_granularity=None,
        recompute_method=None,
        recompute_num_layers=None,
        recompute_modules=(),
        optimizer_cpu_offload=False,
        max_tokens_per_micro_batch=2048,
        num_threads=num_threads,
        is_deterministic=False,
        needs_reference=False,
        seed=0,
        temperature=1.0,
        num_train_steps_total=1000,
        optim=optim,
        teacher_path=None,
        critic=None,
        megatron={},
        devices=(DeviceNode(node=0, gpu=None),),
    )


def build_micro_batches(num_tokens: int, vocab_size: int) -> list[MicroBatch]:
    """Two micro-batches of short samples, prompts included, as a GRPO step has them."""
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    while sum(len(sample.token_ids) for sample in samples) < num_tokens:
        length = int(rng.integers(16, 64))
        mask = np.arange(length) >= 12
        samples.append(
            Sample(
                token_ids=tuple(int(token) for token in rng.integers(0, vocab_size, length)),
                loss_mask=tuple(bool(trained) for trained in mask),
                rollout_logprobs=(-1.0,) * length,
                prompt_index=len(samples),
                sibling=0,
                old_logprobs=np.full(length, -np.log(vocab_size), np.float32),
                advantages=np.full(length, rng.standard_normal(), np.float32),
                loss_weights=(mask / 1000).astype(np.float32),
            )
        )
    return build_grid(samples, num_ranks=1, max_tokens=num_tokens // 2 + 128)[0]


def build_bare_step(rank: TrainerRank, micro_batches: list[MicroBatch]) -> Callable[[], None]:
    """Megatron's own loop: cross entropy of the labels, masked mean, optimizer step."""
    (ddp,), optimizer = rank._policy.ddp, rank._policy.optimizer
    schedule = get_forward_backward_func()
    tensors = []
    for micro in micro_batches:
        starts = torch.as_tensor(micro.cu_seqlens)
        longest = int(starts.diff().max())
        packed = PackedSeqParams("thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest)
        ids, positions, labels = (
            torch.as_tensor(a)[None] for a in (micro.token_ids, micro.position_ids, micro.target_ids)
        )
        tensors.append((ids, positions, labels, torch.as_tensor(micro.loss_mask), packed))

    def forward_step(batches: Iterator[Any], model: Any) -> Any:
        ids, positions, labels, mask, packed = next(batches)
        losses = model(ids, positions, None, labels=labels, packed_seq_params=packed)

        def loss(out: torch.Tensor) -> Any:
            total = (out[0] * mask).sum() / 1000
            return total, mask.sum(dtype=torch.int), {"loss": total.detach().clone()}

        return losses, loss

    def step() -> None:
        ddp.train()
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        schedule(
            forward_step_func=forward_step,
            data_iterator=iter(tensors),
            model=ddp,
            num_microbatches=len(tensors),
            seq_length=2048,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()

    return step


def measure(name: str, sizes: dict[str, int], num_rounds: int, num_threads: int) -> None:
    node = build_model_node(**sizes)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rank = TrainerRank(build_trainer_node(num_threads), node, rank=0, master_address="127.0.0.1", master_port=port)
    with tempfile.TemporaryDirectory() as directory:
        run_write_random_model(node, Path(directory) / "hf")
        rank.load_hf(Path(directory) / "hf")
    micro_batches = build_micro_batches(3400, node.shapes.vocab_size)
    num_tokens = sum(int(micro.cu_seqlens[-1]) for micro in micro_batches)
    loops = {"bare": build_bare_step(rank, micro_batches), "ours": lambda: rank.train_step(micro_batches, OBJECTIVE)}
    times: dict[str, list[float]] = {loop: [] for loop in loops}
    for number in range(num_rounds + 3):
        for loop in sorted(loops, reverse=bool(number % 2)):
            start = time.process_time()
            loops[loop]()
            if number >= 3:
                times[loop].append(time.process_time() - start)
    rank.close()
    medians = {loop: statistics.median(values) for loop, values in times.items()}
    for loop, values in times.items():
        low, _, high = statistics.quantiles(values, n=4)
        print(f"{name}: {loop} {medians[loop] * 1e3:.1f} ms CPU (quartiles {low * 1e3:.1f} .. {high * 1e3:.1f}), "
              f"{num_tokens * num_threads / medians[loop]:.0f} tokens/s")  # fmt: skip
    pairs = sorted(ours / bare for ours, bare in zip(times["ours"], times["bare"], strict=True))
    quarter = len(pairs) // 4
    print(f"{name}: ratio of medians {medians['ours'] / medians['bare']:.3f} "
          f"(pairs, quartiles {pairs[quarter]:.3f} .. {pairs[-quarter - 1]:.3f}; target <= 1.05)")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    for name, sizes in MODELS.items():
        measure(name, sizes, arguments.rounds, arguments.threads)


if __name__ == "__main__":
    main()
