"""Block tables over the pool and the prefix tree: the memory operations of a sequence.

A table is opened on a cached prefix, extended before each forward, advanced after it, published so that
others can share it, and closed. Behind sliding windows it gives blocks back. Blocks are taken in a fixed
order: free blocks, then evictable prefixes. After that `extend` raises `OutOfBlocks` with nothing changed,
and the caller decides what to preempt.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from skim.memory.groups import ABSENT, first_needed
from skim.memory.node import Node
from skim.memory.pool import KVPool, OutOfBlocks
from skim.memory.prefix import Match, Namespace, PrefixTree, position_in


@dataclass(eq=False)
class BlockTable:
    """One sequence's blocks, in order, and the number of slots that hold computed keys and values."""

    tables: tuple[array[int], ...]  # by layer group; arrays, because they are copied whole at every step
    length: int = 0
    starts: list[int] = field(default_factory=list)  # by group: blocks before this one are absent
    slides_at: float = math.inf  # length at which another block may end; infinity if none ever does
    node: Node | None = None  # the last one that was published

    @property
    def blocks(self) -> array[int]:
        """The blocks of the first group, and the number of blocks of every group."""
        return self.tables[0]

    @property
    def held(self) -> int:
        """Blocks of all groups that are not absent."""
        return sum(len(table) - start for table, start in zip(self.tables, self.starts, strict=True))

    def present(self) -> list[int]:
        return [
            block for table, start in zip(self.tables, self.starts, strict=True) for block in table[start:]
        ]


