"""torch_dist checkpoints of a trainer. Owns what is in one and how it is restored; refuses where it lies."""

from __future__ import annotations

import queue
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from rlrecipes.engines.megatron.agreement import run_together
from rlrecipes.engines.megatron.trained_model import TrainedModel

_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
"""The one format that loads at another layout."""
_REFERENCE_PREFIX, _CRITIC_PREFIX = "reference.", "critic."


def _build_state(
    policy: TrainedModel, critic: TrainedModel | None, reference: dict[str, Tensor], *, is_loading: bool
) -> dict[str, Any]:
    state = _build_model_state(policy, is_loading=is_loading)
    if reference:  # the model's sharding with the reference's tensors in it
        sharding = _shard(policy, _build_metadata())
        state["reference"] = {
            name: replace(sharding[number][own_name], data=tensor)
            for name, tensor in reference.items()
            for number, _, own_name in [name.partition(".")]
        }
        add_prefix_for_sharding(state["reference"], _REFERENCE_PREFIX)
    if critic is not None:
        state["critic"] = _build_model_state(critic, is_loading=is_loading)
        add_prefix_for_sharding(state["critic"], _CRITIC_PREFIX)
    return state


def _build_metadata() -> dict[str, Any]:
    # A fresh dict a call: Megatron keeps the process groups of the moment in it.
    return {**_METADATA, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def _shard(model: TrainedModel, metadata: dict[str, Any]) -> dict[str, Any]:
    """Where each tensor of each model chunk, by its number, lies in the whole; checkpoints do not know of chunks."""
    return {str(number): chunk.sharded_state_dict(metadata=metadata) for number, chunk in enumerate(model.chunks)}


def _build_model_state(model: TrainedModel, *, is_loading: bool) -> dict[str, Any]:
    metadata = _build_metadata()
    sharding = _shard(model, metadata)
    return {
        "model": sharding,
        "optimizer": model.optimizer.sharded_state_dict(sharding, is_loading=is_loading, metadata=metadata),
        "num_train_steps": model.num_train_steps,
    }


def run_save_checkpoint(
    policy: TrainedModel, critic: TrainedModel | None, reference: dict[str, Tensor], directory: Path
) -> None:
    """Write a checkpoint; every rank calls this.

    Args:
        policy: with its optimizer and schedule.
        critic: the same; its tensors are named ``critic.*`` in the checkpoint. None when there is none.
        reference: the reference's weights by parameter name; empty when none is kept.
        directory: where; made if missing.

    Raises:
        CheckpointError: it cannot be written; on every rank.
    """
    state = _build_state(policy, critic, reference, is_loading=False)
    fix = "free space or fix permissions there; earlier checkpoints are untouched"
    run_together(str(directory), fix, lambda: directory.mkdir(parents=True, exist_ok=True))
    run_together(str(directory), fix, lambda: _run_write(state, directory))


def _run_write(state: dict[str, Any], directory: Path) -> None:
    # Saving waits here, in this process. Megatron's own queue is a Manager's: a process more, which a rank that is
    # killed would leave behind.
    filesystem_async._results_queue = queue.Queue()
    try:
        dist_checkpointing.save(state, str(directory))
    except CheckpointException as error:  # no Exception, and its text names no cause
        free_bytes = shutil.disk_usage(directory).free
        raise OSError(f"a writer failed, with {free_bytes / 1e6:.0f} MB free there: {error}") from error


def run_load_checkpoint(
    policy: TrainedModel, critic: TrainedModel | None, reference: dict[str, Tensor], directory: Path
) -> None:
    """Restore a checkpoint saved at any layout; every rank calls this.

    Args:
        policy: filled; learning rate and Adam's numbers stay its own.
        critic: the same; None when there is none.
        reference: filled in place; empty when none is kept.
        directory: from :func:`run_save_checkpoint`.

    Raises:
        CheckpointError: it is missing, broken, of another model, or only one of it and the recipe has a critic; on
            every rank.
    """
    loaded: dict[str, Any] = {}

    def load() -> None:
        if not dist_checkpointing.check_is_distributed_checkpoint(str(directory)):
            raise FileNotFoundError("holds no trainer checkpoint")
        keys = dist_checkpointing.load_tensors_metadata(str(directory)).keys()
        if reference and not any(key.startswith(_REFERENCE_PREFIX) for key in keys):
            raise FileNotFoundError("holds no reference, which this recipe needs")
        has_critic = any(key.startswith(_CRITIC_PREFIX) for key in keys)
        if has_critic and critic is None:
            raise ValueError("holds a critic, which this recipe lacks: algo.critic is null")
        if critic is not None and not has_critic:
            raise FileNotFoundError("holds no critic, which this recipe needs: algo.critic is set")
        state = _build_state(policy, critic, reference, is_loading=True)
        try:
            loaded.update(dist_checkpointing.load(state, str(directory)))
        except CheckpointException as error:
            raise OSError(f"cannot be read: {error}") from error

    run_together(str(directory), "resume from an earlier checkpoint, or with the recipe it was made with", load)
    _restore(policy, loaded)
    if critic is not None:
        _restore(critic, loaded["critic"])
    for name, tensor in reference.items():
        tensor.copy_(loaded["reference"][name])


def _restore(model: TrainedModel, state: dict[str, Any]) -> None:
    for number, chunk in enumerate(model.chunks):
        chunk.load_state_dict(state["model"][str(number)])
    num_train_steps = int(state["num_train_steps"])
    _restore_optimizer(model.optimizer, state["optimizer"], num_train_steps)
    model.resume(num_train_steps)


def _restore_optimizer(optimizer: ChainedOptimizer, state: dict[Any, Any], step: int) -> None:
    """Take moments and weights; the groups' learning rate and the like stay those of the running recipe.

    Layouts differ in how many optimizers are chained: experts have one of their own where their replicas are fewer. So
    nothing is taken but tensors, and the step from the schedule, which counts the same.
    """
    inners = optimizer.chained_optimizers
    restored = []
    for part, inner in zip(
        [state] if len(inners) == 1 else [state[n] for n in range(len(inners))], inners, strict=True
    ):
        own = inner.state_dict()
        for group in own["optimizer"]["param_groups"]:
            group["step"] = step
        sharding = {"param_state_sharding_type": _METADATA["distrib_optim_sharding_type"]}
        restored.append({**own, "param_state": part["param_state"], **sharding})
    optimizer.load_state_dict(restored[0] if len(inners) == 1 else dict(enumerate(restored)))
    for inner in optimizer.chained_optimizers:
        for entry in inner.optimizer.state.values():
            # Loading gives all parameters one step tensor, which AdamW would then advance once per parameter.
            if isinstance(entry.get("step"), torch.Tensor):
                entry["step"] = entry["step"].clone()
