"""The prefix tree: the token prefixes whose keys and values are in the pool.

A radix tree whose edges are the tokens of whole blocks. It has one root per namespace (salt and attention
policy), so tenants do not share prefixes, and dense requests never read keys that a sparse policy computed.
Tokens are compared, not hashes, so there are no collisions.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from skim.memory.pool import KVPool

Tokens = Sequence[int]
Edge = tuple[int, ...]

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

    blocks: tuple[int, ...] = ()  # the last one may be matched only in part
    length: int = 0  # tokens; not a multiple of the block size if the match ends inside a block


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


class Node:
    """One block of a prefix."""

    __slots__ = (
        "block",
        "children",
        "depth",
        "edge",
        "edges",
        "kept",
        "link",
        "namespace",
        "parent",
        "used_at",
    )

    def __init__(self, edge: Edge, block: int, parent: Node | None, namespace: Namespace) -> None:
        self.edge = edge
        self.block = block
        self.parent = parent
        self.namespace = namespace
        self.depth: int = parent.depth + 1 if parent is not None else 0  # blocks up to its end
        self.children: dict[Edge, Node] = {}
        self.edges: list[Edge] = []  # the children's edges, sorted: the best partial match is a neighbour
        self.used_at = 0
        self.link: str | None = None  # of the checkpoint segment that ends here, once it is known
        self.kept: str | None = None  # the checkpoint file that holds it


class PrefixTree:
    """Caches full blocks of computed prefixes and evicts them, least recently used leaf first."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.stats = PrefixStats()
        self.version = 0  # changes whenever the result of a match may change
        self.on_evict: Callable[[Node], object] | None = None
        """Called with a leaf that is about to be evicted, while its block still holds its contents."""
        self._roots: dict[Namespace, Node] = {}
        self._size = 0
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []  # (used_at, order of entry, node); may be stale
        self._entries = 0

    def __len__(self) -> int:
        """Cached blocks."""
        return self._size

    def match(self, tokens: Tokens, namespace: Namespace) -> Match:
        """The longest cached prefix of `tokens`, without their last token. Changes nothing."""
        path, partial, shared = self._walk(tokens, namespace)
        blocks = [node.block for node in path]
        if partial is not None:
            blocks.append(partial.block)
        return Match(tuple(blocks), len(path) * self.pool.block_size + shared)

    def touch(self, tokens: Tokens, namespace: Namespace) -> None:
        """Mark the longest cached prefix of `tokens` as just used."""
        path, partial, _ = self._walk(tokens, namespace)
        self._mark(path if partial is None else [*path, partial])

    def insert(self, tokens: Tokens, blocks: Sequence[int], namespace: Namespace) -> list[int]:
        """Cache the full blocks of `tokens`; `blocks` are the caller's blocks that hold them.

        Returns the cached block for each. If the tree already had the same contents, that is the tree's
        block, and the caller should switch to it.
        """
        size = self.pool.block_size
        path: list[Node] = []
        if len(tokens) < size:
            return []
        node = self._roots.setdefault(namespace, Node((), -1, None, namespace))
        for index in range(len(tokens) // size):
            edge = tuple(tokens[index * size : (index + 1) * size])
            child = node.children.get(edge)
            if child is None:
                child = Node(edge, blocks[index], node, namespace)
                self.pool.cache(child.block)
                node.children[edge] = child
                insort(node.edges, edge)
                self._size += 1
                self.version += 1
            path.append(child)
            node = child
        self._mark(path)
        return [node.block for node in path]

    def evict(self, count: int) -> int:
        """Evict up to `count` blocks, least recently used leaves first; returns how many were evicted."""
        evicted = 0
        in_use: list[tuple[int, int, Node]] = []
        while evicted < count and self._leaves:
            entry = heapq.heappop(self._leaves)
            used_at, _, node = entry
            if node.parent is None or node.children or node.used_at != used_at:
                continue  # evicted, no longer a leaf, or used since
            if self.pool.refcount(node.block):
                in_use.append(entry)
                continue
            if self.on_evict is not None:
                self.on_evict(node)
            self._remove(node)
            evicted += 1
        for entry in in_use:
            heapq.heappush(self._leaves, entry)
        if evicted:
            self.version += 1
            self.stats.evicted_blocks += evicted
        return evicted

    def nodes(self) -> list[Node]:
        """Every cached block; a node comes after its parent."""
        return [node for root in self._roots.values() for node in _descendants(root)]

    def path(self, tokens: Tokens, namespace: Namespace) -> list[Node]:
        """The nodes of the whole blocks of `tokens` that are cached."""
        return self._walk([*tokens, 0], namespace)[0]

    def check(self) -> None:
        """Raise AssertionError if any invariant is broken."""
        pool = self.pool
        nodes = self.nodes()
        entries = {(used_at, id(node)) for used_at, _, node in self._leaves}
        problems = {
            "a node's block is not cached": any(not pool.cached(node.block) for node in nodes),
            "two nodes share a block": len({node.block for node in nodes}) != len(nodes),
            "the size is wrong": len(nodes) != self._size,
            "a cached block has no node": sum(map(self.pool.cached, range(self.pool.allocated)))
            != len(nodes),
            "a node is in use but its parent is not": any(
                self.pool.refcount(node.block)
                and node.parent.parent
                and not self.pool.refcount(node.parent.block)
                for node in nodes
                if node.parent is not None
            ),
            "edges and children disagree": any(
                node.edges != sorted(node.children) for node in (*nodes, *self._roots.values())
            ),
            "a leaf is missing from the eviction heap": any(
                not node.children and (node.used_at, id(node)) not in entries for node in nodes
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
                partial, shared = _closest_child(node, tuple(tokens[start : min(start + size, limit)]))
                return path, partial, shared
            path.append(child)
            node = child
        return path, None, 0

    def _mark(self, path: Sequence[Node]) -> None:
        self._clock += 1
        for node in path:
            node.used_at = self._clock
        if path and not path[-1].children:
            self._enter_leaf(path[-1])

    def _enter_leaf(self, node: Node) -> None:
        self._entries += 1
        heapq.heappush(self._leaves, (node.used_at, self._entries, node))
        if len(self._leaves) > 2 * self._size + 64:
            valid = [e for e in self._leaves if e[2].parent and not e[2].children and e[2].used_at == e[0]]
            newest = {id(e[2]): e for e in valid}
            self._leaves = sorted(newest.values(), key=lambda e: e[:2])

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.edge]
        del parent.edges[bisect_left(parent.edges, node.edge)]
        node.parent = None
        self._size -= 1
        self.pool.uncache(node.block)
        if not parent.children:
            if parent.parent is not None:
                self._enter_leaf(parent)
            else:
                self._roots = {name: root for name, root in self._roots.items() if root is not parent}


def _closest_child(node: Node, tokens: Edge) -> tuple[Node | None, int]:
    """The child with the longest common prefix, which is a neighbour of `tokens` in sorted order."""
    at = bisect_left(node.edges, tokens)
    best, length = None, 0
    for edge in node.edges[max(0, at - 1) : at + 1]:
        shared = next((i for i, (a, b) in enumerate(zip(edge, tokens, strict=False)) if a != b), len(tokens))
        if shared > length:
            best, length = node.children[edge], shared
    return best, length


def _descendants(node: Node) -> list[Node]:
    found: list[Node] = []
    stack = list(node.children.values())
    while stack:
        child = stack.pop()
        found.append(child)
        stack.extend(child.children.values())
    return found