def blocks_to_allocate(length: int, blocks: int, copies_tail: bool, block_size: int, groups: int = 1) -> int:
    """Blocks to allocate before tables of `blocks` each can hold `length` tokens."""
    return groups * (max(-(-length // block_size) - blocks, 0) + copies_tail)


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

    def match(
        self, tokens: Sequence[int], namespace: Namespace, grain: int = 1, *, whole: bool = False
    ) -> Match:
        """The longest cached prefix of `tokens`, in whole grains; with `whole`, no block may be absent."""
        if not self.prefix_caching:
            return Match()
        return self.tree.match(tokens, namespace, grain, whole=whole)

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

    def open(self, match: Match | None = None, *, whole: bool = False) -> BlockTable:
        """A new table that starts on a matched prefix and keeps a reference to its blocks until closed.

        With `whole`, blocks behind sliding windows stay: queries may come at earlier positions.
        """
        tables = match.tables if match is not None and match.tables else ((),) * len(self.pool.groups)
        length = match.length if match is not None else 0
        slides = self.pool.geometry.ends and not whole
        return self._add(
            BlockTable(
                tuple(array("i", table) for table in tables),
                length,
                [next((i for i, b in enumerate(table) if b != ABSENT), len(table)) for table in tables],
                length if slides else math.inf,
            )
        )

    def fork(self, table: BlockTable) -> BlockTable:
        """Another table over the same blocks. The first write into a shared block copies it."""
        return self._add(replace(table, tables=tuple(t[:] for t in table.tables), starts=table.starts[:]))

    def _add(self, table: BlockTable) -> BlockTable:
        self.pool.acquire(table.present())
        self.tables.add(table)
        return table

    def blocks_needed(self, table: BlockTable, tokens: int) -> int:
        """Blocks that `extend(table, tokens)` would allocate."""
        copies = tokens > 0 and self.must_copy_tail(table)
        sizes = self.pool.block_size, len(table.tables)
        return blocks_to_allocate(table.length + tokens, len(table.blocks), copies, *sizes)

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
        count = -(-(table.length + tokens) // self.pool.block_size) - len(table.blocks)
        for blocks in table.tables if count > 0 else ():
            last = blocks[-1] if blocks and blocks[-1] != ABSENT else None
            blocks.extend(self.pool.allocate(count, after=last))

    def roll_back(self, table: BlockTable, length: int) -> None:
        """Forget the slots after `length`, which were never published, and give back their blocks."""
        if length > table.length:
            raise AssertionError(f"a table of {table.length} slots cannot be rolled back to {length}")
        table.length = length
        count = -(-length // self.pool.block_size)
        for blocks in table.tables:
            self.pool.release(blocks[count:])
            del blocks[count:]

    def publish(
        self,
        table: BlockTable,
        tokens: Sequence[int],
        namespace: Namespace,
        slots: int | None = None,
        *,
        done: bool = True,
    ) -> None:
        """Put the full blocks of the table's first slots into the prefix tree; `tokens` are their contents.

        `done` if the sequence may be resumed after these slots.
        """
        slots = len(tokens) if slots is None else slots
        if not self.prefix_caching:
            return
        if slots > table.length:
            raise AssertionError(f"{slots} tokens published for a table of {table.length}")
        after = table.node if table.node is not None and table.node.parent is not None else None
        first = after.depth if after is not None else 0
        path = self.tree.insert(tokens, table.tables, namespace, slots, after, done=done)
        for group, blocks in enumerate(table.tables):
            for index, node in enumerate(path, start=first):
                own, shared = blocks[index], node.blocks[group]
                if own != shared and ABSENT not in (own, shared):
                    self._switch(table, group, index, shared)
        table.node = path[-1] if path else after

    def _switch(self, table: BlockTable, group: int, index: int, shared: int) -> None:
        """Point a table at the tree's block of the same contents, and with it the forks that share its own.

        A fork that kept the old block would use later blocks of the path, which the tree may adopt, without
        their ancestors.
        """
        own = table.tables[group][index]
        alone = self.pool.refcount(own) == 1
        for one in (table,) if alone else self.tables:
            blocks = one.tables[group]
            if index < len(blocks) and blocks[index] == own:
                self.pool.acquire([shared])
                self.pool.release([own])
                blocks[index] = shared

    def slide(
        self,
        table: BlockTable,
        length: int,
        tokens: Sequence[int],
        namespace: Namespace,
        publishable: int,
    ) -> None:
        """Give back the blocks that no query after `length` slots reads, `tokens` being their contents.

        The first `publishable` slots are published before, so these blocks stay cached until others need
        them. O(blocks that end), unless nothing does.
        """
        if length < table.slides_at:
            return
        size, position = self.pool.block_size, position_in(tokens)
        windows = self.pool.geometry.windows
        needed = [first_needed(length, window, position) for window in windows]
        ends = [slot // size for slot in needed]
        if publishable and any(end > start for end, start in zip(ends, table.starts, strict=True)):
            slots = min(publishable, max(ends) * size)
            if slots // size > (table.node.depth if table.node is not None else 0):
                self.publish(table, tokens, namespace, slots, done=False)
        for group, end in enumerate(ends):
            blocks, start = table.tables[group], table.starts[group]
            if end > start:
                self.pool.end(blocks[start:end])
                blocks[start:end] = array("i", [ABSENT]) * (end - start)
                table.starts[group] = end
        slack = [
            (end + 1) * size - slot
            for end, slot, window in zip(ends, needed, windows, strict=True)
            if window is not None
        ]
        table.slides_at = length + min(slack, default=math.inf)

    def close(self, table: BlockTable) -> None:
        self.tables.remove(table)
        self.pool.release(table.present())
        table.tables = tuple(array("i") for _ in table.tables)
        table.starts, table.length, table.node = [0] * len(table.tables), 0, None

    def check(self) -> None:
        """Raise AssertionError if pool, tree or tables contradict each other."""
        self.pool.check()
        self.tree.check()
        refcounts = [0] * self.pool.allocated
        for table in self.tables:
            present = table.present()
            if len(set(present)) != len(present):
                raise AssertionError("a table has the same block twice")
            if table.length > len(table.blocks) * self.pool.block_size:
                raise AssertionError("a table is longer than its blocks")
            if len({len(blocks) for blocks in table.tables}) > 1:
                raise AssertionError("a table has more blocks in one group than in another")
            for blocks, start, window in zip(
                table.tables, table.starts, self.pool.geometry.windows, strict=True
            ):
                if set(blocks[:start]) - {ABSENT} or ABSENT in blocks[start:] or (start and window is None):
                    raise AssertionError("a table lacks blocks that have not ended, or the reverse")
            for block in present:
                refcounts[block] += 1
        if refcounts != [self.pool.refcount(block) for block in range(self.pool.allocated)]:
            raise AssertionError("refcounts differ from the tables that point at the blocks")

    def must_copy_tail(self, table: BlockTable) -> bool:
        """True if the next token goes into a block that another table or the prefix tree shares.

        This is the same in all groups: tails are shared and copied together.
        """
        partial = table.length % self.pool.block_size
        return partial > 0 and not self.pool.private(table.blocks[table.length // self.pool.block_size])

    def _copy_tail(self, table: BlockTable) -> None:
        index, partial = divmod(table.length, self.pool.block_size)
        for blocks, start in zip(table.tables, table.starts, strict=True):
            shared = blocks[index]
            own = self.pool.allocate(1, after=blocks[index - 1] if index > start else None)[0]
            self.pool.copy_block(shared, own, partial)
            self.pool.release([shared])
            blocks[index] = own
