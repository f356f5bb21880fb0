"""What Megatron-Core needs to run where there is no CUDA. Owns every patch and its reason; refuses numerics of its own.

Megatron asks ``torch.cuda`` in places that have nothing to do with a GPU. Each patch of torch acts only on calls made
from a module of Megatron, so the rest of the process sees torch as it is. Call :func:`run_patches` once per process,
before the process group exists; without it Megatron on CPU fails at its first buffer.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange")
_CALLER_FRAME = 2


def is_called_by_megatron(depth: int = _CALLER_FRAME) -> bool:
    """Whether the function ``depth`` frames up belongs to a module of Megatron."""
    name: str = sys._getframe(depth).f_globals.get("__name__", "")
    return name.startswith("megatron.")


class NullStream:
    """Stands for ``torch.cuda.Stream`` and ``Event``: work on a CPU is already in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, *args: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, *args: Any) -> None:
        """Nothing to wait for."""

    def record(self, *args: Any) -> None:
        """Nothing to record."""

    def record_event(self, *args: Any) -> NullStream:
        """Something to wait for, which is nothing."""
        return self

    def wait(self, *args: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


def _patch_scoped(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return (replacement if is_called_by_megatron() else original)(*args, **kwargs)

    setattr(owner, name, wrapper)


def _patch_factory(name: str) -> None:
    original = getattr(torch, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda") and is_called_by_megatron():
            kwargs["device"] = CPU
        return original(*args, **kwargs)

    setattr(torch, name, wrapper)


def _patch_torch_cuda() -> None:
    # DDP buffers, RoPE and the pipeline's receive buffers are made on `torch.cuda.current_device()`.
    _patch_scoped(torch.cuda, "current_device", lambda: CPU)
    # Pipeline sends and the checkpoint writer synchronise the device.
    _patch_scoped(torch.cuda, "synchronize", lambda *args: None)
    _patch_scoped(torch.cuda, "empty_cache", lambda: None)
    # The optimizer and DDP wrap their work in streams; annotations evaluate the classes, so they stay classes.
    _patch_scoped(torch.cuda, "current_stream", lambda *args: NullStream())
    _patch_scoped(torch.cuda, "stream", lambda *args: contextlib.nullcontext())
    torch.cuda.Stream = NullStream  # type: ignore[misc, assignment]
    torch.cuda.Event = NullStream  # type: ignore[misc, assignment]
    # Seeding the model-parallel generators goes through the CUDA generator.
    _patch_scoped(torch.cuda, "manual_seed", torch.manual_seed)
    _patch_scoped(torch.cuda, "get_rng_state", lambda *args: torch.get_rng_state())
    # Schedules, gradient clipping and the optimizer say device="cuda".
    for name in _FACTORIES:
        _patch_factory(name)


def _patch_tensor_methods() -> None:
    cuda, kind = torch.Tensor.cuda, torch.Tensor.type

    # `.cuda()` on tensors that are where they should be.
    def to_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if is_called_by_megatron() else cuda(self, *args, **kwargs)

    # The optimizer and gradient clipping choose a road by comparing `.type()` with torch.cuda.FloatTensor.
    def to_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = kind(self, *args, **kwargs)
        if not args and not kwargs and is_called_by_megatron():
            return str(answer).replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.cuda = to_cuda  # type: ignore[method-assign, assignment]
    torch.Tensor.type = to_type  # type: ignore[method-assign, assignment]


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import random as tracker
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from rlrecipes.engines.megatron.norm import build_rms_norm

    # The tracker of model-parallel generators reads and writes the CUDA generator's state.
    tracker._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state().clone()
    tracker._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # The local norm refuses sequence parallelism, and the block's final norm is hard-coded to it.
    WrappedTorchNorm.__new__ = build_rms_norm
    # All-to-all wants its sizes as numbers; only tensors on a GPU were turned into some.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )


@functools.cache
def run_patches() -> None:
    """Patch torch and Megatron for a process without CUDA, once; hides CUDA from this process and its children."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "torch._dynamo" in sys.modules:  # a machine with CUDA: Megatron's small functions were wrapped at import
        torch.compiler.set_stance("force_eager")
    _patch_torch_cuda()
    _patch_tensor_methods()
    _patch_megatron()
