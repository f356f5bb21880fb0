"""The trainer: Megatron-Core ranks, weights and checkpoints."""

import logging
import sys
import warnings

import torch

# Megatron tells at import, one line a module, that its optional GPU packages are not there.
warnings.filterwarnings("ignore", module="megatron")
logging.getLogger("megatron").setLevel(logging.ERROR)
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # a CUDA toolkit without a GPU is no news

if not torch.cuda.is_available():
    # Where Transformer Engine is installed Megatron takes its Adam and last norm, which need CUDA.
    sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]
    # At import Megatron wraps small functions in torch.compile. Without CUDA that would need a C++ compiler, and the
    # import alone costs seconds and 300 MB; Megatron takes `torch.compile` once, when its first module is imported.
    _compile = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        import megatron.core.jit  # noqa: F401
    finally:
        torch.compile = _compile
