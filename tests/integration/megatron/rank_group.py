"""Processes that build trainer ranks again and again: starting one costs seconds, building a rank does not."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlrecipes.batching.grid import build_grid
from rlrecipes.config.schema import ModelShapes, OptimConfig
from rlrecipes.engines.sglang.process import find_free_port
from rlrecipes.plan.nodes import DeviceNode, ModelNode, TrainerNode
from rlrecipes.types import MicroBatch, Sample

_END_TIMEOUT_S = 10
_MAX_THREADS = 200
_PR_SET_PDEATHSIG = 1
_TASK_TIMEOUT_S = 120


def slow(*values: Any) -> Any:
    """Parameters of a case that only `make test-full` runs: a faster one of the same file shows most of it."""
    return pytest.param(*values, marks=pytest.mark.slow)


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    sp: bool = False
    cp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def row_of(self, rank: int) -> int:
        """The data-parallel rank of a rank: TP fastest, then CP, DP and PP."""
        return rank // (self.tp * self.cp) % self.dp

    def build_rows(self, samples: list[Sample]) -> list[list[MicroBatch]]:
        """The grid as the driver builds it."""
        node = build_trainer_node(self)
        return build_grid(
            samples,
            num_ranks=self.dp,
            max_tokens=96,
            sample_multiple=node.sample_multiple,
            pad_to_multiple=node.micro_batch_multiple,
            num_micro_batches_multiple=node.num_micro_batches_multiple,
        )


SINGLE, TP2, TP2_SP, PP2, DP2 = Layout(), Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2), Layout(dp=2)
CP2, CP2_TP2_SP, CP2_DP2 = Layout(cp=2), Layout(cp=2, tp=2, sp=True), Layout(cp=2, dp=2)
PP2_VPP2, CP2_PP2 = Layout(pp=2, vpp=2), Layout(cp=2, pp=2)


def build_model_node(family: str = "qwen3", *, is_tied: bool = True, dtype: str = "float32") -> ModelNode:
    return ModelNode(
        name=family,
        family=family,
        path="",
        is_random=True,
        init_seed=5,
        alphabet=None,
        shapes=ModelShapes(
            num_layers=4,
            hidden_size=48,
            ffn_hidden_size=80,
            num_attention_heads=4,
            num_query_groups=2,
            kv_channels=16,
            vocab_size=97,
            rotary_base=5000.0,
            norm_epsilon=1e-6,
            max_position_embeddings=128,
            qk_layernorm=family == "qwen3",
            add_qkv_bias=family == "qwen2",
            untie_embeddings_and_output_weights=not is_tied,
        ),
        dtype=dtype,
        num_parameters=1,
        flops_per_token=1.0,
    )


def build_trainer_node(layout: Layout, *, needs_reference: bool = False, **changes: Any) -> TrainerNode:
    optim = {
        "lr": 1e-3,
        "min_lr": 1e-4,
        "lr_decay_style": "cosine",
        "num_warmup_train_steps": 2,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": 1e-8,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
    }
    node = {
        "device": "cpu",
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "data_parallel_size": layout.dp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp or layout.tp,
        "sequence_parallel": layout.sp,
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
        "recompute_modules": (),
        "optimizer_cpu_offload": False,
        "max_tokens_per_micro_batch": 96,
        "num_threads": 1,
        "is_deterministic": False,
        "needs_reference": needs_reference,
        "seed": 3,
        "temperature": 0.7,
        "num_train_steps_total": 10,
        "optim": OptimConfig(**optim),
        "teacher_path": None,
        "critic": None,
        "megatron": {},
        "devices": (DeviceNode(node=0, gpu=None),) * layout.num_ranks,
    }
    return TrainerNode(**node | changes)


def build_samples(num_samples: int, *, seed: int = 0, vocab_size: int = 97) -> list[Sample]:
    """Samples of very different lengths, with every field a policy objective reads."""
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(num_samples):
        length = int(rng.integers(3, 60))
        mask = np.arange(length) >= int(rng.integers(1, length))
        samples.append(
            Sample(
                token_ids=tuple(int(token) for token in rng.integers(0, vocab_size, length)),
                loss_mask=tuple(bool(trained) for trained in mask),
                rollout_logprobs=tuple(float(x) for x in -rng.random(length)),
                prompt_index=index,
                sibling=0,
                old_logprobs=(-6 * rng.random(length)).astype(np.float32),
                ref_logprobs=(-6 * rng.random(length)).astype(np.float32),
                advantages=np.full(length, rng.standard_normal(), np.float32),
                loss_weights=(mask / mask.sum() / num_samples).astype(np.float32),
            )
        )
    return samples


def _serve(rank: int, tasks: Connection) -> None:
    import torch

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a stopped process sees no end of its parent
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what imports made is not gone through after every task
    while True:
        function, port, arguments = tasks.recv()
        try:
            answer = (True, function(rank, port, *arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        _leave_process_group()
        tasks.send((*answer, len(os.listdir("/proc/self/task"))))
        del answer


def _leave_process_group() -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
    for forgotten in ("", "_GLOO"):  # Megatron keeps these two groups
        setattr(parallel_state, f"_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP{forgotten}", None)
    for method in vars(RotaryEmbedding).values():  # their caches keep the model, and it its groups
        getattr(method, "cache_clear", int)()
    # A rank's objects refer to one another; gloo keeps dozens of threads that poll until its groups are freed. What the
    # first round finalizes only the second one finds.
    gc.collect()
    gc.collect()


class RankGroup:
    """Runs a module-level function ``(rank, port, *arguments)`` on the first n processes at once.

    Between two calls they are stopped: the threads of gloo groups that something still holds poll for ever.
    """

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["rlrecipes.engines.megatron.rank"])  # imported once for all of them
        self._tasks: list[Connection] = []
        self._processes: list[Any] = []

    def _start(self, num_ranks: int) -> None:
        for rank in range(len(self._processes), num_ranks):
            process, tasks = self._start_one(rank)
            self._tasks.append(tasks)
            self._processes.append(process)

    def _start_one(self, rank: int) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(rank, theirs), daemon=False)
        process.start()
        return process, ours

    def run(self, num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        self._start(num_ranks)
        port = find_free_port()
        for process, tasks in zip(self._processes[:num_ranks], self._tasks, strict=False):
            os.kill(process.pid, signal.SIGCONT)
            tasks.send((function, port, arguments))
        answers = []
        for rank, tasks in enumerate(self._tasks[:num_ranks]):
            assert tasks.poll(_TASK_TIMEOUT_S), f"rank {rank} gave no answer"
            answers.append(tasks.recv())
            os.kill(self._processes[rank].pid, signal.SIGSTOP)
        for rank, (_, _, num_threads) in enumerate(answers):
            if num_threads > _MAX_THREADS:  # what Megatron's checkpoints keep of their groups polls for ever
                self._processes[rank].kill()
                self._processes[rank], self._tasks[rank] = self._start_one(rank)
        told = [result for is_done, result, _ in answers if not is_done]
        assert not told, "\n".join(told)
        return [result for _, result, _ in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        # No join: it waits for a pipe that children of a rank may still hold.
        deadline = time.monotonic() + _END_TIMEOUT_S
        while any(process.exitcode is None for process in self._processes) and time.monotonic() < deadline:
            time.sleep(0.01)


@contextlib.contextmanager
def rank_group() -> Iterator[RankGroup]:
    group = RankGroup()
    try:
        yield group
    finally:
        group.close()


def write_hf_model(node: ModelNode, path: Path, seed: int = 11, spread: float = 0.15) -> Any:
    """Write what transformers itself would, with weights large enough to tell a wrong place from a right one.

    ``spread`` is their standard deviation.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlrecipes.engines.megatron.initial import to_hf_config

    config = to_hf_config(node)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config), attn_implementation="eager"
    ).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, spread)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return model.eval()
