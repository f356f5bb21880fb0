"""What a trainer needs beside Megatron: which packages its layers ask for, and whether they are here."""

from __future__ import annotations

import importlib.util
import runpy
from collections.abc import Iterator
from pathlib import Path

from rlrecipes.errors import Problem
from rlrecipes.plan.nodes import TrainerNode


def uses_transformer_engine(trainer: TrainerNode) -> bool:
    """Whether layers come from Transformer Engine: on CUDA, unless ``parallel.megatron.transformer_impl`` is local."""
    return trainer.device == "cuda" and trainer.megatron.get("transformer_impl") != "local"


def find_missing_packages(trainer: TrainerNode) -> Iterator[Problem]:
    """Layers and options that are not to be had in this interpreter; it must be the trainer's own.

    Args:
        trainer: device, and native options.
    """
    where, native = "parallel.megatron.transformer_impl", trainer.megatron
    asked = native.get("transformer_impl")
    if asked == "inference_optimized":
        yield Problem(where, "inference_optimized cannot train", "set transformer_engine or local")
    elif asked == "transformer_engine" and trainer.device == "cpu":
        yield Problem(where, "Transformer Engine needs a GPU", "set local, or topology.device=cuda")
    elif uses_transformer_engine(trainer) and not is_installed("transformer_engine"):
        fix = "install transformer-engine[pytorch], or set local"
        yield Problem(where, "Transformer Engine is not installed", fix)
    if native.get("gradient_accumulation_fusion") and not is_installed("fused_weight_gradient_mlp_cuda"):
        problem, fix = "needs APEX built with --cuda_ext, which is not installed", "install it, or set it false"
        yield Problem("parallel.megatron.gradient_accumulation_fusion", problem, fix)
    # Without it the norm would be one of bfloat16.
    if trainer.optimizer_cpu_offload and not (trainer.device == "cuda" and is_installed("transformer_engine")):
        problem, fix = "needs Transformer Engine, which is not installed", "install it, or set it false"
        yield Problem("parallel.optimizer_cpu_offload", problem, fix)


def is_installed(module: str) -> bool:
    """Whether this interpreter finds a module; it is not imported.

    Args:
        module: a top-level one.
    """
    return importlib.util.find_spec(module) is not None


def read_torch_build() -> tuple[str, str | None]:
    """The version of torch, and of the CUDA it is built for (None: without); torch is not imported, only its own note.

    Raises:
        ImportError: there is no torch.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ImportError("torch is not installed")
    build = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return build["__version__"], build["cuda"]
