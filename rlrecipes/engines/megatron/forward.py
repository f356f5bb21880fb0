"""One micro-batch through the model, and what is read from its logits. Owns both loss functions of the schedule.

Megatron calls the step on every pipeline stage and the loss function on the last one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlrecipes.engines.megatron.logprobs import compute_logprobs
from rlrecipes.types import MicroBatch

Batch = Mapping[str, Tensor]
Objective = Callable[[Batch, Tensor, Tensor | None], tuple[Tensor, dict[str, Tensor]]]
"""(batch, logprobs [T], entropy [T]) -> (loss [T], metrics [T] each); see rlrecipes/algos/objective.py."""
Output = tuple[Tensor, Callable[..., Any]]


def to_batch(micro_batch: MicroBatch, device: str) -> dict[str, Tensor]:
    """The arrays of a micro-batch as tensors under their names; an array that is None is absent."""
    arrays = {field.name: getattr(micro_batch, field.name) for field in dataclasses.fields(micro_batch)}
    del arrays["sample_indices"]
    return {name: torch.as_tensor(array, device=device) for name, array in arrays.items() if array is not None}


def to_packed(batch: Batch) -> PackedSeqParams:
    """Where each sample starts, in Megatron's words; padding is a sample too."""
    cu_seqlens = batch["cu_seqlens"]
    longest = int(cu_seqlens.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


@dataclasses.dataclass(frozen=True)
class LogprobReader:
    """Reads logprobs from the logits of the last stage.

    Attributes:
        temperature: divides the logits.
        vocab_size: rows that are no padding.
        group: TP ranks.
    """

    temperature: float
    vocab_size: int
    group: dist.ProcessGroup

    def read(self, batch: Batch, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logprobs of ``target_ids`` and entropy, [T] each, from [1, T, V / TP]."""
        return compute_logprobs(
            logits[0],
            batch["target_ids"],
            temperature=self.temperature,
            vocab_size=self.vocab_size,
            group=self.group,
        )


def _run_model(batches: Iterator[Batch], model: Any) -> tuple[Batch, Tensor]:
    batch = next(batches)
    out = model(batch["token_ids"][None], batch["position_ids"][None], None, packed_seq_params=to_packed(batch))
    return batch, out


def build_logprob_step(reader: LogprobReader) -> Callable[[Iterator[Batch], Any], Output]:
    """Build a forward step that collects logprobs, to be run with ``collect_non_loss_data``."""

    def read(batch: Batch, out: Tensor, non_loss_data: bool = True) -> Tensor:
        return reader.read(batch, out)[0]

    def step(batches: Iterator[Batch], model: Any) -> Output:
        batch, out = _run_model(batches, model)
        return out, functools.partial(read, batch)

    return step


@dataclasses.dataclass(frozen=True)
class LossSums:
    """What one micro-batch adds to the metrics of a train step.

    Attributes:
        loss: sum of loss_weights x loss over trained tokens.
        num_tokens: trained tokens.
        sums: metric -> sum over trained tokens.
        maxima: metric whose name ends ``_max`` -> largest over trained tokens; -inf where there are none.
    """

    loss: Tensor
    num_tokens: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def build_train_step(reader: LogprobReader, objective: Objective) -> Callable[[Iterator[Batch], Any], Output]:
    """Build a forward step whose loss is the sum of loss_weights x the objective's loss over trained tokens."""

    def compute_loss(batch: Batch, out: Tensor) -> tuple[Tensor, Tensor, LossSums]:
        mask = batch["loss_mask"]
        loss, metrics = objective(batch, *reader.read(batch, out))
        total = torch.where(mask, loss * batch["loss_weights"], 0.0).sum()
        num_tokens = mask.sum(dtype=torch.int)
        with torch.no_grad():
            sums = {n: torch.where(mask, m, 0.0).sum() for n, m in metrics.items() if not n.endswith("_max")}
            maxima = {n: torch.where(mask, m, -torch.inf).max() for n, m in metrics.items() if n.endswith("_max")}
        # The schedule divides some losses in place, hence the copy.
        return total, num_tokens, LossSums(total.detach().clone(), num_tokens, sums, maxima)

    def step(batches: Iterator[Batch], model: Any) -> Output:
        batch, out = _run_model(batches, model)
        return out, functools.partial(compute_loss, batch)

    return step
