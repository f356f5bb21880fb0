"""One micro-batch through the model, and what is read from its logits. Owns both loss functions of the schedule.

Megatron calls the step on every pipeline stage and the loss function on the last one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlrecipes.engines.megatron.context_parallel import find_positions, pad_starts, sum_over_ranks
from rlrecipes.engines.megatron.logprobs import compute_logprobs
from rlrecipes.engines.megatron.topk import compute_logprobs_at, find_topk
from rlrecipes.types import MicroBatch

Batch = Mapping[str, Tensor]
Objective = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""(the batch and what else the reader reads) -> (loss [T], metrics [T] each): of logprobs and entropy [T] see
rlrecipes/algos/objective.py, of values [T] rlrecipes/algos/value_loss.py."""
Output = tuple[Tensor, Callable[..., Any]]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """One micro-batch as the model takes it.

    The objective sees all of it on every rank; the model sees this CP rank's share of the tokens.

    Attributes:
        batch: the arrays of the MicroBatch as tensors under their names (an array that is None is absent), and
            ``sample_index``, [T] int64: which packed sample each position belongs to.
        token_ids: [1, T'] int64, of this CP rank.
        position_ids: [1, T'] int64.
        packed: where each sample starts over all CP ranks, in Megatron's words; padding is a sample too.
        positions: those of the T' whose logits are computed, [N]; None for all.
        places: where these lie in the batch, [N]; T for what only pads a sample. None when they are the batch itself.
        group: CP ranks.
    """

    batch: dict[str, Tensor]
    token_ids: Tensor
    position_ids: Tensor
    packed: PackedSeqParams
    positions: Tensor | None
    places: Tensor | None
    group: dist.ProcessGroup

    def take(self, name: str) -> Tensor:
        """An array of the batch at the positions whose logits are computed, [N, ...]."""
        array = self.batch[name]
        return array if self.places is None else array[self.places.clamp(max=len(array) - 1)]

    def spread(self, values: Tensor) -> Tensor:
        """Put values [N, ...] of these positions, of all CP ranks, where they belong, [T, ...]; 0 elsewhere."""
        if self.places is None:
            return values
        num_tokens = len(self.batch["loss_mask"])
        whole = values.new_zeros(num_tokens + 1, *values.shape[1:]).index_copy(0, self.places, values)
        return sum_over_ranks(whole[:num_tokens], self.group)


