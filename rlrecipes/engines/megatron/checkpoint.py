"""torch_dist checkpoints of a trainer. Owns what is in one and how it is restored; refuses where it lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from rlrecipes.engines.megatron.agreement import run_together

_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
"""The one format that loads at another TP, PP and DP."""


def _build_state(
    ddp: DistributedDataParallel, optimizer: ChainedOptimizer, reference: dict[str, Tensor], *, is_loading: bool
) -> dict[str, Any]:
    model = ddp.module.sharded_state_dict(metadata=_METADATA)
    state = {
        "model": model,
        "optimizer": optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=_METADATA),
    }
    if reference:
        state["reference"] = _build_reference_state(ddp, reference)
    return state


def _build_reference_state(ddp: DistributedDataParallel, reference: dict[str, Tensor]) -> dict[str, Any]:
    """The model's sharding with the reference's tensors in it."""
    state = ddp.module.sharded_state_dict(metadata=_METADATA)
    for name, tensor in reference.items():
        if name in state:
            state[name].data = tensor
    add_prefix_for_sharding(state, "reference.")
    result: dict[str, Any] = state
    return result


def run_save_checkpoint(
    ddp: DistributedDataParallel,
    optimizer: ChainedOptimizer,
    num_train_steps: int,
    reference: dict[str, Tensor],
    directory: Path,
) -> None:
    """Write a checkpoint; every rank calls this.

    Args:
        ddp: the model, wrapped.
        optimizer: its optimizer.
        num_train_steps: done so far.
        reference: the reference's weights by parameter name; empty when none is kept.
        directory: where; made if missing.

    Raises:
        CheckpointError: it cannot be written; on every rank.
    """
    state = _build_state(ddp, optimizer, reference, is_loading=False) | {"num_train_steps": num_train_steps}
    fix = "free space or fix permissions there; earlier checkpoints are untouched"
    run_together(str(directory), fix, lambda: directory.mkdir(parents=True, exist_ok=True))
    run_together(str(directory), fix, lambda: dist_checkpointing.save(state, str(directory)))


def run_load_checkpoint(
    ddp: DistributedDataParallel, optimizer: ChainedOptimizer, reference: dict[str, Tensor], directory: Path
) -> int:
    """Restore a checkpoint saved at any layout; every rank calls this.

    Args:
        ddp: the model, wrapped; filled.
        optimizer: filled; learning rate and Adam's numbers stay its own.
        reference: filled in place; empty when none is kept.
        directory: from :func:`run_save_checkpoint`.

    Returns:
        Train steps done.

    Raises:
        CheckpointError: it is missing, broken, or of another model; on every rank.
    """
    loaded: dict[str, Any] = {}

    def load() -> None:
        if not dist_checkpointing.check_is_distributed_checkpoint(str(directory)):
            raise FileNotFoundError("holds no trainer checkpoint")
        state = _build_state(ddp, optimizer, reference, is_loading=True)
        loaded.update(dist_checkpointing.load(state, str(directory)))

    run_together(str(directory), "resume from an earlier checkpoint, or the recipe it was made with", load)
    ddp.module.load_state_dict(loaded["model"])
    _restore_optimizer(optimizer, loaded["optimizer"])
    for name in reference:
        if name in loaded.get("reference", {}):
            reference[name].copy_(loaded["reference"][name])
    return int(loaded["num_train_steps"])


def _restore_optimizer(optimizer: ChainedOptimizer, state: dict[str, Any]) -> None:
    """Take moments and step; the groups' learning rate and the like stay those of the running recipe."""
    step = state["optimizer"]["param_groups"][0]["step"]
    own = optimizer.chained_optimizers[0].state_dict()["optimizer"]["param_groups"]
    state["optimizer"]["param_groups"] = [{**group, "step": step} for group in own]
    optimizer.load_state_dict(state)
    for inner in optimizer.chained_optimizers:
        for entry in inner.optimizer.state.values():
            # Loading gives all parameters one step tensor, which AdamW would then advance once per parameter.
            if isinstance(entry.get("step"), torch.Tensor):
                entry["step"] = entry["step"].clone()
