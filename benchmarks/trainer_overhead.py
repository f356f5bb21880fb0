"""What a train step costs over a bare Megatron-Core loop on the same packed batches, as a ratio from one run.

    python benchmarks/trainer_overhead.py [--rounds 30]

Both loops drive the same GPTModel, DistributedDataParallel and optimizer through Megatron's own schedule, in turns. The
bare one does what Megatron's training loop does with a language-model loss; ours adds batches from arrays, the
temperature, entropy, a clipped policy objective, metrics and the checks for finite numbers.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu.bare_trainer import build_model_node, build_objective, build_trainer_node, start_rank
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from rlrecipes.batching.grid import build_grid
from rlrecipes.engines.megatron.initial import run_write_random_model
from rlrecipes.engines.megatron.rank import TrainerRank
from rlrecipes.plan.nodes import ModelNode
from rlrecipes.types import MicroBatch, Sample

MODELS = {
    "4 layers x 128, vocabulary 32": {"num_layers": 4, "hidden_size": 128, "vocab_size": 32},
    "8 layers x 256, vocabulary 16000": {"num_layers": 8, "hidden_size": 256, "vocab_size": 16000},
}


def build_qwen(num_layers: int, hidden_size: int, vocab_size: int) -> ModelNode:
    node: ModelNode = build_model_node(
        "benchmark",
        "qwen3",
        "float32",
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
    )
    return node


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
    node, objective = build_qwen(**sizes), build_objective()
    rank = start_rank(build_trainer_node("cpu", max_tokens_per_micro_batch=2048, num_threads=num_threads), node)
    with tempfile.TemporaryDirectory() as directory:
        run_write_random_model(node, Path(directory) / "hf")
        rank.load_hf(Path(directory) / "hf")
    micro_batches = build_micro_batches(3400, node.shapes.vocab_size)
    num_tokens = sum(int(micro.cu_seqlens[-1]) for micro in micro_batches)
    loops = {"bare": build_bare_step(rank, micro_batches), "ours": lambda: rank.train_step(micro_batches, objective)}
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