def build_inputs(
    micro_batch: MicroBatch, *, device: str, is_sequence_parallel: bool, group: dist.ProcessGroup
) -> Inputs:
    """Turn arrays into what the model takes.

    The output layer is the widest, so it sees only tokens that are trained; not under sequence parallelism, where it
    gathers the tokens itself.

    Args:
        micro_batch: of this data-parallel rank.
        device: where the tensors go.
        is_sequence_parallel: whether activations are split over TP.
        group: CP ranks, over which each sample is split.
    """
    arrays = {field.name: getattr(micro_batch, field.name) for field in dataclasses.fields(micro_batch)}
    del arrays["sample_indices"]
    # All of it is worked out on the CPU: asking a GPU for a number would wait for the micro-batch before.
    # Copied: arrays that came through Ray are read-only, which torch has no notion of.
    batch = {name: torch.tensor(array) for name, array in arrays.items() if array is not None}
    lengths = batch["cu_seqlens"].diff()
    batch["sample_index"] = torch.arange(len(lengths)).repeat_interleave(lengths)
    starts = pad_starts(batch["cu_seqlens"], group.size())
    longest = int(starts.diff().max())
    if group.size() == 1:
        token_ids, position_ids, places = batch["token_ids"], batch["position_ids"], None
        is_trained = batch["loss_mask"]
    else:
        num_tokens = int(starts[-1]) // group.size()
        sample, position_ids = find_positions(starts, group.size(), group.rank(), num_tokens)
        is_padding = position_ids >= lengths[sample]
        places = torch.where(is_padding, len(batch["token_ids"]), batch["cu_seqlens"][sample] + position_ids)
        token_ids, is_trained = (_append_zero(batch[name])[places] for name in ("token_ids", "loss_mask"))
    positions = None
    if not is_sequence_parallel:
        positions = is_trained.nonzero().squeeze(1)
        if not len(positions):  # nothing is trained here: keep one, so that every gradient exists
            positions = positions.new_zeros(1)
        places = positions if places is None else places[positions]
    move = functools.partial(_move, device=device)
    starts = move(starts)
    return Inputs(
        {name: move(array) for name, array in batch.items()},
        move(token_ids)[None],
        move(position_ids)[None],
        PackedSeqParams("thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest),
        None if positions is None else move(positions),
        None if places is None else move(places),
        group,
    )


def _move(array: Tensor, device: str) -> Tensor:
    """To the device, without waiting for what it is doing: only pinned memory allows that."""
    return array if device == "cpu" else array.pin_memory().to(device, non_blocking=True)


def _append_zero(array: Tensor) -> Tensor:
    return torch.nn.functional.pad(array, (0, 1))


class Reader(Protocol):
    """Reads from the last stage's output what an objective is about."""

    def read(self, inputs: Inputs, out: Tensor) -> tuple[Any, ...]:
        """The batch as the objective is to see it, then what was read: [T] each, 0 where nothing is trained."""


class _Take(torch.autograd.Function):
    """Rows by index, none taken twice: the gradient is put where autograd's own would add, row by row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        """Take ``x[index]``."""
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Put the gradient at ``index``, 0 elsewhere."""
        (index,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.shape).index_copy_(0, index, grads[0]), None


def _take(x: Tensor, index: Tensor) -> Tensor:
    rows: Tensor = _Take.apply(x, index)  # type: ignore[no-untyped-call]
    return rows


def compute_logits(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, context: Tensor | None, **unused: Any
) -> Tensor:
    """The output layer at some positions; Megatron's hook after the last layer.

    Args:
        hidden_states: [T, 1, hidden], or this TP rank's share of T.
        output_layer: column-parallel.
        output_weight: the tied embedding; None when the layer has its own.
        context: positions [N], or None for all.
        unused: what else Megatron offers.

    Returns:
        [N, V / TP].
    """
    kept = hidden_states if context is None else _take(hidden_states, context)
    logits: Tensor = output_layer(kept, weight=output_weight)[0]
    return logits.squeeze(1)


@dataclasses.dataclass(frozen=True)
class LogprobReader:
    """Reads logprobs from the logits of the last stage.

    Attributes:
        temperature: divides the logits.
        vocab_size: rows that are no padding.
        group: TP ranks.
        top_p: the engine's; 1 cuts nothing.
        top_k: the engine's; -1 cuts nothing.
    """

    temperature: float
    vocab_size: int
    group: dist.ProcessGroup
    top_p: float = 1.0
    top_k: int = -1

    def read(self, inputs: Inputs, logits: Tensor) -> tuple[Batch, Tensor, Tensor]:
        """Logprobs of ``target_ids`` and entropy, [T] each, 0 where nothing is trained; logits as computed above.

        The batch comes back with ``rollout_logprobs`` of the distribution that the logprobs are of. Engines report the
        tokens' logprobs before top_p and top_k cut and renormalise (see ``types.Completion``), so the log-mass of the
        kept tokens leaves them, as these weights have it. In the first train step after a weight sync that is the
        engine's, up to rounding; later it has moved as far as the policy has. With ``teacher_topk_ids`` it also gets
        ``topk_logprobs``, [T, K] with gradient.
        """
        chosen = inputs.take("target_ids")
        found = compute_logprobs(
            logits,
            chosen,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            vocab_size=self.vocab_size,
            group=self.group,
        )
        mask, batch = inputs.batch["loss_mask"], inputs.batch
        logprobs, entropy, kept_log_mass = (torch.where(mask, inputs.spread(x), 0.0) for x in found)
        if "rollout_logprobs" in batch:
            batch = {**batch, "rollout_logprobs": batch["rollout_logprobs"] - kept_log_mass}
        if "teacher_topk_ids" in batch:
            ids = inputs.take("teacher_topk_ids")
            at = compute_logprobs_at(
                logits, chosen, found.logprobs, ids, temperature=self.temperature, group=self.group
            )
            batch = {**batch, "topk_logprobs": inputs.spread(at)}
        return batch, logprobs, entropy


@dataclasses.dataclass(frozen=True)
class TopkReader:
    """Reads a teacher's likeliest tokens and their logprobs.

    Attributes:
        num_tokens: K.
        temperature: divides the logits.
        vocab_size: rows that are no padding.
        group: TP ranks.
    """

    num_tokens: int
    temperature: float
    vocab_size: int
    group: dist.ProcessGroup

    def read(self, inputs: Inputs, logits: Tensor) -> tuple[Batch, Tensor]:
        """[T, 2 K] float32: K token ids, exact up to 2**24, then their logprobs; 0 where nothing is trained."""
        chosen = inputs.take("target_ids")
        ids = find_topk(logits, self.num_tokens, vocab_size=self.vocab_size, group=self.group)
        found = compute_logprobs(
            logits, chosen, temperature=self.temperature, vocab_size=self.vocab_size, group=self.group
        )
        logprobs = compute_logprobs_at(
            logits, chosen, found.logprobs, ids, temperature=self.temperature, group=self.group
        )
        both = inputs.spread(torch.cat((ids.float(), logprobs), 1))
        return inputs.batch, torch.where(inputs.batch["loss_mask"][:, None], both, 0.0)


def _run_model(micro_batches: Iterator[Inputs], model: Any) -> tuple[Inputs, Tensor]:
    inputs = next(micro_batches)
    out = model(
        inputs.token_ids,
        inputs.position_ids,
        None,
        packed_seq_params=inputs.packed,
        output_processor=compute_logits,
        output_processor_context=inputs.positions,
    )
    return inputs, out


def build_reading_step(reader: Reader) -> Callable[[Iterator[Inputs], Any], Output]:
    """Build a forward step that collects the first thing read, to be run with ``collect_non_loss_data``."""

    def read(inputs: Inputs, out: Tensor, non_loss_data: bool = True) -> Tensor:
        found: Tensor = reader.read(inputs, out)[1]
        return found

    def step(micro_batches: Iterator[Inputs], model: Any) -> Output:
        inputs, out = _run_model(micro_batches, model)
        return out, functools.partial(read, inputs)

    return step


@dataclasses.dataclass(frozen=True)
class LossSums:
    """What one micro-batch adds to the metrics of a train step.

    Attributes:
        loss: sum of loss_weights x loss over trained tokens.
        num_tokens: trained tokens.
        sums: metric -> sum over trained tokens; of one whose name ends ``_loss``, x loss_weights as the loss is; of one
            whose name ends ``_counts``, all its counts.
        maxima: metric whose name ends ``_max`` -> largest over trained tokens; -inf where there are none.
    """

    loss: Tensor
    num_tokens: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def build_train_step(reader: Reader, objective: Objective) -> Callable[[Iterator[Inputs], Any], Output]:
    """Build a forward step whose loss is the sum of loss_weights x the objective's loss over trained tokens."""

    def compute_loss(inputs: Inputs, out: Tensor) -> tuple[Tensor, Tensor, LossSums]:
        mask, weights = inputs.batch["loss_mask"], inputs.batch["loss_weights"]
        loss, metrics = objective(*reader.read(inputs, out))
        total = torch.where(mask, loss * weights, 0.0).sum()
        num_tokens = mask.sum(dtype=torch.int)
        with torch.no_grad():
            sums = {
                n: torch.where(mask, m * weights if n.endswith("_loss") else m, 0.0).sum()
                for n, m in metrics.items()
                if not n.endswith(("_max", "_counts"))
            }
            sums |= {n: m for n, m in metrics.items() if n.endswith("_counts")}
            maxima = {n: torch.where(mask, m, -torch.inf).max() for n, m in metrics.items() if n.endswith("_max")}
        # The schedule divides some losses in place, hence the copy.
        return total, num_tokens, LossSums(total.detach().clone(), num_tokens, sums, maxima)

    def step(micro_batches: Iterator[Inputs], model: Any) -> Output:
        inputs, out = _run_model(micro_batches, model)
        return out, functools.partial(compute_loss, inputs)

    return step
