"""Metrics of a train step over micro-batches and ranks. Owns their sums, means and the summary of what they count."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rlrecipes.algos.agreement import compute_off_policy_summary
from rlrecipes.engines.megatron.forward import LossSums


def reduce_metrics(found: list[LossSums]) -> dict[str, float]:
    """Metrics of a train step over all micro-batches and ranks; every rank calls this.

    Args:
        found: of this rank's micro-batches, on the last stage; nothing elsewhere.

    Returns:
        On every rank the same: ``loss``, ``num_tokens`` (trained), and the objective's metrics averaged over trained
        tokens (those named ``_max``: the largest; those named ``_loss``: summed like the loss).
    """
    metrics: list[dict[str, float]] = [{}]
    if parallel_state.is_pipeline_last_stage():
        metrics = [_reduce_over_replicas(found, parallel_state.get_data_parallel_group())]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast_object_list(
            metrics,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    return metrics[0]


def _reduce_over_replicas(found: list[LossSums], group: dist.ProcessGroup) -> dict[str, float]:
    names, maxima = list(found[0].sums), list(found[0].maxima)
    parts = [[s.loss, s.num_tokens, *(s.sums[name] for name in names)] for s in found]
    sums = torch.stack([torch.cat([part.double().reshape(-1) for part in row]) for row in parts]).sum(0)
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
    loss, num_tokens, *totals = torch.split(sums.cpu(), [part.numel() for part in parts[0]])
    metrics = {"loss": float(loss), "num_tokens": float(num_tokens)}
    divisor, added = max(metrics["num_tokens"], 1.0), dict(zip(names, totals, strict=True))
    metrics |= {
        name: float(total) / (1.0 if name.endswith("_loss") else divisor)
        for name, total in added.items()
        if not name.endswith("_counts")
    }
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
