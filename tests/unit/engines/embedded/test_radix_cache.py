"""The prefix cache against a plain list of sequences."""

from __future__ import annotations

import numpy as np
import pytest

from rlrecipes.engines.embedded.radix_cache import Node, RadixCache


def hold(
    cache: RadixCache, tokens: np.ndarray, slots: np.ndarray, namespace: str = "", start: int = 0
) -> tuple[np.ndarray, Node]:
    """Insert a whole sequence, from what is held of its first ``start`` tokens on."""
    prefix, node = cache.match(tokens[:start], namespace)
    kept, end = cache.insert(node, tokens[len(prefix) :], slots[len(prefix) :])
    return np.concatenate((prefix, kept)), end


def longest_shared(held: list[tuple[int, ...]], tokens: tuple[int, ...]) -> int:
    best = 0
    for other in held:
        length = 0
        while length < min(len(other), len(tokens)) and other[length] == tokens[length]:
            length += 1
        best = max(best, length)
    return best


@pytest.mark.parametrize("seed", range(5))
def test_matches_longest_prefix_and_keeps_slots_of_tokens(seed: int) -> None:
    random = np.random.default_rng(seed)
    cache, held, next_slot = RadixCache(), [], 1
    slot_of: dict[tuple[int, ...], int] = {}
    for _ in range(200):
        tokens = random.integers(0, 3, size=random.integers(1, 12))
        key = tuple(tokens.tolist())
        found, _ = cache.match(tokens, "")
        assert len(found) == longest_shared(held, key)
        assert [slot_of[key[: place + 1]] for place in range(len(found))] == found.tolist()
        slots = np.arange(next_slot, next_slot + len(tokens))
        next_slot += len(tokens)
        kept, _ = hold(cache, tokens, slots, start=int(random.integers(len(tokens) + 1)))
        assert kept[: len(found)].tolist() == found.tolist()
        assert kept[len(found) :].tolist() == slots[len(found) :].tolist()
        for place in range(len(found), len(tokens)):
            slot_of[key[: place + 1]] = int(kept[place])
        held.append(key)
    assert cache.num_tokens == len(slot_of)
    assert sorted(cache.clear().tolist()) == sorted(slot_of.values())


@pytest.mark.parametrize("seed", range(5))
def test_eviction_spares_locked_paths_and_loses_no_slot(seed: int) -> None:
    random = np.random.default_rng(seed)
    cache, locked, num_inserted, num_dropped = RadixCache(), [], 0, 0
    for step in range(150):
        tokens = random.integers(0, 3, size=random.integers(1, 12))
        kept, node = hold(cache, tokens, np.arange(len(tokens)) + 1000 * step)
        num_inserted += int((kept >= 1000 * step).sum())
        if random.random() < 0.3:
            cache.lock(node)
            locked.append((tokens, kept, node))
        if locked and random.random() < 0.3:
            cache.unlock(locked.pop(random.integers(len(locked)))[2])
        if random.random() < 0.3:
            before = cache.num_evictable
            count = int(random.integers(1, 20))
            freed = len(cache.evict(count))
            num_dropped += freed
            assert freed >= min(count, before)
        for tokens, kept, _ in locked:
            assert cache.match(tokens, "")[0].tolist() == kept.tolist()
        assert cache.num_tokens == num_inserted - num_dropped
    for _, _, node in locked:
        cache.unlock(node)
    assert cache.num_evictable == cache.num_tokens
    assert len(cache.evict(10**9)) == num_inserted - num_dropped
    assert cache.num_tokens == 0


def test_evicts_the_least_recently_used_first() -> None:
    cache = RadixCache()
    for first in (1, 2, 3):
        hold(cache, np.array([first, 7]), np.array([10 * first, 10 * first + 1]))
    cache.match(np.array([1, 7]), "")
    assert sorted(cache.evict(2).tolist()) == [20, 21]


@pytest.mark.parametrize("seed", range(5))
def test_each_eviction_takes_the_oldest_free_leaf(seed: int) -> None:
    """Against a search through the whole tree; so many uses that the candidates are sorted out several times."""
    random = np.random.default_rng(seed)
    cache, locked = RadixCache(), []
    for _ in range(3000):
        tokens = random.integers(0, 4, size=random.integers(1, 6))
        _, node = hold(cache, tokens, tokens)
        cache.lock(node)
        locked.append(node)
        while len(locked) > 3:
            cache.unlock(locked.pop(random.integers(len(locked))))
        if random.random() < 0.2:
            free = [each for each in cache._iterate() if not each.children and not each.num_locks]
            cache.evict(1)
            gone = [each for each in free if each.parent is None]
            assert gone == sorted(free, key=lambda each: each.last_use)[:1]
    assert len(cache._candidates) <= 2 * cache.num_tokens + 1025


def test_namespaces_share_nothing() -> None:
    cache = RadixCache()
    hold(cache, np.array([1, 2]), np.array([5, 6]), "a")
    assert len(cache.match(np.array([1, 2]), "b")[0]) == 0
    assert len(cache.match(np.array([1, 2]), "a")[0]) == 2
