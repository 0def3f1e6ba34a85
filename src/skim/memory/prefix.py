"""The prefix tree: the token prefixes whose keys and values are in the pool.

A radix tree whose edges are the tokens of whole blocks. It has one root per namespace (salt and attention
policy), so tenants do not share prefixes, and dense requests never read keys that a sparse policy computed.
Tokens are compared, not hashes, so there are no collisions.

A node has a block for each layer group. Blocks that end behind a sliding window may be absent: a prefix can
be resumed where its last window is present in every group.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from skim.memory.groups import ABSENT, first_needed
from skim.memory.node import Node, closest_child, descendants, path_to
from skim.memory.pool import KVPool
from skim.memory.recency import Entry, Recency, forget

Tokens = Sequence[int]

OFFSET_SHIFT = 32
"""A key is a token plus the distance of its position from its slot, shifted by this many bits. Token ids have
fewer."""


@dataclass(frozen=True)
class Namespace:
    """Prefix-cache namespace: one per salt and attention policy."""

    salt: str = ""
    policy: str = "dense"


@dataclass(frozen=True)
class Match:
    """A cached prefix. It holds no reference to its blocks and is valid until the next eviction."""

    tables: tuple[tuple[int, ...], ...] = ()
    """The blocks of each group, in order; the last one may be matched only in part."""
    length: int = 0  # tokens; not a multiple of the block size if the match ends inside a block

    @property
    def blocks(self) -> int:
        """Blocks of each group, absent ones included."""
        return len(self.tables[0]) if self.tables else 0

    def present(self) -> list[int]:
        """The blocks of all groups."""
        return [block for table in self.tables for block in table if block != ABSENT]


@dataclass
class PrefixStats:
    """Counts since start. A query is a request's first lookup; a bypass is a request without a lookup."""

    queries: int = 0
    hits: int = 0
    misses: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0
    bypasses: Counter[str] = field(default_factory=Counter)  # by reason

    def copy(self) -> PrefixStats:
        return replace(self, bypasses=self.bypasses.copy())


