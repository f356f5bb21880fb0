from __future__ import annotations

import pytest
import torch

from rlrecipes.engines.megatron.attention import apply_packed_rope, build_layout, compute_packed_attention

LENGTHS = {
    "one sample": [17],
    "equal": [9, 9, 9],
    "short ones of all lengths": [3, 31, 1, 12, 7],
    "long and short": [60, 2, 33, 90, 45, 1, 61, 88],
}


def attend_sample(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax attention written out, [L, heads, width]."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    future = torch.ones(scores.shape[1:]).triu(1).bool()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("num_groups", [1, 2, 4])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_each_sample_attends_to_itself_alone(lengths: list[int], num_groups: int) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(sum(lengths), n, 8, requires_grad=True) for n in (4, num_groups, num_groups))
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    expected = torch.cat(
        [
            attend_sample(*sample, scale=0.3)
            for sample in zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
        ]
    )
    found = compute_packed_attention(query, key, value, starts, 0.3)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, (query, key, value), upstream),
        torch.autograd.grad(expected, (query, key, value), upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_blocks_hold_every_token_once_and_little_padding(lengths: list[int]) -> None:
    layout = build_layout(torch.tensor([0, *lengths]).cumsum(0).int())
    assert sum(block.num_tokens for block in layout.blocks) == sum(lengths)
    assert sorted(layout.inverse.tolist()) == list(range(sum(lengths)))
    for block in layout.blocks:
        num_slots = block.num_samples * block.length
        assert block.length <= 32 or block.num_tokens >= 0.75 * num_slots


def test_rope_restarts_in_each_sample_and_its_gradient_is_its_transpose() -> None:
    torch.manual_seed(0)
    lengths, width = [5, 11, 2], 8
    angles = torch.arange(11)[:, None] * 100.0 ** (-torch.arange(0, width, 2) / width)
    freqs = torch.cat([angles, angles], 1)[:, None, None]
    x = torch.randn(sum(lengths), 3, width, dtype=torch.float64, requires_grad=True)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()

    def rotate(x: torch.Tensor) -> torch.Tensor:
        return apply_packed_rope(x, starts, freqs.double(), cp_size=1, cp_rank=0, interleaved=False)

    position = 7  # of the second sample
    first, second = x[5 + position].split(width // 2, -1)
    cos, sin = angles[position].cos(), angles[position].sin()
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    torch.testing.assert_close(rotate(x)[5 + position], expected, check_dtype=False)
    assert torch.autograd.gradcheck(rotate, x)
