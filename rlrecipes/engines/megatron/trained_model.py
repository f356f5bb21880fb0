"""A model that learns: its part on this rank, its gradients, its optimizer and its schedule.

Owns what policy and critic have alike; refuses to know what is read from the model's outputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func

from rlrecipes.config.schema import OptimConfig
from rlrecipes.engines.megatron.configuration import build_ddp_config, build_optimizer_config
from rlrecipes.engines.megatron.forward import Inputs, LossSums, Output, build_inputs
from rlrecipes.engines.megatron.offload import OffloadedStorages, find_storages
from rlrecipes.engines.megatron.optimizer import (
    build_optimizer,
    build_scheduler,
    iter_state_tensors,
    run_reload_weights,
)
from rlrecipes.engines.megatron.reduction import reduce_metrics
from rlrecipes.engines.megatron.weights import HfReader, WeightMap
from rlrecipes.errors import TrainerError
from rlrecipes.plan.nodes import TrainerNode
from rlrecipes.types import MicroBatch

Step = Callable[[Iterator[Inputs], Any], Output]


class TrainedModel:
    """One learning model of a trainer rank; every rank calls the same methods in the same order.

    Attributes:
        chunks: this stage's part, unwrapped, one a model chunk.
        weights: its way from and to an HF directory.
        ddp: the same chunks with their gradients.
        optimizer: state sharded over the data-parallel ranks.

    Args:
        chunks: this stage's part, weights still undefined.
        weights: the table applied to it.
        trainer: layout and device.
        optim: Adam's numbers and the schedule's shape.
        num_train_steps_total: length of the schedule.
        where: of its errors: the method that trains it.
        section: of the recipe, that holds ``optim``.
    """

    def __init__(
        self,
        chunks: list[GPTModel],
        weights: WeightMap,
        trainer: TrainerNode,
        optim: OptimConfig,
        num_train_steps_total: int,
        *,
        where: str = "trainer.train_step",
        section: str = "optim",
    ) -> None:
        self.chunks, self.weights = chunks, weights
        self._trainer, self._where, self._section = trainer, where, section
        config, ddp_config = chunks[0].config, build_ddp_config(trainer)  # all chunks have one config
        # Loss weights say what is averaged: no division by tokens, micro-batches or ranks happens anywhere.
        config.finalize_model_grads_func = lambda chunks, num_tokens=None, **kw: finalize_model_grads(chunks, **kw)
        # Weights move from where they were built into one buffer: no piece that is left over is large enough for it.
        torch.cuda.empty_cache()
        self.ddp = [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]
        torch.cuda.empty_cache()
        if ddp_config.overlap_grad_reduce:  # gradients leave while the last micro-batch goes backward
            syncs = [chunk.no_sync for chunk in self.ddp]
            config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
        optimizer_config = build_optimizer_config(trainer, optim, config.params_dtype)
        self.optimizer = build_optimizer(optimizer_config, self.ddp, where=where, section=section)
        self._scheduler = build_scheduler(optim, num_train_steps_total, self.optimizer)
        self._schedule = get_forward_backward_func()
        self._offloaded: dict[str, OffloadedStorages] = {}

    # ---- memory

    @property
    def is_whole(self) -> bool:
        """Whether everything is on the device; nothing can be computed otherwise."""
        return not any(part.is_offloaded for part in self._offloaded.values())

    @property
    def has_weights(self) -> bool:
        """Whether the weights are on the device."""
        return "weights" not in self._offloaded or not self._offloaded["weights"].is_offloaded

    def offload_state(self) -> None:
        """Free the gradients, and move the optimizer's state to the host; weights stay, and can be read.

        Gradients come back as zeros: a train step begins by filling them so.
        """
        if self.is_whole:
            self.optimizer.zero_grad()  # drops the copies in float32 that the last step made
            self._find_storages()
        for name in ("gradients", "optimizer"):
            self._offloaded[name].offload()

    def offload_weights(self) -> None:
        """Move the weights to the host too, once :meth:`offload_state` has been called."""
        self._offloaded["weights"].offload()

    def reload(self) -> None:
        """Bring back all that was moved, bit for bit."""
        for part in self._offloaded.values():
            part.reload()

    def _find_storages(self) -> None:
        """What is there now: the first step creates state, and a checkpoint replaces it."""
        device = self._trainer.device
        weights = find_storages((parameter for _, parameter in self.named_parameters()), device)
        buffers = [buffer for chunk in self.ddp for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        gradients = find_storages((buffer.grad_data for buffer in buffers), device)
        # Where weights are float32, what the optimizer steps lies in their own memory.
        stepped = find_storages(iter_state_tensors(self.optimizer), device)
        optimizer = {key: storage for key, storage in stepped.items() if key not in weights}
        for name, found in (("weights", weights), ("gradients", gradients), ("optimizer", optimizer)):
            known = self._offloaded.get(name)
            if known is None or known.keys != found.keys():
                if known is not None:
                    known.forget()
                self._offloaded[name] = OffloadedStorages(found, should_keep=name != "gradients")

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every parameter of this rank; its name starts with the number of its chunk."""
        for number, chunk in enumerate(self.chunks):
            yield from ((f"{number}.{name}", parameter) for name, parameter in chunk.named_parameters())

    @property
    def num_train_steps(self) -> int:
        """Train steps done since the first start of the run."""
        return int(self._scheduler.num_steps)

    def resume(self, num_train_steps: int) -> None:
        """Put the schedule where it was after so many train steps."""
        self._scheduler.num_steps = num_train_steps
        self._scheduler.step(0)

    def load_hf(self, path: Path) -> None:
        """Take the weights of an HF directory.

        Raises:
            DataError: a tensor is missing or has another shape.
        """
        with HfReader(path) as reader:
            self.weights.run_load(reader.read)
        run_reload_weights(self.optimizer)

    def run_forward(self, step: Step, micro_batches: Sequence[MicroBatch]) -> list[Any]:
        """What a step of :func:`build_reading_step` reads, a micro-batch each, on the last stage; elsewhere nothing."""
        for chunk in self.ddp:
            chunk.eval()
        with torch.no_grad():
            return self.run_schedule(step, micro_batches, forward_only=True, collect_non_loss_data=True)

    def run_train_step(
        self, step: Step, micro_batches: Sequence[MicroBatch], without_gradient: Sequence[MicroBatch] = ()
    ) -> dict[str, float]:
        """One optimizer update.

        Args:
            step: from :func:`build_train_step`.
            micro_batches: of this data-parallel rank, at least one; as many on every rank.
            without_gradient: more of them that go forward only, for the metrics.

        Returns:
            What :func:`reduce_metrics` gives, ``grad_norm`` (before clipping) and ``lr``.

        Raises:
            TrainerError: loss or gradient is not finite; on every rank, and no weight was changed.
        """
        for chunk in self.ddp:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        found: list[LossSums] = []
        if without_gradient:
            found += self.run_schedule(step, without_gradient, forward_only=True)
        found += self.run_schedule(step, micro_batches, forward_only=False)
        metrics = reduce_metrics(found)
        if not math.isfinite(metrics["loss"]):
            raise TrainerError(
                f"{self._where}.loss",
                f"the loss is {metrics['loss']}; no weight was changed",
                f"resume from the last checkpoint with a smaller {self._section}.lr, or look at the batch",
            )
        lr = self.optimizer.param_groups[0]["lr"]
        _, grad_norm, _ = self.optimizer.step()
        self._scheduler.step(1)
        return {**metrics, "grad_norm": grad_norm, "lr": lr}

    def run_schedule(self, step: Step, micro_batches: Sequence[MicroBatch], **kwargs: Any) -> list[Any]:
        """Megatron's schedule over micro-batches; its options are ``kwargs``."""
        trainer, group = self._trainer, parallel_state.get_context_parallel_group()
        inputs: Iterator[Inputs] = (
            build_inputs(
                micro_batch, device=trainer.device, is_sequence_parallel=trainer.sequence_parallel, group=group
            )
            for micro_batch in micro_batches
        )
        found: list[Any] = self._schedule(
            forward_step_func=step,
            data_iterator=list(itertools.tee(inputs, len(self.ddp))),  # every chunk sees every micro-batch
            model=self.ddp,
            num_microbatches=len(micro_batches),
            seq_length=trainer.max_micro_batch_tokens,  # unused: lengths travel with the activations
            micro_batch_size=1,
            **kwargs,
        )
        return found
