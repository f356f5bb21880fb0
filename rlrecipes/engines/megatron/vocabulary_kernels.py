"""What logprobs read from a GPU's logits, and their gradient, each in one pass. Owns both kernels; refuses cuts.

In torch each of these is a dozen passes over float32 copies of the logits. Here the logits are read once, in their own
precision, and the gradient is written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
"""Columns a program works on at a time."""
_NUM_WARPS = 8


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]  # micro-batches differ in it
def _sum_rows(  # type: ignore[no-untyped-def]  # noqa: PLR0913 (pointers and numbers, one by one)
    logits,
    targets,
    highest,
    sums,
    row_stride,
    num_rows,
    scale,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program: the sums move along whenever a higher logit is met."""
    row = tl.program_id(0).to(tl.int64)
    start_of_row = logits + row * row_stride
    top = -1e30
    mass = 0.0
    moment = 0.0
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        is_real = columns < WIDTH
        z = tl.load(start_of_row + columns, mask=is_real, other=-float("inf")).to(tl.float32) * scale
        higher = tl.maximum(top, tl.max(z, 0))
        shift = top - higher
        y = z - higher
        p = tl.exp(y)
        factor = tl.exp(shift)
        moment = (moment + shift * mass) * factor + tl.sum(tl.where(is_real, p * y, 0.0), 0)
        mass = mass * factor + tl.sum(p, 0)
        top = higher
    target = tl.load(start_of_row + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(highest + row, top)
    tl.store(sums + row, mass)
    tl.store(sums + num_rows + row, moment)
    tl.store(sums + 2 * num_rows + row, target - top)


@triton.jit  # type: ignore[untyped-decorator]
def _grade_rows(  # type: ignore[no-untyped-def]  # noqa: PLR0913 (pointers and numbers, one by one)
    logits,
    out,
    targets,
    highest,
    mass,
    entropy,
    grad_logprobs,
    grad_entropy,
    row_stride,
    out_stride,
    scale,
    num_columns,
    WIDTH: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one row a program; columns from WIDTH on get 0, and a target of -1 is in none."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = columns < WIDTH
    z = tl.load(logits + row * row_stride + columns, mask=is_real, other=-float("inf")).to(tl.float32) * scale
    y = z - tl.load(highest + row)
    total = tl.load(mass + row)
    by_logprob = tl.load(grad_logprobs + row)
    p = tl.exp(y) / total
    grad = -p * by_logprob
    if HAS_ENTROPY:
        log_p = y - tl.log(total)
        grad -= tl.where(is_real, p * (log_p + tl.load(entropy + row)), 0.0) * tl.load(grad_entropy + row)
    grad += tl.where(columns == tl.load(targets + row), by_logprob, 0.0)
    grad = tl.where(is_real, grad, 0.0)
    tl.store(out + row * out_stride + columns, grad.to(out.dtype.element_ty), mask=columns < num_columns)


def compute_row_sums(logits: Tensor, targets: Tensor, *, width: int, scale: float) -> tuple[Tensor, Tensor]:
    """Highest z and sums of each row, z = logits x scale over the leading ``width`` columns.

    Formula, with y = z - highest::

        sums = (sum_v e^y_v, sum_v y_v e^y_v, y_target)

    Args:
        logits: [T, V].
        targets: [T] int64, below ``width``.
        width: at least 1.
        scale: > 0.

    Returns:
        [T] and [3, T] float32.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows = len(logits)
    highest = logits.new_empty(num_rows, dtype=torch.float32)
    sums = logits.new_empty((3, num_rows), dtype=torch.float32)
    if num_rows:
        _sum_rows[(num_rows,)](
            logits,
            targets,
            highest,
            sums,
            logits.stride(0),
            num_rows,
            scale,
            WIDTH=width,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )
    return highest, sums


def compute_logits_gradient(
    logits: Tensor,
    targets: Tensor,
    state: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor | None, Tensor | None],
    *,
    width: int,
    scale: float,
) -> Tensor:
    """Gradient of logprobs and entropy with respect to the logits.

    Formula, with p = e^(z - highest) / mass::

        grad_v = scale (grad_logprob (onehot_v - p_v) - grad_entropy p_v (log p_v + entropy))

    Args:
        logits: [T, V].
        targets: [T] int64; -1 where the target's column is not here.
        state: over all ranks, [T] float32 each: highest, mass = sum of e^(z - highest), entropy in nats.
        grads: of logprobs and entropy, [T] float32 each; None for 0.
        width: leading columns that are no padding; at least 1.
        scale: > 0.

    Returns:
        [T, V], as the logits; 0 in the padding.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, num_columns = logits.shape
    highest, mass, entropy = (part.contiguous() for part in state)
    grad_logprobs, grad_entropy = (None if grad is None else (grad * scale).contiguous() for grad in grads)
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(mass)
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if num_rows:
        _grade_rows[(num_rows, triton.cdiv(num_columns, _BLOCK))](
            logits,
            out,
            targets,
            highest,
            mass,
            entropy,
            grad_logprobs,
            grad_logprobs if grad_entropy is None else grad_entropy,
            logits.stride(0),
            out.stride(0),
            scale,
            num_columns,
            WIDTH=width,
            HAS_ENTROPY=grad_entropy is not None,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )
    return out
