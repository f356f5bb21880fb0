"""Adam over sharded state and its schedule. Owns what Megatron's optimizer is built with; refuses the loss."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from torch import Tensor

from rlrecipes.config.schema import OptimConfig
from rlrecipes.errors import TrainerError


@functools.cache
def _patch_step_restore() -> None:
    """AdamW of torch keeps ``step`` in each parameter's state; restoring that state looks for it in the checkpoint."""
    restore = DistributedOptimizer._set_main_param_and_optimizer_states

    def restore_but_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        restore(self, model_param, {"step": state["step"], **tensors} if "step" in state else tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = restore_but_step


def compute_finite_norm(
    compute_norm: Callable[[], float], where: str = "trainer.train_step", section: str = "optim"
) -> float:
    """Global gradient norm; every rank computes the same.

    Args:
        compute_norm: Megatron's.
        where: of the error: the method that trains.
        section: of the recipe, that holds the learning rate.

    Raises:
        TrainerError: it is not finite. Megatron asks for it before it touches a weight.
    """
    norm = float(compute_norm())
    if not math.isfinite(norm):
        raise TrainerError(
            f"{where}.grad_norm",
            f"the gradient norm is {norm}; no weight was changed",
            f"resume from the last checkpoint with a smaller {section}.lr or {section}.clip_grad, or look at the batch",
        )
    return norm


def build_optimizer(
    config: OptimizerConfig, chunks: list[DistributedDataParallel], *, where: str, section: str
) -> ChainedOptimizer:
    """Build Adam with state sharded over the data-parallel ranks, state present and zero.

    Moments and, for bfloat16, a copy of the weights are float32.

    Args:
        config: Adam's numbers and the weights' precision.
        chunks: the model, wrapped.
        where: of an error: the method that trains.
        section: of the recipe, that holds Adam's numbers.
    """
    optimizer = get_megatron_optimizer(config, chunks, _build_overrides(config))
    optimizer.get_grad_norm = functools.partial(compute_finite_norm, optimizer.get_grad_norm, where, section)
    if not HAVE_APEX_OR_TE:
        _patch_step_restore()
    for inner in optimizer.chained_optimizers:
        if isinstance(inner.optimizer, HybridDeviceOptimizer):
            _prepare_offloaded(inner.optimizer)
        elif not HAVE_APEX_OR_TE:
            _prepare_adamw(inner)
    return optimizer


def run_reload_weights(optimizer: ChainedOptimizer) -> None:
    """Take the model's weights as they are now for those the optimizer steps from.

    Args:
        optimizer: from :func:`build_optimizer`, before its first step.
    """
    optimizer.reload_model_params()
    for inner in optimizer.chained_optimizers:
        if isinstance(inner.optimizer, HybridDeviceOptimizer):
            _prepare_offloaded(inner.optimizer)


def iter_state_tensors(optimizer: ChainedOptimizer) -> Iterator[Tensor]:
    """Every tensor that the optimizer steps or remembers: copies of the weights, or the weights, and moments.

    Args:
        optimizer: from :func:`build_optimizer`.
    """
    for inner in optimizer.chained_optimizers:
        for group in inner.optimizer.param_groups:
            yield from group["params"]
        for state in inner.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _prepare_offloaded(optimizer: Any) -> None:
    """Copy the weights to the host anew, and create the state there, zero.

    Only a step creates it: one without gradient and learning rate, which is then not counted. Megatron's own way to it
    takes a step with random gradients.
    """
    optimizer._init_sub_optimizers()
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
            # What stays on the GPU is stepped by kernels that read past a single number.
            is_copied = parameter in optimizer.gpu_params_map_cpu_copy
            parameter.decoupled_grad = zero.expand_as(parameter) if is_copied else torch.zeros_like(parameter)
    optimizer.step()
    torch.cuda.synchronize()
    for part in optimizer.sub_optimizers:
        for counted in (*part.param_groups, *part.state.values()):  # Adam of Transformer Engine counts in its groups
            if "step" in counted:
                counted["step"] *= 0
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()


def _build_overrides(config: OptimizerConfig) -> dict[ParamKey, ParamGroupOverride]:
    """Megatron's own, and a group for parameters of another precision, decayed like the rest.

    Within a group Megatron puts float32 parameters first but counts them in the model's order, so one of two precisions
    mistakes a parameter's state for another's when it is saved or loaded.
    """
    other = ParamPredicate("other_precision", lambda parameter: parameter.dtype is not config.params_dtype)
    overrides: dict[ParamKey, ParamGroupOverride] = get_standard_config_overrides(config)
    overrides[ParamKey(predicate=other)] = ParamGroupOverride(start_wd=config.weight_decay, end_wd=config.weight_decay)
    return overrides


def _prepare_adamw(inner: Any) -> None:
    """Create the state now, so that a checkpoint before the first step has some, and use the fused kernel."""
    inner.init_state_fn(inner.optimizer, inner.config)
    for state in inner.optimizer.state.values():
        state["step"] = torch.zeros((), device=state["exp_avg"].device)  # where the fused kernel wants it
    for group in inner.optimizer.param_groups:
        group["fused"] = True


def build_scheduler(optim: OptimConfig, num_train_steps_total: int, optimizer: ChainedOptimizer) -> Any:
    """Build the learning-rate schedule.

    Formula, for train step k = 0, 1, ... with W warm-up steps of N::

        k < W:  lr (k + 1) / (W + 1)
        else:   constant: lr
                linear:   min_lr + (lr - min_lr) (1 - (k - W) / (N - W))
                cosine:   min_lr + (lr - min_lr) (1 + cos(pi (k - W) / (N - W))) / 2

    so the first step already moves the weights, and ``min_lr`` is where step N would be.

    Args:
        optim: peak, end and shape.
        num_train_steps_total: N.
        optimizer: whose groups it sets.
    """
    warmup = optim.num_warmup_train_steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=optim.lr / (warmup + 1),
        max_lr=optim.lr,
        min_lr=min(optim.min_lr, optim.lr),
        lr_warmup_steps=warmup,
        lr_decay_steps=max(num_train_steps_total, warmup + 1),
        lr_decay_style=optim.lr_decay_style,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
