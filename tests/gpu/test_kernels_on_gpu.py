"""Kernels that only a GPU runs, against torch on a CPU: logprobs with their gradient, attention of packed samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
VOCAB, PADDED, TOKENS = 32003, 32128, 129
LENGTHS = [60, 2, 33, 190, 45, 1, 300, 88]


class Alone:
    """A group of one."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@pytest.mark.parametrize("cut", [{}, {"top_k": 50}], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_logprobs_and_their_gradient_are_those_of_the_cpu(
    dtype: torch.dtype, tolerance: float, cut: dict[str, Any]
) -> None:
    from rlrecipes.engines.megatron.logprobs import compute_logprobs

    torch.manual_seed(0)
    logits = (4 * torch.randn(TOKENS, PADDED)).to(dtype)
    logits[:, VOCAB:] = 1e4  # what stands in the padding does not matter
    targets, upstream = torch.randint(0, VOCAB, (TOKENS,)), torch.randn(2, TOKENS)
    found = []
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        own = logits.to(device, kind).requires_grad_()
        read = compute_logprobs(
            own, targets.to(device), temperature=0.7, vocab_size=VOCAB, group=Alone(), **cut  # type: ignore
        )  # fmt: skip
        (grad,) = torch.autograd.grad(read[:2], own, [*upstream.to(device)])
        found.append([tensor.detach().float().cpu() for tensor in (*read, grad)])
    for ours, expected in zip(found[1][:3], found[0][:3], strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)  # the logits themselves are the same
    torch.testing.assert_close(found[1][3], found[0][3], atol=tolerance, rtol=tolerance)
    assert not found[1][3][:, VOCAB:].any()


@pytest.mark.parametrize(("num_heads", "num_groups", "width"), [(4, 4, 64), (8, 2, 128), (4, 1, 16)])
def test_flash_attention_is_the_attention_of_each_sample(num_heads: int, num_groups: int, width: int) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    from rlrecipes.engines.megatron.attention import compute_flash_attention, compute_packed_attention

    torch.manual_seed(0)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    shapes = [(int(starts[-1]), heads, width) for heads in (num_heads, num_groups, num_groups)]
    values = [torch.randn(shape).bfloat16() for shape in shapes]
    upstream = torch.randn(shapes[0]).bfloat16()
    own = [value.cuda().requires_grad_() for value in values]
    on_gpu = starts.cuda()
    packed = PackedSeqParams("thd", on_gpu, on_gpu, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS))
    out = compute_flash_attention(*own, packed, width**-0.5)
    exact = [value.float().requires_grad_() for value in values]
    expected = compute_packed_attention(*exact, starts, width**-0.5)
    grads = torch.autograd.grad(out, own, upstream.cuda())
    wanted = torch.autograd.grad(expected, exact, upstream.float())
    for ours, theirs in zip((out, *grads), (expected, *wanted), strict=True):
        error = (ours.detach().float().cpu() - theirs.detach()).norm() / theirs.detach().norm()
        assert error < 1e-2
