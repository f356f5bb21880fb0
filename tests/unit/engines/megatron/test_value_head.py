"""The critic's head alone: its first weight, its precision."""

from __future__ import annotations

import pytest
import torch

from rlrecipes.engines.megatron.critic import ValueHead


def test_the_first_weight_depends_on_the_seed_alone_and_gives_small_values() -> None:
    heads = []
    for global_seed, seed in ((0, 3), (1, 3), (1, 4)):
        torch.manual_seed(global_seed)
        heads.append(ValueHead(4096, seed, False, "cpu"))
    first, again, other = (head.weight.detach() for head in heads)
    assert torch.equal(first, again) and not torch.equal(first, other)
    values = heads[0](torch.randn(2000, 1, 4096))[0]
    assert float(values.detach().std()) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_float32_products_of_the_hidden_states(dtype: torch.dtype) -> None:
    head, hidden = ValueHead(64, 3, False, "cpu"), torch.randn(5, 1, 64).to(dtype).requires_grad_()
    values, bias = head(hidden, weight=None)
    assert values.shape == (5, 1, 1) and values.dtype is torch.float32 and bias is None
    torch.testing.assert_close(values[:, 0, 0], (hidden.float() * head.weight).sum((1, 2)))
    values.sum().backward()
    assert head.weight.grad is not None and head.weight.grad.dtype is torch.float32
    torch.testing.assert_close(head.weight.grad[0], hidden.detach().float().sum((0, 1)))
    assert hidden.grad is not None and hidden.grad.dtype is dtype
