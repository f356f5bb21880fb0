"""Stand-in for sgl-kernel, which has no build for a CPU without AMX; on PYTHONPATH of the real SGLang server only.

SGLang imports its kernels by name while it loads and then computes with plain torch operators there, so every name
exists here and every kernel but one refuses to run. Never imported by rlrecipes.
"""

from __future__ import annotations

from typing import NoReturn

import torch

__version__ = "0.4.5"

torch.cuda.synchronize = lambda device=None: None
"""SGLang's weights checker waits for a GPU whatever the device is; on a CPU there is nothing to wait for."""


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    max_context_len: int | None = None,
) -> None:
    """Give each request the cache slots of its new tokens: ``req_to_token[req, start:end]``, taken in order.

    Args:
        req_pool_indices: [B], the requests' rows.
        req_to_token: [num_requests, max_context_len], written in place.
        start_offset: [B], the first new position of each request.
        end_offset: [B], one past its last.
        out_cache_loc: [sum of lengths], the slots, request after request.
        max_context_len: not needed here.
    """
    taken = 0
    requests = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in requests:
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU version here")

    return refuse
