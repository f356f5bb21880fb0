"""Prefixes whose keys and values are still in the pool. Owns a radix tree of token runs; refuses to move memory itself.

A node holds a run of tokens and their slots. ``lock`` keeps a path from being evicted while a request reads it;
``evict`` frees the least recently used unlocked leaves and says which slots came free.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False, slots=True)
class Node:
    """One edge of the tree.

    Attributes:
        tokens: the run, as the bytes of int64 numbers: comparing and looking them up costs no array.
        slots: of its tokens, int64.
        parent: None for a root.
        children: by first token.
        num_locks: requests that read this node.
        last_use: a counter, larger is later.
    """

    tokens: bytes
    slots: np.ndarray
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)
    num_locks: int = 0
    last_use: int = 0


_NOTHING = np.empty(0, dtype=np.int64)
_WIDTH = _NOTHING.itemsize
"""Bytes of a token."""


def _count_equal(left: bytes, right: bytes) -> int:
    length = min(len(left), len(right)) // _WIDTH
    is_different = np.frombuffer(left, np.int64, length) != np.frombuffer(right, np.int64, length)
    return int(is_different.argmax()) if is_different.any() else length


class RadixCache:
    """Longest-prefix lookup over token sequences, one tree for each namespace."""

    def __init__(self) -> None:
        self._clock = itertools.count(1)
        self._roots: dict[str, Node] = {}
        self._num_tokens = 0
        self._num_locked = 0
        self._candidates: list[tuple[int, int, Node]] = []
        """A heap that has every free leaf, by last use; and entries that became wrong since."""

    @property
    def num_tokens(self) -> int:
        """Tokens held."""
        return self._num_tokens

    @property
    def num_evictable(self) -> int:
        """Tokens that ``evict`` could free."""
        return self._num_tokens - self._num_locked

    def match(self, tokens: np.ndarray, namespace: str) -> tuple[np.ndarray, Node]:
        """Find the longest held prefix.

        Args:
            tokens: int64.
            namespace: prefixes of different namespaces are never shared.

        Returns:
            its slots, and the node at its end (a root when nothing matched) to lock.
        """
        if namespace not in self._roots:
            self._roots[namespace] = Node(b"", _NOTHING, None)
        return self._descend(self._roots[namespace], tokens.tobytes())

    def insert(self, node: Node, tokens: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, Node]:
        """Hold what follows a held prefix; where a part of it is held already the older slots stay.

        Args:
            node: at the end of the prefix, as ``match`` or ``insert`` gave it; locked since then, or just given.
            tokens: int64, after the prefix.
            slots: of these tokens.

        Returns:
            the slots that now stand for these tokens, and the node at their end. Slots of ``slots`` that are not among
            them are the caller's to give back.
        """
        data = tokens.tobytes()
        held, node = self._descend(node, data)
        start = len(held)
        if start == len(tokens):
            return held, node
        data = data[start * _WIDTH :]
        leaf = Node(data, slots[start:].copy(), node, last_use=next(self._clock))
        node.children[data[:_WIDTH]] = leaf
        self._num_tokens += len(leaf.slots)
        self._offer(leaf)
        return np.concatenate((held, leaf.slots)), leaf

    def _descend(self, node: Node, data: bytes) -> tuple[np.ndarray, Node]:
        found = []
        place = 0
        while place < len(data):
            child = node.children.get(data[place : place + _WIDTH])
            if child is None:
                break
            if not data.startswith(child.tokens, place):
                child = self._split(child, _count_equal(child.tokens, data[place:]))
            child.last_use = next(self._clock)
            found.append(child.slots)
            node, place = child, place + len(child.tokens)
        return (np.concatenate(found) if found else _NOTHING), node

    def lock(self, node: Node) -> None:
        """Keep the path to ``node``, and count it as used, until as many ``unlock`` calls."""
        at: Node | None = node
        while at is not None and at.parent is not None:
            if at.num_locks == 0:
                self._num_locked += len(at.slots)
            at.num_locks += 1
            at.last_use = next(self._clock)
            at = at.parent

    def unlock(self, node: Node) -> None:
        """Undo one ``lock``."""
        at: Node | None = node
        while at is not None and at.parent is not None:
            at.num_locks -= 1
            if at.num_locks == 0:
                self._num_locked -= len(at.slots)
                self._offer(at)
            at = at.parent

    def evict(self, count: int) -> np.ndarray:
        """Drop least recently used leaves until ``count`` tokens are free or nothing is left to drop.

        Returns:
            the slots that came free, perhaps more than ``count``.
        """
        freed: list[np.ndarray] = []
        num_freed = 0
        while self._candidates and num_freed < count:
            last_use, _, leaf = heapq.heappop(self._candidates)
            parent = leaf.parent
            if parent is None or leaf.children or leaf.num_locks:
                continue  # gone already, or it comes back when it is a free leaf
            if last_use != leaf.last_use:
                self._offer(leaf)
                continue
            freed.append(leaf.slots)
            num_freed += len(leaf.slots)
            del parent.children[leaf.tokens[:_WIDTH]]
            leaf.parent = None
            self._offer(parent)
        self._num_tokens -= num_freed
        return np.concatenate(freed) if freed else _NOTHING

    def clear(self) -> np.ndarray:
        """Forget everything (nothing may be locked) and return the slots that came free."""
        assert self._num_locked == 0, "a request still reads the prefix cache"
        slots = [node.slots for node in self._iterate()]
        self._roots.clear()
        self._candidates.clear()
        self._num_tokens = 0
        return np.concatenate(slots) if slots else _NOTHING

    def _offer(self, node: Node) -> None:
        """Make a node known to ``evict``, if it is a free leaf."""
        if node.parent is None or node.children or node.num_locks:
            return
        if len(self._candidates) > 2 * self._num_tokens + 1024:  # mostly wrong ones: a node has a token at least
            free = [each for each in self._iterate() if not each.children and not each.num_locks]
            self._candidates = [(each.last_use, next(self._clock), each) for each in free]
            heapq.heapify(self._candidates)
        heapq.heappush(self._candidates, (node.last_use, next(self._clock), node))

    def _split(self, node: Node, length: int) -> Node:
        """Cut ``node`` after ``length`` tokens and return the new upper part."""
        parent = node.parent
        assert parent is not None
        cut = length * _WIDTH
        upper = Node(node.tokens[:cut], node.slots[:length], parent, num_locks=node.num_locks, last_use=node.last_use)
        parent.children[node.tokens[:_WIDTH]] = upper
        upper.children[node.tokens[cut : cut + _WIDTH]] = node
        node.tokens, node.slots, node.parent = node.tokens[cut:], node.slots[length:], upper
        return upper

    def _iterate(self) -> list[Node]:
        nodes = []
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                nodes.append(node)
        return nodes
