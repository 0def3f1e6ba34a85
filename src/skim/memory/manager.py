"""Block tables over the pool and the prefix tree: the memory operations of a sequence.

A table is opened on a cached prefix, extended before each forward, advanced after it, published so that
others can share it, and closed. Blocks are taken in a fixed order: free blocks, then evictable prefixes.
After that `extend` raises `OutOfBlocks` with nothing changed, and the caller decides what to preempt.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from skim.memory.pool import KVPool, OutOfBlocks
from skim.memory.prefix import Match, Namespace, PrefixTree


@dataclass(eq=False)
class BlockTable:
    """One sequence's blocks, in order, and the number of slots that hold computed keys and values."""

    blocks: array[int] = field(default_factory=lambda: array("i"))  # an array: copied whole at every step
    length: int = 0


def blocks_to_allocate(length: int, blocks: int, copies_tail: bool, block_size: int) -> int:
    """Blocks to allocate before a table of `blocks` can hold `length` tokens."""
    return max(-(-length // block_size) - blocks, 0) + copies_tail


class MemoryManager:
    """The only writer of the pool and the tree. Used by one thread."""

    def __init__(self, pool: KVPool, *, prefix_caching: bool = True) -> None:
        self.pool = pool
        self.tree = PrefixTree(pool)
        self.prefix_caching = prefix_caching
        self.tables: set[BlockTable] = set()

    @property
    def available(self) -> int:
        """Blocks that can still be allocated: free, in slabs not yet allocated, or evictable."""
        return self.pool.obtainable + self.pool.evictable

    def match(self, tokens: Sequence[int], namespace: Namespace) -> Match:
        return self.tree.match(tokens, namespace) if self.prefix_caching else Match()

    def count_query(self, tokens: Sequence[int], match: Match, bypass: str | None = None) -> None:
        """Count one request's lookup, or the reason that it was bypassed."""
        stats = self.tree.stats
        if not self.prefix_caching:
            bypass = "disabled"
        elif bypass is None and len(tokens) < 2:
            bypass = "too_short"
        if bypass is not None:
            stats.bypasses[bypass] += 1
            return
        stats.queries += 1
        stats.hits += match.length > 0
        stats.misses += match.length == 0
        stats.query_tokens += len(tokens)
        stats.hit_tokens += match.length

    def open(self, match: Match | None = None) -> BlockTable:
        """A new table that starts on a matched prefix and keeps a reference to its blocks until closed."""
        match = match or Match()
        self.pool.acquire(match.blocks)
        table = BlockTable(array("i", match.blocks), match.length)
        self.tables.add(table)
        return table

    def fork(self, table: BlockTable) -> BlockTable:
        """Another table over the same blocks. The first write into a shared block copies it."""
        return self.open(Match(tuple(table.blocks), table.length))

    def blocks_needed(self, table: BlockTable, tokens: int) -> int:
        """Blocks that `extend(table, tokens)` would allocate."""
        copies = tokens > 0 and self.must_copy_tail(table)
        return blocks_to_allocate(table.length + tokens, len(table.blocks), copies, self.pool.block_size)

    def extend(self, table: BlockTable, tokens: int) -> None:
        """Allocate the next `tokens` slots of the table, writable by it alone. O(new blocks)."""
        needed = self.blocks_needed(table, tokens)
        if not needed:  # most decode rows
            return
        if needed > self.available:
            raise OutOfBlocks(
                f"{needed} blocks requested, {self.available} of {self.pool.capacity} available"
            )
        shortage = needed - self.pool.obtainable
        if shortage > 0:
            self.tree.evict(shortage)
        if tokens > 0 and self.must_copy_tail(table):
            self._copy_tail(table)
            needed -= 1
        last = table.blocks[-1] if table.blocks else None
        table.blocks.extend(self.pool.allocate(needed, after=last))

    def publish(self, table: BlockTable, tokens: Sequence[int], namespace: Namespace) -> None:
        """Put the full blocks of the table into the prefix tree; `tokens` are the contents of its slots."""
        if not self.prefix_caching:
            return
        if len(tokens) > table.length:
            raise AssertionError(f"{len(tokens)} tokens published for a table of {table.length}")
        shared = self.tree.insert(tokens, table.blocks, namespace)
        own = table.blocks[: len(shared)]
        duplicates = [i for i, (a, b) in enumerate(zip(own, shared, strict=True)) if a != b]
        self.pool.acquire(shared[i] for i in duplicates)
        self.pool.release(own[i] for i in duplicates)
        table.blocks[: len(shared)] = array("i", shared)

    def close(self, table: BlockTable) -> None:
        self.tables.remove(table)
        self.pool.release(table.blocks)
        table.blocks, table.length = array("i"), 0

    def check(self) -> None:
        """Raise AssertionError if pool, tree or tables contradict each other."""
        self.pool.check()
        self.tree.check()
        refcounts = [0] * self.pool.allocated
        for table in self.tables:
            if len(set(table.blocks)) != len(table.blocks):
                raise AssertionError("a table has the same block twice")
            if table.length > len(table.blocks) * self.pool.block_size:
                raise AssertionError("a table is longer than its blocks")
            for block in table.blocks:
                refcounts[block] += 1
        if refcounts != [self.pool.refcount(block) for block in range(self.pool.allocated)]:
            raise AssertionError("refcounts differ from the tables that point at the blocks")

    def must_copy_tail(self, table: BlockTable) -> bool:
        """True if the next token goes into a block that another table or the prefix tree shares."""
        partial = table.length % self.pool.block_size
        return partial > 0 and not self.pool.private(table.blocks[table.length // self.pool.block_size])

    def _copy_tail(self, table: BlockTable) -> None:
        index, partial = divmod(table.length, self.pool.block_size)
        shared = table.blocks[index]
        own = self.pool.allocate(1, after=table.blocks[index - 1] if index else None)[0]
        self.pool.copy_block(shared, own, partial)
        self.pool.release([shared])
        table.blocks[index] = own
