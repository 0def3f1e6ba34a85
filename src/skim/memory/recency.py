"""The order in which cached blocks are evicted: least recently used first.

There are two kinds of entries. A *leaf* is removed from the prefix tree with all of its blocks. A *window* is
the blocks of a node that end behind a sliding window: they may go while the node and its children stay.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar


class Cached(Protocol):
    """A node of the prefix tree, as the order sees it."""

    leaf_entry: int  # the number of its valid entry as a leaf
    window_entry: int  # the same for its blocks that end


N = TypeVar("N", bound=Cached)


class Entry(NamedTuple, Generic[N]):
    """A node to evict from. Ordered by time, then by number, so nodes are never compared."""

    time: int
    number: int
    node: N
    is_leaf: bool


class Recency(Generic[N]):
    """A heap of entries. A newer entry for the same node and kind replaces an older one."""

    def __init__(self) -> None:
        self._heap: list[Entry[N]] = []
        self._number = 0
        self._limit = 64  # entries, beyond which stale ones are dropped

    def enter(self, node: N, time: int, *, is_leaf: bool) -> None:
        self._number += 1
        if is_leaf:
            node.leaf_entry = self._number
        else:
            node.window_entry = self._number
        heapq.heappush(self._heap, Entry(time, self._number, node, is_leaf))
        if len(self._heap) > self._limit:
            self._heap = sorted(entry for entry in self._heap if _is_valid(entry))
            self._limit = 2 * len(self._heap) + 64

    def pop(self) -> Entry[N] | None:
        """Take the oldest valid entry; None if there is none."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if _is_valid(entry):
                return entry
        return None

    def put_back(self, entries: Iterable[Entry[N]]) -> None:
        for entry in entries:
            heapq.heappush(self._heap, entry)

    def leaves(self) -> list[N]:
        """The nodes with a valid entry as a leaf."""
        return [entry.node for entry in self._heap if entry.is_leaf and _is_valid(entry)]

    def windows(self) -> list[N]:
        """The nodes with a valid entry for their blocks that end."""
        return [entry.node for entry in self._heap if not entry.is_leaf and _is_valid(entry)]


def forget(node: Cached) -> None:
    """Make all entries of a node invalid."""
    node.leaf_entry = node.window_entry = 0


def _is_valid(entry: Entry[N]) -> bool:
    return entry.number == (entry.node.leaf_entry if entry.is_leaf else entry.node.window_entry)
