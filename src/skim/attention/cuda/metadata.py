"""A step's metadata on the device: built once a step, shared by all layers.

All integers of a decode step are in one buffer, filled by one copy. A buffer with spare room can be refilled
for another step at the same addresses, and no launch grid depends on a row's length: a captured CUDA graph
needs both: `captured.py` has such buffers. This module does not import Triton.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch

from skim.attention.cuda.glance_tables import FastRows, RenewingRows, fill_glances
from skim.attention.cuda.layout import (
    ALIGN,
    CODED_PROGRAMS,
    FURTHEST,
    LEAST_CHUNK_SPLIT,
    LEAST_SPLIT,
    ONE_PIECE,
    PROGRAMS,
    SPLITS,
    GroupTables,
    Source,
    Tiles,
    count_entries,
    first_block,
    needs_positions,
    round_up,
    split_keys,
)
from skim.attention.step import Step
from skim.device import to_device
from skim.memory.groups import ABSENT
from skim.memory.pool import KVPool
from skim.memory.store import PlainStore


def _split(window: int | None) -> str:
    return f"split {window}"


def _window(window: int) -> str:
    return f"window {window}"


def _rows(group: int) -> str:
    return f"rows {group}"


def _slots(group: int) -> str:
    return f"slots {group}"


class Tables:
    """A step's rows as the kernels read them. `fill` may be called again for a later step."""

    def __init__(self, pool: KVPool, rows: int, tokens: int, blocks: int) -> None:
        """`blocks` is the number of entries of all block tables."""
        windows = sorted({shape.window for shape in pool.layers if shape.window is not None})
        groups = range(len(pool.groups))
        sizes = {_split(window): 1 for window in (None, *windows)}
        sizes |= {_window(window): rows for window in windows}
        sizes |= {_rows(group): 4 * rows for group in groups}
        sizes |= {_slots(group): tokens for group in groups}
        sizes |= {"picks": 4 * rows, "evidence": 4 * rows} if pool.summarized else {}
        sizes |= {"chunk": len(SPLITS), "tiles": 2 * rows, "blocks": blocks}
        self._size = pool.block_size
        self._ends = pool.geometry.windows
        self._spare = pool.capacity  # a block of zeros, if some blocks end
        self._heads = min(shape.kv_heads for shape in pool.layers)
        self._rows = rows
        self._summarized = [pool.layers[layer].kv_heads for layer in pool.summarized]
        coded = any(not store.exact for store in pool.stores)
        self._programs = (CODED_PROGRAMS if coded else PROGRAMS) * processors(pool.device)
        self._parts: dict[str, slice] = {}
        at = 0
        for name, size in sizes.items():
            self._parts[name] = slice(at, at + size)
            at += round_up(size, ALIGN)
        self._buffer = torch.empty(at, dtype=torch.int32, device=pool.device)
        self.tiles = self._part("tiles").view(rows, 2)  # rows with one query: row, 0
        self.windows = {window: self._part(_window(window)) for window in windows}
        self.blocks = self._part("blocks")  # concatenated block tables of all groups
        self.groups = [
            GroupTables(
                self._part(_rows(group)).view(rows, 4),
                self._part(_slots(group)),
                self.blocks,
                self.windows,
            )
            for group in groups
        ]
        self.split = {window: self._part(_split(window)) for window in (None, *windows)}
        """Keys per split of rows with one query, by a layer's sliding window."""
        self.chunk_split = self._part("chunk")  # keys per split of the longest chunk, for each of `SPLITS`
        self.split_size: dict[int | None, int] = dict.fromkeys(self.split, LEAST_SPLIT)  # as last filled
        self.splits = 1  # enough for every sliding window
        self.widths = (0, 0)  # most blocks of fast rows, and of rows that renew their evidence, rounded up

    @cached_property
    def same_block(self) -> torch.Tensor:
        """Block tables of rows in one piece. Lives as long as the tables, because graphs read it."""
        return torch.zeros_like(self.blocks)

    @cached_property
    def mass(self) -> torch.Tensor:
        """[rows, KV heads of all layers with summaries] as `Step.mass`; 1 for rows of several queries."""
        return torch.ones(self._rows, sum(self._summarized), device=self._buffer.device)

    def fast(self, width: int) -> FastRows:
        """The fast rows, none of which has more than `width` blocks."""
        picks, evidence = (self._part(name).view(-1, 4) for name in ("picks", "evidence"))
        return FastRows(picks, evidence, width, self.mass)

    def renewing(self, width: int) -> RenewingRows:
        """The slow rows that renew their evidence, likewise."""
        picks, evidence = (self._part(name).view(-1, 4) for name in ("picks", "evidence"))
        return RenewingRows(picks, evidence, width)

    def _part(self, name: str) -> torch.Tensor:
        return self._buffer[self._parts[name]]

    def fill(self, step: Step) -> None:
        """Take over a step's rows; spare room becomes padding."""
        firsts = {w: [first_block(row, w, self._size) for row in step.rows] for w in set(self._ends)}
        blocks = sum(-(-row.length // self._size) for row in step.rows)
        used = self._parts["blocks"].start + sum(blocks - sum(firsts[window]) for window in self._ends)
        # A new buffer each time: torch's allocator reuses pinned memory only after the copy has finished.
        staging = torch.empty(used, dtype=torch.int32, device="cpu", pin_memory=self._buffer.is_cuda)
        host = {name: staging.numpy()[part] for name, part in self._parts.items()}
        single = [index for index, row in enumerate(step.rows) if row.queries == 1]
        reads = [step.rows[index].length for index in single]
        if self._summarized:
            picks, evidence = (host[name].reshape(-1, 4) for name in ("picks", "evidence"))
            reads, self.widths = fill_glances(step, picks, evidence, single)
        tiles = host["tiles"].reshape(-1, 2)
        tiles[:] = (len(tiles) - 1, 1)  # past the one query that the last row may have
        tiles[: len(single), 0], tiles[: len(single), 1] = single, 0
        flat = array("i")
        for group, window in enumerate(self._ends):
            self._fill_group(step, host, group, firsts[window], single, flat)
        for window in self.windows:
            seen = host[_window(window)]
            seen[:] = min(window, FURTHEST)
            for index, row in enumerate(step.rows):
                if row.positions is not None and not needs_positions(row, windowed=True):
                    seen[index] = row.length - row.first_slot(window)
        longest = max(row.length for row in step.rows)
        host["chunk"][:] = [round_up(-(-longest // count), LEAST_CHUNK_SPLIT) for count in SPLITS]
        self._share([step.rows[index].length for index in single], reads)
        for any_window, keys in self.split_size.items():
            host[_split(any_window)][0] = keys
        self._buffer[:used].copy_(staging, non_blocking=True)

    def _fill_group(
        self,
        step: Step,
        host: dict[str, np.ndarray],
        group: int,
        firsts: list[int],
        single: list[int],
        flat: array[int],
    ) -> None:
        """Add the block tables of a layer group, whose entries follow those of the groups before it."""
        size, begun = self._size, len(flat)
        entries: list[tuple[int, int, int, int]] = []
        for start, row, first in zip(step.cumulative_lengths, step.rows, firsts, strict=False):
            entries.append((start, row.context, row.queries, len(flat) - first))
            flat.extend(row.table(group)[first : -(-row.length // size)])
        rows, slots = host[_rows(group)].reshape(-1, 4), host[_slots(group)]
        rows[:] = 0
        rows[: len(entries)] = entries
        slots[:] = -1
        table = host["blocks"][: len(flat)]
        table[begun:] = flat[begun:]  # copies the array's buffer at once
        if self._ends[group] is not None:
            table[begun:][table[begun:] == ABSENT] = self._spare
        if single:
            first, context, _, begin = rows[single].T
            slots[first] = table[begin + context // size] * size + context % size
        for index in (i for i, row in enumerate(step.rows) if row.queries > 1):
            first, context, queries, begin = entries[index]
            own = np.arange(context, context + queries)
            slots[first : first + queries] = table[begin + own // size] * size + own % size

    def _share(self, lengths: Sequence[int], reads: Sequence[int]) -> None:
        """Choose the splits of rows with one query, by the slots that they have and that they read.

        Keys inside a sliding window are split separately and finer, but into no more splits than the whole
        row: a graph is captured for that many.
        """
        for window in self.split_size:  # None, for no sliding window, comes first
            keys = reads if window is None else [min(n, window + LEAST_SPLIT) for n in lengths]
            longest = max(keys, default=1)
            size = split_keys(self._heads * sum(keys), longest, self._programs, LEAST_SPLIT)
            if window is None:
                self.splits = -(-longest // size)
            self.split_size[window] = max(size, round_up(-(-longest // self.splits), LEAST_SPLIT))


class CudaMetadata:
    """One step's tables, and its rows cut into tiles."""

    def __init__(
        self,
        step: Step,
        tables: Tables | None = None,
        splits: int = 1,
        chunk_tiles: Callable[[Sequence[int], int], Tiles] | None = None,
        widths: tuple[int, int] = (0, 0),
    ) -> None:
        """Graph capture passes filled `tables` with room to spare. A step with rows of one query also needs
        the most `splits` that any replayed step has, and `widths`, the most blocks of fast rows and of rows
        that renew their evidence; a step of chunks its `chunk_tiles` by rows and number of queries. No row of
        a captured step needs positions: those are not in the tables.
        """
        self.pool = pool = step.pool
        self.rows = step.rows
        self.cumulative_lengths = step.cumulative_lengths
        self.single = [i for i, row in enumerate(step.rows) if row.queries == 1]
        self.chunks = [i for i, row in enumerate(step.rows) if row.queries > 1]
        self._processors = processors(pool.device)
        self._heads = min(shape.kv_heads for shape in pool.layers)
        if tables is None:
            blocks = count_entries(step.rows, pool.geometry.windows, pool.block_size)
            tables = Tables(pool, len(step.rows), step.cumulative_lengths[-1], blocks)
            tables.fill(step)
            single, splits, least = len(self.single), tables.splits, tables.split_size
            widths = tables.widths
        else:  # split sizes will change: launch enough programs for the smallest
            if splits < tables.splits:
                raise AssertionError(
                    f"{splits} splits, but {tables.splits} are needed: keys would be left out"
                )
            single, least = len(tables.tiles), dict.fromkeys(tables.split, LEAST_SPLIT)
        self.tables = tables
        self.fast = tables.fast(widths[0]) if widths[0] else None
        self.renewing = tables.renewing(widths[1]) if widths[1] else None
        self.decode = {
            window: Tiles(tables.tiles[:single], 1, splits, split, least[window])
            for window, split in tables.split.items()
        }
        """Rows of one query, by a layer's sliding window."""
        self._chunk_tiles = chunk_tiles
        self._tiles: dict[tuple[tuple[int, ...], int], Tiles] = {}
        self._needing: dict[bool, set[int]] = {}  # rows that need positions, with sliding windows or without
        self._positions: dict[bool, torch.Tensor] = {}
        self._contiguous: dict[tuple[int, int, int], bool] = {}  # by group, row and number of blocks

    def of(self, layer: int) -> GroupTables:
        """The tables of a layer's group."""
        return self.tables.groups[self.pool.group_of[layer]]

    def most_filled(self) -> int:
        """The most blocks that the new slots of a row may fill; in a captured step, of any replayed one."""
        size = self.pool.block_size
        if self._chunk_tiles is not None:
            return -(-self.rows[0].queries // size)
        return max(-(-row.queries // size) for row in self.rows)

    def tiles(self, rows: Sequence[int], queries: int) -> Tiles:
        """The queries of some rows in tiles of at most `queries`; tiles that read most keys come last."""
        if self._chunk_tiles is not None:
            return self._chunk_tiles(rows, queries)
        key = tuple(rows), queries
        if key not in self._tiles:
            found: list[tuple[int, int, int]] = []  # keys to read, row, first query
            for index in rows:
                row = self.rows[index]
                found.extend((row.context + at, index, at) for at in range(0, row.queries, queries))
            found.sort()
            keys, longest = self._heads * sum(n for n, _, _ in found), found[-1][0] + queries
            few = self._heads * len(found) < self._processors
            programs = PROGRAMS * self._processors
            split = split_keys(keys, longest, programs, LEAST_CHUNK_SPLIT) if few else longest
            entries = [split, *(0 for _ in range(ALIGN - 1)), *(n for tile in found for n in tile[1:])]
            table = to_device(torch.tensor(entries, dtype=torch.int32, device="cpu"), self.pool.device)
            splits = -(-longest // split)
            self._tiles[key] = Tiles(table[ALIGN:].view(-1, 2), queries, splits, table[:1], split)
        return self._tiles[key]

    def tokens(self, index: int) -> slice:
        """A row's tokens in the flattened step."""
        return slice(self.cumulative_lengths[index], self.cumulative_lengths[index + 1])

    def hidden(self) -> list[int]:
        """Rows of one query that may not read all slots before it."""
        return [i for i in self.single if needs_positions(self.rows[i], windowed=False)]

    def source(self, layer: int) -> Source:
        """A plain layer's keys and values in the pool."""
        slots = self.pool.planes(layer).slots
        keys, values = slots[PlainStore.KEY], slots[PlainStore.VALUE]
        group = self.pool.group_of[layer]
        return Source(keys, values, self.tables.blocks, self.pool.block_size, group)

    def copied(self, keys: torch.Tensor, values: torch.Tensor) -> Source:
        """A row's slots in order, copied out of the pool."""
        return Source(keys, values, self.tables.same_block, ONE_PIECE)

    def room(self, index: int) -> int:
        """Slots that a copy of the row must hold: in a captured step, of the longest row."""
        if self._chunk_tiles is not None:
            return len(self.tables.blocks) // len(self.rows) * self.pool.block_size
        return self.rows[index].length

    def prefix(self, source: Source, index: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a row's first slots, in a layer whose blocks do not end. [slots, kv_heads, dim]

        A view if the row's blocks are neighbours, otherwise a copy.
        """
        if source.block_size == ONE_PIECE:
            return source.keys[:slots], source.values[:slots]
        size, group = self.pool.block_size, source.group
        blocks = self.rows[index].table(group)
        count = -(-slots // size)
        key = (group, index, count)
        if key not in self._contiguous:
            self._contiguous[key] = all(b == blocks[0] + i for i, b in enumerate(blocks[:count]))
        if self._contiguous[key]:
            at = slice(blocks[0] * size, blocks[0] * size + slots)
            return source.keys[at], source.values[at]
        windows = self.pool.geometry.windows
        begin = count_entries(self.rows, windows[:group], size)
        begin += count_entries(self.rows[:index], windows[group : group + 1], size)
        table = source.blocks[begin : begin + count]
        both = (t.view(-1, size, *t.shape[1:]) for t in (source.keys, source.values))
        keys, values = (t.index_select(0, table).flatten(0, 1)[:slots] for t in both)
        return keys, values

    def positions(self, rows: Sequence[int], windowed: bool) -> torch.Tensor | None:
        """[all rows] the index of each row's positions in this tensor, or -1 if they are its slots; then the
        positions. None if none of the given rows needs positions.
        """
        if windowed not in self._needing:
            found = {i for i, row in enumerate(self.rows) if needs_positions(row, windowed)}
            self._needing[windowed] = found
        needing = self._needing[windowed]
        if needing.isdisjoint(rows):
            return None
        if windowed not in self._positions:
            starts: list[int] = []
            flat: list[int] = []
            for index, row in enumerate(self.rows):
                own = row.positions if index in needing else None
                starts.append(-1 if own is None else len(self.rows) + len(flat))
                flat.extend(() if own is None else own[: row.length])
            entries = torch.tensor(starts + flat, dtype=torch.int32, device="cpu")
            self._positions[windowed] = to_device(entries, self.pool.device)
        return self._positions[windowed]


def processors(device: torch.device) -> int:
    """Multiprocessors of the device; 1 under the interpreter on a CPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
