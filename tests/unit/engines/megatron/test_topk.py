"""Logits at chosen tokens and the likeliest tokens: against a sort and autograd of the plain softmax."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlrecipes.engines.megatron.logprobs import compute_logprobs
from rlrecipes.engines.megatron.topk import compute_logprobs_at, find_topk


class Alone:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 7))
def test_logprobs_at_chosen_tokens_are_those_of_the_softmax_in_value_and_gradient(seed: int, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 12, generator=generator) * 3
    targets = torch.randint(0, 9, (5,), generator=generator)
    ids = torch.randint(0, 9, (5, num_tokens), generator=generator)  # a token may come twice, or be the target
    weights = torch.randn(5, num_tokens, generator=generator)

    def run(compute):
        leaf = logits.clone().requires_grad_()
        found = compute(leaf)
        (found * weights).sum().backward()
        return found.detach(), leaf.grad

    def ours(leaf):
        logprobs = compute_logprobs(leaf, targets, temperature=0.7, vocab_size=9, group=Alone()).logprobs
        return compute_logprobs_at(leaf, targets, logprobs, ids, temperature=0.7, group=Alone())

    def plain(leaf):
        return torch.log_softmax(leaf[:, :9] / 0.7, 1).gather(1, ids)

    for found, expected in zip(run(ours), run(plain), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_likeliest_tokens_are_never_padding() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 9.0], [0.0, -1.0, 5.0, 9.0]])
    assert find_topk(logits, 2, vocab_size=3, group=Alone()).tolist() == [[1, 2], [2, 0]]
    assert find_topk(logits, 3, vocab_size=3, group=Alone()).tolist() == [[1, 2, 0], [2, 0, 1]]
