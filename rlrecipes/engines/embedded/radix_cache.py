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
        tokens: the run, int64.
        slots: of its tokens, int64.
        parent: None for a root.
        children: by first token.
        num_locks: requests that read this node.
        last_use: a counter, larger is later.
    """

    tokens: np.ndarray
    slots: np.ndarray
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    num_locks: int = 0
    last_use: int = 0


_NOTHING = np.empty(0, dtype=np.int64)


def _count_equal(left: np.ndarray, right: np.ndarray) -> int:
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


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
        node = self._root(namespace)
        found = []
        while len(tokens):
            child = node.children.get(int(tokens[0]))
            if child is None:
                break
            length = _count_equal(child.tokens, tokens)
            if length < len(child.tokens):
                child = self._split(child, length)
            child.last_use = next(self._clock)
            found.append(child.slots)
            node, tokens = child, tokens[length:]
        return (np.concatenate(found) if found else _NOTHING), node

    def insert(self, tokens: np.ndarray, slots: np.ndarray, namespace: str) -> tuple[np.ndarray, Node]:
        """Hold a sequence; where a prefix is held already the older slots stay.

        Args:
            tokens: int64.
            slots: of these tokens.
            namespace: as in ``match``.

        Returns:
            the slots that now stand for the sequence, and the node at its end. Slots of ``slots`` that are not among
            them are the caller's to give back.
        """
        held, node = self.match(tokens, namespace)
        start = len(held)
        if start == len(tokens):
            return held, node
        leaf = Node(tokens[start:].copy(), slots[start:].copy(), node, last_use=next(self._clock))
        node.children[int(tokens[start])] = leaf
        self._num_tokens += len(leaf.tokens)
        self._offer(leaf)
        return np.concatenate((held, leaf.slots)), leaf

    def lock(self, node: Node) -> None:
        """Keep the path to ``node`` until as many ``unlock`` calls."""
        at: Node | None = node
        while at is not None and at.parent is not None:
            if at.num_locks == 0:
                self._num_locked += len(at.tokens)
            at.num_locks += 1
            at = at.parent

    def unlock(self, node: Node) -> None:
        """Undo one ``lock``."""
        at: Node | None = node
        while at is not None and at.parent is not None:
            at.num_locks -= 1
            if at.num_locks == 0:
                self._num_locked -= len(at.tokens)
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
            del parent.children[int(leaf.tokens[0])]
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

    def _root(self, namespace: str) -> Node:
        if namespace not in self._roots:
            self._roots[namespace] = Node(_NOTHING, _NOTHING, None)
        return self._roots[namespace]

    def _split(self, node: Node, length: int) -> Node:
        """Cut ``node`` after ``length`` tokens and return the new upper part."""
        parent = node.parent
        assert parent is not None
        upper = Node(
            node.tokens[:length], node.slots[:length], parent, num_locks=node.num_locks, last_use=node.last_use
        )
        parent.children[int(node.tokens[0])] = upper
        upper.children[int(node.tokens[length])] = node
        node.tokens, node.slots, node.parent = node.tokens[length:], node.slots[length:], upper
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
