from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlrecipes.engines.megatron import logprobs
from rlrecipes.engines.megatron.kept_set import find_kept_set
from rlrecipes.engines.megatron.logprobs import compute_logprobs

VOCAB, PADDED, TOKENS = 37, 48, 23


class Alone:
    """A group of one."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def compute_expected(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, top_p: float = 1.0, top_k: int = -1
) -> tuple[torch.Tensor, ...]:
    """Row by row, by sorting, with autograd; equals at the cut are kept in the order of their ids."""
    rows = []
    for row, target in zip(logits[:, :VOCAB].double() / temperature, targets.tolist(), strict=True):
        q = torch.softmax(row, -1)
        kept, before = [], 0.0
        for rank, token in enumerate(q.detach().sort(descending=True, stable=True).indices.tolist()):
            if (top_k < 0 or rank < top_k) and before <= top_p:
                kept.append(token)
            before += q[token].item()
        log_p = torch.log_softmax(row[sorted({*kept, target})], -1)
        mass = q[sorted({*kept, target})].sum().log().detach()
        rows.append((log_p[sorted({*kept, target}).index(target)], -(log_p.exp() * log_p).sum(), mass))
    return tuple(torch.stack(column).float() for column in zip(*rows, strict=True))


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
    expected = compute_expected(logits, targets, temperature)[:2]
    upstream = torch.randn(2, TOKENS)
    for chosen in ([0], [1], [0, 1]):
        ours, theirs = (
            torch.autograd.grad([both[i] for i in chosen], logits, [upstream[i] for i in chosen], retain_graph=True)[0]
            for both in (found, expected)
        )
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        assert (ours[:, VOCAB:] == 0).all()
    assert (found.kept_log_mass == 0).all()
    for ours, theirs in zip(found[:2], expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


CUTS = [
    {"top_p": 0.6},
    {"top_k": 5},
    {"top_p": 0.9, "top_k": 4},
    {"top_p": 0.3, "top_k": 20},
    {"top_k": 1},
    {"top_k": 99},
]


@pytest.mark.parametrize("chunk", [64, 1 << 17])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_cut_distribution_is_renormalised_over_the_kept_tokens(
    numbers: Any, cut: dict[str, Any], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(logprobs._CHUNK_ELEMENTS, "cpu", chunk)
    logits, targets = numbers
    found = compute_logprobs(logits, targets, temperature=0.7, **cut, vocab_size=VOCAB, group=Alone())  # type: ignore
    *expected, mass = compute_expected(logits, targets, 0.7, **cut)
    upstream = torch.randn(2, TOKENS)
    for ours, theirs, weights in zip(found[:2], expected, upstream, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        grads = [torch.autograd.grad(values, logits, weights, retain_graph=True)[0] for values in (ours, theirs)]
        torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)
        assert (grads[0][:, VOCAB:] == 0).all()
    torch.testing.assert_close(found.kept_log_mass, mass, atol=1e-5, rtol=1e-5)
    assert not found.kept_log_mass.requires_grad


def test_temperature_and_top_k_by_hand() -> None:
    logits, group = torch.tensor([[2.0, 1.0, 0.0]]), Alone()

    def read(target: int, **options: Any) -> float:
        return float(
            compute_logprobs(logits, torch.tensor([target]), **options, vocab_size=3, group=group).logprobs  # type: ignore
        )

    assert read(0, temperature=0.5) == pytest.approx(-0.1429, abs=5e-5)
    assert read(0, temperature=1.0) == pytest.approx(-0.407606, abs=1e-6)
    # tokens 0 and 1 are kept: log(e^2 / (e^2 + e))
    assert read(0, temperature=1.0, top_k=2) == pytest.approx(-0.313262, abs=1e-6)
    assert read(1, temperature=1.0, top_p=0.7) == pytest.approx(-1.313262, abs=1e-6)
    # .665 stands before token 1, more than .66: only token 0 is kept
    assert read(0, temperature=1.0, top_p=0.66) == pytest.approx(0.0, abs=1e-6)
    # ... and the target, when that was drawn: log(1 / (e^2 + 1)), not minus infinity
    assert read(2, temperature=1.0, top_p=0.66) == pytest.approx(-2.126928, abs=1e-6)


def test_equals_at_the_cut_share_the_places_that_are_left() -> None:
    """bfloat16 logits have many equals; the engine keeps exactly top_k tokens, and as many equals as top_p has room."""
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 1.0, 0.0]], requires_grad=True)
    e = torch.tensor([3.0, 1.0, 0.0]).exp().tolist()
    total = e[0] + 4 * e[1] + e[2]
    for options, num_kept in (({"top_k": 3}, 2), ({"top_p": (e[0] + 1.5 * e[1]) / total}, 2), ({"top_k": 5}, 4)):
        found = compute_logprobs(
            logits, torch.tensor([1]), temperature=1.0, **options, vocab_size=6, group=Alone()  # type: ignore
        )  # fmt: skip
        kept_mass = e[0] + num_kept * e[1]
        assert found.logprobs.exp().item() == pytest.approx(e[1] / kept_mass, rel=1e-5)
        assert found.kept_log_mass.exp().item() == pytest.approx(kept_mass / total, rel=1e-5)
        (grad,) = torch.autograd.grad(found.logprobs.sum(), logits)
        share = num_kept / 4 * e[1] / kept_mass
        wanted = [-e[0] / kept_mass, 1 - share, -share, -share, -share, 0.0]
        torch.testing.assert_close(grad[0], torch.tensor(wanted), atol=1e-6, rtol=1e-5)


def test_a_kept_set_in_masses() -> None:
    masses = torch.tensor([[1.0, 0.5, 0.5, 0.0], [1.0, 0.5, 0.25, 0.125]])
    for options, cut, share, mass in (
        ({"top_k": 2, "top_p": 1.0}, [0.5, 0.5], [0.5, 1.0], [1.5, 1.5]),
        ({"top_k": -1, "top_p": 0.5}, [0.5, 1.0], [0.5, 1.0], [1.5, 1.0]),  # exactly half stands before a token: kept
        ({"top_k": 9, "top_p": 1.0}, [0.0, 0.0], [1.0, 0.0], [2.0, 1.875]),  # all are kept; no token is without mass
    ):
        kept = find_kept_set(masses, masses.sum(1), **options, group=Alone())  # type: ignore
        for found, wanted in zip((kept.cut, kept.share, kept.mass), (cut, share, mass), strict=True):
            torch.testing.assert_close(found, torch.tensor(wanted))


@pytest.mark.parametrize("value", [0.0, 50.0])
def test_a_flat_distribution_and_one_with_all_mass_on_one_token(value: float) -> None:
    logits = torch.zeros(2, 8)
    logits[:, 3] = value * 10
    targets = torch.tensor([3, 5])
    found = compute_logprobs(
        logits, targets, temperature=1.0, top_p=0.5, top_k=4, vocab_size=8, group=Alone()  # type: ignore
    )  # fmt: skip
    # flat: top_k keeps 4 of 8, top_p those before whom at most .5 stands, which are 5
    wanted = [-1.3862944, -1.3862944] if value == 0 else [0.0, -500.0]
    torch.testing.assert_close(found.logprobs, torch.tensor(wanted), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(found.entropy, torch.tensor([1.3862944] * 2 if value == 0 else [0.0, 0.0]))


class Sizes(TorchDispatchMode):
    """Remembers tensors as large as the logits."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self.num_elements, self.found = num_elements, set[tuple[int, torch.dtype]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() >= 2 * self.num_elements:
                self.found.add((tensor.untyped_storage().data_ptr(), tensor.dtype))
        return out


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9, "top_k": 50}], ids=str)
def test_nothing_as_large_as_the_logits_is_made_but_their_gradient(
    cut: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(logprobs._CHUNK_ELEMENTS, "cpu", 256)
    logits = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 128, (64,))
    with Sizes(logits.numel()) as sizes:
        found = compute_logprobs(logits, targets, temperature=0.7, **cut, vocab_size=128, group=Alone())  # type: ignore
        torch.autograd.grad(found.logprobs.sum() + found.entropy.sum(), logits)
    made = sizes.found - {(logits.untyped_storage().data_ptr(), torch.bfloat16)}
    assert {dtype for _, dtype in made} == {torch.bfloat16} and len(made) == 1


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


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9, "top_k": 4}], ids=str)
def test_a_rank_with_nothing_but_padding_takes_part(
    numbers: Any, cut: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
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
            part, targets, temperature=0.5, **cut, vocab_size=VOCAB, group=Meeting(rank, board, barrier)  # type: ignore
        )  # fmt: skip
        (both[0] + 2 * both[1]).sum().backward()
        found[rank] = (both, part.grad)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    whole = logits[:, :VOCAB].clone().requires_grad_()
    expected = compute_expected(whole, targets, 0.5, **cut)
    (expected[0] + 2 * expected[1]).sum().backward()
    for both, _ in found.values():
        torch.testing.assert_close(both[0], expected[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(both[1], expected[1], atol=1e-5, rtol=1e-5)
    grads = torch.cat([found[rank][1] for rank in range(3)], 1)
    torch.testing.assert_close(grads[:, :VOCAB], whole.grad, atol=1e-5, rtol=1e-5)
    assert (grads[:, VOCAB:] == 0).all()
