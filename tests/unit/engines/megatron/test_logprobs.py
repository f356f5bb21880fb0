from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlrecipes.engines.megatron import logprobs
from rlrecipes.engines.megatron.logprobs import compute_logprobs

VOCAB, PADDED, TOKENS = 37, 48, 23


class Alone:
    """A group of one."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def compute_expected(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
    log_p = torch.log_softmax(logits[:, :VOCAB] / temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


@pytest.fixture
def numbers() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    logits = 4 * torch.randn(TOKENS, PADDED)
    logits[:, VOCAB:] = 1e4  # what stands in the padding does not matter
    return logits.requires_grad_(), torch.randint(0, VOCAB, (TOKENS,))


@pytest.mark.parametrize("chunk", [64, 1 << 17])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_values_and_gradients_are_those_of_log_softmax(
    numbers: Any, temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(logprobs._CHUNK_ELEMENTS, "cpu", chunk)
    logits, targets = numbers
    found = compute_logprobs(logits, targets, temperature=temperature, vocab_size=VOCAB, group=Alone())  # type: ignore
    expected = compute_expected(logits, targets, temperature)
    upstream = torch.randn(2, TOKENS)
    for chosen in ([0], [1], [0, 1]):
        ours, theirs = (
            torch.autograd.grad([both[i] for i in chosen], logits, [upstream[i] for i in chosen], retain_graph=True)[0]
            for both in (found, expected)
        )
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        assert (ours[:, VOCAB:] == 0).all()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


class Meeting:
    """Three ranks as threads; stands for a gloo group, whose all-reduce the integration tests use."""

    def __init__(self, rank: int, board: dict[int, torch.Tensor], barrier: threading.Barrier) -> None:
        self._rank, self._board, self._barrier = rank, board, barrier

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._barrier.parties

    def reduce(self, tensor: torch.Tensor, combine: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._board[self._rank] = tensor.clone()
        self._barrier.wait()
        result = combine(torch.stack([self._board[rank] for rank in range(self.size())]))
        self._barrier.wait()
        tensor.copy_(result)


def test_a_rank_with_nothing_but_padding_takes_part(numbers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = numbers
    logits = torch.cat([logits.detach(), logits.detach()[:, :24]], 1)  # 72 rows, so that rank 2 of 3 has none

    def all_reduce(tensor: torch.Tensor, op: Any = None, *, group: Meeting) -> None:
        group.reduce(tensor, (lambda x: x.sum(0)) if op is None else (lambda x: x.amax(0)))

    monkeypatch.setattr(logprobs.dist, "all_reduce", all_reduce)
    barrier, board = threading.Barrier(3, timeout=20), {}
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        part = logits[:, rank * 24 : rank * 24 + 24].clone().requires_grad_()
        both = compute_logprobs(
            part, targets, temperature=0.5, vocab_size=VOCAB, group=Meeting(rank, board, barrier)  # type: ignore
        )  # fmt: skip
        (both[0] + 2 * both[1]).sum().backward()
        found[rank] = (both, part.grad)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    whole = logits[:, :VOCAB].clone().requires_grad_()
    expected = compute_expected(whole, targets, 0.5)
    (expected[0] + 2 * expected[1]).sum().backward()
    for both, _ in found.values():
        torch.testing.assert_close(both[0], expected[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(both[1], expected[1], atol=1e-5, rtol=1e-5)
    grads = torch.cat([found[rank][1] for rank in range(3)], 1)
    torch.testing.assert_close(grads[:, :VOCAB], whole.grad, atol=1e-5, rtol=1e-5)
    assert (grads[:, VOCAB:] == 0).all()