class PrefixTree:
    """Caches full blocks of computed prefixes and evicts them, least recently used first."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.stats = PrefixStats()
        self.version = 0  # changes whenever the result of a match may get worse, and when a sequence is done
        self.on_evict: Callable[[Node], object] | None = None
        """Called with a node of which blocks are about to be evicted, while these hold their contents."""
        self._windows = [(group, w) for group, w in enumerate(pool.geometry.windows) if w is not None]
        self._roots: dict[Namespace, Node] = {}
        self._size = 0
        self._clock = 0
        self._unannounced = False  # nodes were inserted since the version changed
        self._order: Recency[Node] = Recency()

    def __len__(self) -> int:
        """Cached blocks."""
        return self._size

    def match(self, tokens: Tokens, namespace: Namespace, grain: int = 1, *, whole: bool = False) -> Match:
        """The longest cached prefix of `tokens`, without their last token, in whole grains. Changes nothing.

        Its blocks are those that a continuation reads; with `whole`, none may be absent.
        """
        path, partial, shared = self._walk(tokens, namespace)
        size = self.pool.block_size
        length = len(path) * size + shared
        if partial is not None:
            path.append(partial)
        length = self._resumable(tokens, path, length - length % grain, grain, whole)
        end = -(-length // size)
        starts = [0] * len(self.pool.groups)
        for group, window in self._windows if not whole else ():
            starts[group] = first_needed(length, window, position_in(tokens)) // size
        return Match(
            tuple(
                (*[ABSENT] * first, *(node.blocks[group] for node in path[first:end]))
                for group, first in enumerate(starts)
            ),
            length,
        )

    def touch(self, tokens: Tokens, namespace: Namespace, length: int) -> None:
        """Mark the cached prefix of `tokens` as just used: a sequence resumes after `length` of them."""
        path, partial, _ = self._walk(tokens, namespace)
        path = (path if partial is None else [*path, partial])[: -(-length // self.pool.block_size)]
        self._mark(path)
        self._mark_window(path, tokens, length)

    def insert(
        self,
        tokens: Tokens,
        tables: Sequence[Sequence[int]],
        namespace: Namespace,
        slots: int,
        after: Node | None = None,
        *,
        done: bool = True,
    ) -> list[Node]:
        """Cache the full blocks of the first `slots` tokens; `tables` are the caller's block tables.

        Returns the nodes that follow `after`, where the caller inserted before. If a node already had another
        block of the same contents, the caller should switch to that. `done` if the sequence may be resumed at
        the end of them; otherwise its blocks are the first to be evicted behind windows.
        """
        size = self.pool.block_size
        first = after.depth if after is not None else 0
        count = slots // size
        while count > first and all(table[count - 1] == ABSENT for table in tables):
            count -= 1  # a leaf without a block could never be evicted
        if count == 0:
            return []
        node = after or self._roots.setdefault(namespace, Node((), len(self.pool.groups), None, namespace))
        path: list[Node] = []
        for index in range(first, count):
            edge = tuple(tokens[index * size : (index + 1) * size])
            child = node.children.get(edge)
            if child is None:
                child = Node(edge, len(tables), node, namespace)
                node.children[edge] = child
                insort(node.edges, edge)
                self._unannounced = True
            self._adopt(child, [table[index] for table in tables])
            path.append(child)
            node = child
        if done:
            path = [*(() if after is None else path_to(after)), *path]
            self._mark(path)
            self._mark_window(path, tokens, len(path) * size)
            self.version += self._unannounced
            self._unannounced = False
            return path[first:]
        if path:
            self._mark(path)
        return path

    def evict(self, count: int) -> int:
        """Evict at least `count` blocks, or all that can be; returns how many were evicted.

        Blocks that no sequence began or ended near go first, then the least recently used.
        """
        before = self._size
        in_use: list[Entry[Node]] = []
        while before - self._size < count and (entry := self._order.pop()) is not None:
            node, pool = entry.node, self.pool
            if not entry.is_leaf:
                if self._end_window(node):
                    in_use.append(entry)
            elif node.children:
                continue
            elif any(block != ABSENT and pool.refcount(block) for block in node.blocks):
                in_use.append(entry)
            else:
                if self.on_evict is not None:
                    self.on_evict(node)
                self._remove(node)
        self._order.put_back(in_use)
        evicted = before - self._size
        if evicted:
            self.version += 1
            self.stats.evicted_blocks += evicted
        return evicted

    def nodes(self) -> list[Node]:
        """Every node; a node comes after its parent."""
        return [node for root in self._roots.values() for node in descendants(root)]

    def path(self, tokens: Tokens, namespace: Namespace) -> list[Node]:
        """The nodes of the whole blocks of `tokens` that are cached."""
        return self._walk([*tokens, 0], namespace)[0]

    def check(self) -> None:
        """Raise AssertionError if any invariant is broken."""
        pool, nodes = self.pool, self.nodes()
        held = [block for node in nodes for block in node.blocks if block != ABSENT]
        leaves, windows = set(map(id, self._order.leaves())), set(map(id, self._order.windows()))
        kept = [group for group, window in enumerate(pool.geometry.windows) if window is None]

        def in_use(node: Node) -> bool:
            return any(pool.refcount(node.blocks[group]) for group in kept)

        problems = {
            "a node's block is not cached": not all(map(pool.cached, held)),
            "two nodes share a block": len(set(held)) != len(held),
            "the size is wrong": len(held) != self._size,
            "a cached block has no node": sum(map(pool.cached, range(pool.allocated))) != len(held),
            "a block that does not end is absent": any(
                node.blocks[group] == ABSENT for node in nodes for group in kept
            ),
            "a leaf has no block": any(not node.children and set(node.blocks) == {ABSENT} for node in nodes),
            "a node is in use but its parent is not": any(
                node.parent is not None and node.parent.parent and in_use(node) and not in_use(node.parent)
                for node in nodes
            ),
            "edges and children disagree": any(
                node.edges != sorted(node.children) for node in (*nodes, *self._roots.values())
            ),
            "a leaf is missing from the eviction heap": any(
                not node.children and id(node) not in leaves for node in nodes
            ),
            "a window is missing from the eviction heap": any(
                node.blocks[group] != ABSENT and id(node) not in windows
                for node in nodes
                for group, _ in self._windows
            ),
        }
        broken = [name for name, is_broken in problems.items() if is_broken]
        if broken:
            raise AssertionError("prefix tree: " + "; ".join(broken))

    # -- internals

    def _walk(self, tokens: Tokens, namespace: Namespace) -> tuple[list[Node], Node | None, int]:
        """The fully matched nodes, the partly matched node, and the number of its tokens that match."""
        size = self.pool.block_size
        limit = len(tokens) - 1
        path: list[Node] = []
        node = self._roots.get(namespace)
        while node is not None:
            start = len(path) * size
            child = node.children.get(tuple(tokens[start : start + size])) if start + size <= limit else None
            if child is None:
                partial, shared = closest_child(node, tuple(tokens[start : min(start + size, limit)]))
                return path, partial, shared
            path.append(child)
            node = child
        return path, None, 0

    def _resumable(self, tokens: Tokens, path: Sequence[Node], length: int, grain: int, whole: bool) -> int:
        """The longest prefix of at most `length` tokens whose last windows are present, in whole grains."""
        size = self.pool.block_size
        position = position_in(tokens)
        while self._windows and length > 0:
            end = -(-length // size)
            absent = end
            for group, window in self._windows:
                first = 0 if whole else first_needed(length, window, position) // size
                gaps = (i for i in range(first, min(end, absent)) if path[i].blocks[group] == ABSENT)
                absent = min(absent, next(gaps, absent))
            if absent == end:
                return length
            length = absent * size  # every longer prefix needs the absent block too
            length -= length % grain
        return length

    def _adopt(self, node: Node, blocks: Sequence[int]) -> None:
        """Give a node the blocks that it lacks.

        If it has others, only private ones: a fork would hold such a block without those that do not end, and
        the leaf could not be evicted.
        """
        is_new = set(node.blocks) == {ABSENT}
        lacking = [
            group
            for group, block in enumerate(blocks)
            if node.blocks[group] == ABSENT != block and (is_new or self.pool.private(block))
        ]
        for group in lacking:
            node.blocks[group] = blocks[group]
            self.pool.cache(blocks[group])
        self._size += len(lacking)
        if self._windows and lacking:
            self._order.enter(node, node.resumed_at, is_leaf=False)

    def _mark(self, path: Sequence[Node]) -> None:
        self._clock += 1
        for node in path:
            node.used_at = self._clock
        if path and not path[-1].children:
            self._enter_leaf(path[-1])

    def _mark_window(self, path: Sequence[Node], tokens: Tokens, length: int) -> None:
        """Keep the blocks from which a sequence can be resumed after `length` tokens as long as its leaf."""
        if not self._windows:
            return
        widest = max(window for _, window in self._windows)
        first = first_needed(length, widest, position_in(tokens)) // self.pool.block_size
        for node in path[first:]:
            node.resumed_at = self._clock
            if node.window_entry:
                self._order.enter(node, self._clock, is_leaf=False)

    def _enter_leaf(self, node: Node) -> None:
        """A leaf that cannot be resumed is of no use, and goes first."""
        whole = all(node.blocks[group] != ABSENT for group, _ in self._windows)
        self._order.enter(node, node.used_at if whole else 0, is_leaf=True)

    def _end_window(self, node: Node) -> bool:
        """Give up the blocks of a node that may be absent; True if some of them are in use."""
        pool = self.pool
        held = [group for group, _ in self._windows if node.blocks[group] != ABSENT]
        unused = [group for group in held if not pool.refcount(node.blocks[group])]
        if unused:
            if self.on_evict is not None:
                self.on_evict(node)
            for group in unused:
                pool.uncache(node.blocks[group])
                node.blocks[group] = ABSENT
            self._size -= len(unused)
        if len(unused) < len(held):
            return True
        node.window_entry = 0
        if not node.children:
            if set(node.blocks) == {ABSENT}:
                self._remove(node)
            else:
                self._enter_leaf(node)
        return False

    def _remove(self, node: Node) -> None:
        """Remove a leaf, and its ancestors that are left without children and blocks."""
        while node.parent is not None and not node.children:
            parent = node.parent
            del parent.children[node.edge]
            del parent.edges[bisect_left(parent.edges, node.edge)]
            node.parent = None
            forget(node)
            held = [block for block in node.blocks if block != ABSENT]
            self._size -= len(held)
            for block in held:
                self.pool.uncache(block)
            node = parent
            if node.children or set(node.blocks) != {ABSENT}:
                break
        if node.children:
            return
        if node.parent is not None:
            self._enter_leaf(node)
        elif node.depth == 0:
            self._roots = {name: root for name, root in self._roots.items() if root is not node}


def position_in(tokens: Tokens) -> Callable[[int], int] | None:
    """The position of a slot by the prefix-tree keys of a sequence; None if it is the slot."""
    if not tokens or tokens[-1] >> OFFSET_SHIFT == 0 == tokens[0] >> OFFSET_SHIFT:
        return None
    return lambda slot: slot + (tokens[slot] >> OFFSET_SHIFT)
