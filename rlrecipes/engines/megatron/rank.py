"""One trainer rank: one Megatron process. Owns the model, the optimizer and the collectives between ranks.

Every rank of the run calls the same methods in the same order; what each returns says on which ranks it means
something. Nothing here knows Ray: whoever holds a rank calls it like any object.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rlrecipes.algos.agreement import compute_off_policy_summary
from rlrecipes.engines.megatron import cpu
from rlrecipes.engines.megatron.checkpoint import run_load_checkpoint, run_save_checkpoint
from rlrecipes.engines.megatron.export import run_export_hf
from rlrecipes.engines.megatron.forward import (
    Inputs,
    LogprobReader,
    LossSums,
    Objective,
    build_inputs,
    build_logprob_step,
    build_train_step,
)
from rlrecipes.engines.megatron.model import DTYPES, build_model, build_transformer_config
from rlrecipes.engines.megatron.optimizer import build_optimizer, build_scheduler
from rlrecipes.engines.megatron.weights import HfReader, WeightMap
from rlrecipes.errors import TrainerError
from rlrecipes.plan.nodes import ModelNode, TrainerNode
from rlrecipes.types import MicroBatch

_COLLECTIVE_TIMEOUT_S = 600.0
"""Longest wait for another rank; after it the collective raises."""


class TrainerRank:
    """One process of the trainer; builds its part of the model, weights still undefined.

    Args:
        trainer: layout, precision, optimizer; the same on every rank.
        model: the trained model; the same on every rank.
        rank: 0 .. number of ranks - 1; TP fastest, then DP, then PP.
        master_address: host of rank 0.
        master_port: free port there.

    Raises:
        ConfigError: Megatron refuses the layout.
        TrainerError: the other ranks did not come.
    """

    def __init__(
        self, trainer: TrainerNode, model: ModelNode, *, rank: int, master_address: str, master_port: int
    ) -> None:
        self._trainer, self._model = trainer, model
        self._run_process_setup()
        config = build_transformer_config(model, trainer)
        self._init_process_group(rank, f"tcp://{master_address}:{master_port}")
        self._seed(0)
        self._gpt = build_model(model, trainer, config)
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self._ddp = DistributedDataParallel(config, ddp_config, self._gpt)
        self._optimizer = build_optimizer(trainer.optim, DTYPES[model.dtype], [self._ddp])
        self._scheduler = build_scheduler(trainer.optim, trainer.num_train_steps_total, self._optimizer)
        # Loss weights say what is averaged: no division by tokens, micro-batches or ranks happens anywhere.
        config.finalize_model_grads_func = lambda chunks, num_tokens=None, **kw: finalize_model_grads(chunks, **kw)
        self._schedule = get_forward_backward_func()
        group = parallel_state.get_tensor_model_parallel_group()
        self._reader = LogprobReader(
            trainer.temperature, model.shapes.vocab_size, group, top_p=trainer.top_p, top_k=trainer.top_k
        )
        self._weights = WeightMap(self._gpt, model.shapes, group)
        self._reference: dict[str, Tensor] = {}

    # ---- set-up

    def _run_process_setup(self) -> None:
        if self._trainer.device == "cpu":
            cpu.run_patches()
            torch.set_num_threads(self._trainer.num_threads)
        else:
            torch.cuda.set_device(0)  # whoever started this process shows it one GPU
        if self._trainer.is_deterministic:
            torch.use_deterministic_algorithms(True)
            # Filling costs time, and nothing reads such memory.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def _init_process_group(self, rank: int, init_method: str) -> None:
        try:
            dist.init_process_group(
                "gloo" if self._trainer.device == "cpu" else "nccl",
                init_method=init_method,
                rank=rank,
                world_size=self._trainer.num_ranks,
                timeout=timedelta(seconds=_COLLECTIVE_TIMEOUT_S),
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise TrainerError(
                f"trainer.rank{rank}",
                f"no process group over {init_method}: {error}",
                "see why another rank did not start; its message comes first",
            ) from error
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self._trainer.tensor_model_parallel_size,
            pipeline_model_parallel_size=self._trainer.pipeline_model_parallel_size,
            distributed_timeout_minutes=max(1, int(_COLLECTIVE_TIMEOUT_S // 60)),
        )

    def _seed(self, train_step: int) -> None:
        """Make whatever is random a function of seed and train step, so that a resume has nothing to restore."""
        seed = self._trainer.seed + 1_000_003 * train_step
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        tensor_parallel.model_parallel_cuda_manual_seed(seed)

    # ---- who this is

    @property
    def is_weight_source(self) -> bool:
        """Whether weights leave from here: TP rank 0 and DP rank 0 of each pipeline stage."""
        return self._is_first_replica and parallel_state.get_tensor_model_parallel_rank() == 0

    @property
    def _is_first_replica(self) -> bool:
        return bool(parallel_state.get_data_parallel_rank() == 0)

    @property
    def _is_last_stage(self) -> bool:
        return bool(parallel_state.is_pipeline_last_stage())

    @property
    def num_train_steps(self) -> int:
        """Train steps done since the first start of the run."""
        return int(self._scheduler.num_steps)

    # ---- weights

    def load_hf(self, path: str | Path) -> None:
        """Take the weights of an HF directory, as policy and as reference.

        Raises:
            DataError: a tensor is missing or has another shape.
        """
        with HfReader(Path(path)) as reader:
            self._weights.run_load(reader.read)
        self._optimizer.reload_model_params()
        if self._trainer.needs_reference:
            self._keep_reference()

    def _keep_reference(self) -> None:
        self._reference = {name: p.detach().cpu().clone() for name, p in self._gpt.named_parameters()}

    def iter_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole HF tensors this pipeline stage owns, each once; see ``WeightMap.iter_hf_tensors``.

        Every TP rank of a stage must iterate to the end, and each gets the tensors.
        """
        return self._weights.iter_hf_tensors()

    def export_hf(self, path: str | Path, source_dir: str | Path) -> None:
        """Write the policy as an HF directory; it appears at ``path`` whole or not at all.

        Args:
            path: the new directory, on a file system every rank sees; one that is there is replaced.
            source_dir: HF directory whose config.json and tokenizer are copied.

        Raises:
            CheckpointError: it cannot be written; on every rank.
        """
        tensors = self.iter_hf_tensors() if self._is_first_replica else iter(())
        run_export_hf(tensors, Path(path), Path(source_dir), self.is_weight_source)

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        """Show the reference's weights to the model; the policy's stay where they are."""
        policy = {name: p.data for name, p in self._gpt.named_parameters()}
        try:
            for name, parameter in self._gpt.named_parameters():
                parameter.data = self._reference[name].to(parameter.device)
            yield
        finally:
            for name, parameter in self._gpt.named_parameters():
                parameter.data = policy[name]

    # ---- compute

    def compute_logprobs(
        self, micro_batches: Sequence[MicroBatch], *, which: Literal["policy", "reference"]
    ) -> list[np.ndarray]:
        """Log-probability of every trained target token at ``trainer.temperature``.

        Args:
            micro_batches: of this data-parallel rank; as many on every rank.
            which: the weights as they are, or as :meth:`load_hf` left them.

        Returns:
            [T] float32 nats per micro-batch, aligned to ``target_ids``, 0 where ``loss_mask`` is False, on TP rank 0 of
            the last stage; [] elsewhere.

        Raises:
            TrainerError: the reference is asked for and was not kept.
        """
        if which == "reference":
            if not self._reference:
                raise TrainerError(
                    "trainer.compute_logprobs", "no reference is kept", "set needs_reference and load weights first"
                )
            with self._reference_weights():
                return self._compute_policy_logprobs(micro_batches)
        return self._compute_policy_logprobs(micro_batches)

    def _compute_policy_logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[np.ndarray]:
        self._ddp.eval()
        with torch.no_grad():
            found = self._run_schedule(
                build_logprob_step(self._reader), micro_batches, forward_only=True, collect_non_loss_data=True
            )
        if not self._is_last_stage or parallel_state.get_tensor_model_parallel_rank() != 0:
            return []
        return [logprobs.cpu().numpy() for logprobs in found]

    def train_step(
        self, micro_batches: Sequence[MicroBatch], objective: Objective, without_gradient: Sequence[MicroBatch] = ()
    ) -> dict[str, float]:
        """One optimizer update.

        The loss is exactly the sum over all ranks and micro-batches of ``loss_weights`` x the objective's loss over
        trained tokens; what stands in other slots does not matter.

        Args:
            micro_batches: of this data-parallel rank, at least one; as many on every rank.
            objective: loss and metrics per token.
            without_gradient: more micro-batches, whose loss has no gradient: they go forward only, for the metrics.

        Returns:
            On every rank the same: ``loss``, ``grad_norm`` (before clipping), ``lr``, ``num_tokens`` (trained, of all
            ranks), and the objective's metrics averaged over trained tokens (those named ``_max``: the largest).

        Raises:
            TrainerError: loss or gradient is not finite; on every rank, and no weight was changed.
        """
        self._ddp.train()
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._seed(self.num_train_steps)
        step = build_train_step(self._reader, objective)
        found = self._run_schedule(step, without_gradient, forward_only=True) if without_gradient else []
        found += self._run_schedule(step, micro_batches, forward_only=False)
        metrics = self._reduce(found)
        if not math.isfinite(metrics["loss"]):
            raise TrainerError(
                "trainer.train_step.loss",
                f"the loss is {metrics['loss']}; no weight was changed",
                "resume from the last checkpoint with a smaller optim.lr, or look at the batch",
            )
        lr = self._optimizer.param_groups[0]["lr"]
        _, grad_norm, _ = self._optimizer.step()
        self._scheduler.step(1)
        return {**metrics, "grad_norm": grad_norm, "lr": lr}

    def _run_schedule(self, step: Any, micro_batches: Sequence[MicroBatch], **kwargs: Any) -> list[Any]:
        inputs: Iterator[Inputs] = (
            build_inputs(micro_batch, device=self._trainer.device, is_sequence_parallel=self._trainer.sequence_parallel)
            for micro_batch in micro_batches
        )
        found: list[Any] = self._schedule(
            forward_step_func=step,
            data_iterator=inputs,
            model=self._ddp,
            num_microbatches=len(micro_batches),
            seq_length=self._trainer.max_tokens_per_micro_batch,  # unused: lengths travel with the activations
            micro_batch_size=1,
            **kwargs,
        )
        return found

    def _reduce(self, found: list[LossSums]) -> dict[str, float]:
        """Metrics of a train step over all micro-batches and ranks."""
        metrics: list[dict[str, float]] = [{}]
        if self._is_last_stage:
            metrics = [_reduce_over_replicas(found, parallel_state.get_data_parallel_group())]
        if self._trainer.pipeline_model_parallel_size > 1:
            dist.broadcast_object_list(
                metrics,
                src=parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
        return metrics[0]

    # ---- checkpoint

    def save_checkpoint(self, directory: str | Path) -> None:
        """Write model, optimizer, schedule and reference; resumable at another TP, PP or DP.

        Args:
            directory: empty, on a file system every rank sees. Only a directory whose save returned is complete, so
                give a fresh one and rename it afterwards.

        Raises:
            CheckpointError: it cannot be written; on every rank.
        """
        run_save_checkpoint(self._ddp, self._optimizer, self.num_train_steps, self._reference, Path(directory))

    def load_checkpoint(self, directory: str | Path) -> None:
        """Continue from :meth:`save_checkpoint`, at any layout; nothing need be loaded before.

        Learning rate and Adam's numbers stay those of this trainer.

        Raises:
            CheckpointError: it is missing, broken, or of another model; on every rank.
        """
        if self._trainer.needs_reference and not self._reference:
            self._keep_reference()
        self._scheduler.num_steps = run_load_checkpoint(self._ddp, self._optimizer, self._reference, Path(directory))
        self._scheduler.step(0)

    def close(self) -> None:
        """Leave the process group; the rank is of no use afterwards."""
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _reduce_over_replicas(found: list[LossSums], group: dist.ProcessGroup) -> dict[str, float]:
    names, maxima = list(found[0].sums), list(found[0].maxima)
    parts = [[s.loss, s.num_tokens, *(s.sums[name] for name in names)] for s in found]
    sums = torch.stack([torch.cat([part.double().reshape(-1) for part in row]) for row in parts]).sum(0)
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
    loss, num_tokens, *totals = torch.split(sums.cpu(), [part.numel() for part in parts[0]])
    metrics = {"loss": float(loss), "num_tokens": float(num_tokens)}
    divisor, added = max(metrics["num_tokens"], 1.0), dict(zip(names, totals, strict=True))
    metrics |= {name: float(total) / divisor for name, total in added.items() if not name.endswith("_counts")}
    if "off_policy_log_ratio_counts" in added:
        metrics |= compute_off_policy_summary(
            counts=added["off_policy_log_ratio_counts"],
            weight_mean=metrics["off_policy_weight_mean"],
            weight_square_mean=metrics.pop("off_policy_weight_square_mean"),
        )
    if maxima:
        highest = torch.stack([torch.stack([s.maxima[name] for name in maxima]) for s in found]).amax(0)
        if group.size() > 1:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        metrics |= dict(zip(maxima, highest.tolist(), strict=True))
    return metrics
