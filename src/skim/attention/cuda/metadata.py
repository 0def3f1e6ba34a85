"""What the kernels must know of a step's rows, on the device: built once a step, shared by all layers.

Everything a decode step needs is in one buffer of whole numbers, filled by one copy. Made with room to spare,
the buffer can be filled again for another step and its addresses stay; no grid depends on a row's length.
That is what a captured CUDA graph needs. Knows nothing of Triton.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from skim.attention.step import Row, Step
from skim.device import to_device
from skim.memory.pool import KVPool

MOST_SPLITS = 128  # programs that may share one tile's keys
LEAST_SPLIT = 64  # keys below which a program for one query is not worth starting,
LEAST_CHUNK_SPLIT = 256  # or one for many, which has more to merge; splits are multiples of these
PROGRAMS = 4  # programs wanted for each of the device's processors, so that the last ones end together
FURTHEST = 2**31 - 1  # that can be told of a window
ALIGN = 4  # entries: a part of the buffer begins at a multiple of 16 bytes


@dataclass(frozen=True)
class Tiles:
    """Queries for one launch: each tile is some queries of one row."""

    table: torch.Tensor  # [tiles, 2] int32: row, first query
    queries: int  # at most this many in a tile
    splits: int  # programs that share a tile's keys
    split: torch.Tensor  # [1] int32: keys each of them takes
    least: int  # keys each of them takes at least

    def splits_within(self, keys: int) -> int:
        """Programs that have something to do where a tile reads no more than so many keys."""
        return min(self.splits, max(1, -(-keys // self.least)))


def split_keys(keys: int, longest: int, programs: int, least: int) -> int:
    """How many keys one program should take, of `keys` in all tiles and `longest` in one.

    A tile that one and a half programs could share is left to one: that saves merging.
    """
    size = max(least, keys // max(1, programs), -(-longest // MOST_SPLITS))
    if longest <= size + size // 2:
        size = longest
    return round_up(size, least)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _split(window: int | None) -> str:
    return f"split {window}"


def _window(window: int) -> str:
    return f"window {window}"


class Tables:
    """The rows of a step as the kernels read them. `fill` may be called again for a later step."""

    def __init__(self, pool: KVPool, rows: int, tokens: int, blocks: int) -> None:
        windows = sorted({shape.window for shape in pool.layers if shape.window is not None})
        sizes = {_split(window): 1 for window in (None, *windows)}
        sizes |= {_window(window): rows for window in windows}
        sizes |= {"rows": 4 * rows, "tiles": 2 * rows, "slots": tokens, "blocks": blocks}
        self._size = pool.block_size
        self._heads = min(shape.kv_heads for shape in pool.layers)
        self._programs = PROGRAMS * processors(pool.device)
        self._parts: dict[str, slice] = {}
        at = 0
        for name, size in sizes.items():
            self._parts[name] = slice(at, at + size)
            at += round_up(size, ALIGN)
        self._buffer = torch.empty(at, dtype=torch.int32, device=pool.device)
        self.rows = self._part("rows").view(rows, 4)  # first token, context, queries, first block
        self.slots = self._part("slots")  # [tokens] where each token's key goes, -1 for padding
        self.blocks = self._part("blocks")  # block tables, one after the other
        self.tiles = self._part("tiles").view(rows, 2)  # the rows with one query: row, 0
        self.windows = {window: self._part(_window(window)) for window in windows}  # [rows] what each sees
        self.split = {window: self._part(_split(window)) for window in (None, *windows)}
        """Keys of a split of those rows, by a layer's window."""
        self.split_size: dict[int | None, int] = dict.fromkeys(self.split, LEAST_SPLIT)  # as last filled in
        self.splits = 1  # enough with any window

    def _part(self, name: str) -> torch.Tensor:
        return self._buffer[self._parts[name]]

    def fill(self, step: Step) -> None:
        """Take over a step's rows; what there is room for beyond them becomes padding."""
        used = self._parts["blocks"].start + sum(-(-row.length // self._size) for row in step.rows)
        # New each time, from an allocator that waits for the copy: the device may be a step behind.
        staging = torch.empty(used, dtype=torch.int32, device="cpu", pin_memory=self._buffer.is_cuda)
        host = {name: staging.numpy()[part] for name, part in self._parts.items()}
        host["slots"][:] = -1
        rows, tiles = host["rows"].reshape(-1, 4), host["tiles"].reshape(-1, 2)
        rows[:] = 0
        tiles[:] = (len(rows) - 1, 1)  # past the one query that the last row may have
        size = self._size
        entries: list[tuple[int, int, int, int]] = []
        single: list[int] = []
        lengths: list[int] = []  # of the rows with one query
        flat = array("i")
        for index, row in enumerate(step.rows):
            entries.append((step.starts[index], row.context, row.queries, len(flat)))
            flat.extend(row.blocks[: -(-row.length // size)])
            if row.queries == 1:
                single.append(index)
                lengths.append(row.length)
        rows[: len(entries)] = entries
        tiles[: len(single), 0], tiles[: len(single), 1] = single, 0
        table = host["blocks"][: len(flat)]
        table[:] = flat  # by its buffer, not one by one
        if lengths:
            first, context, _, begin = rows[single].T
            host["slots"][first] = table[begin + context // size] * size + context % size
        for index in (i for i, row in enumerate(step.rows) if row.queries > 1):
            first, context, queries, begin = entries[index]
            slots = np.arange(context, context + queries)
            places = table[begin + slots // size] * size + slots % size
            host["slots"][first : first + queries] = places
        for window in self.windows:
            seen = host[_window(window)]
            seen[:] = min(window, FURTHEST)
            for index, row in enumerate(step.rows):
                if row.positions is not None and not needs_positions(row, windowed=True):
                    seen[index] = row.length - row.first_slot(window)
        self._share(lengths)
        for any_window, keys in self.split_size.items():
            host[_split(any_window)][0] = keys
        self._buffer[:used].copy_(staging, non_blocking=True)

    def _share(self, lengths: Sequence[int]) -> None:
        """Choose the splits for rows of one query. What a window leaves is cut by itself, finer, but into no
        more splits than the whole: a graph is captured for that many."""
        for window in self.split_size:  # None comes first
            keys = lengths if window is None else [min(n, window + LEAST_SPLIT) for n in lengths]
            longest = max(keys, default=1)
            size = split_keys(self._heads * sum(keys), longest, self._programs, LEAST_SPLIT)
            if window is None:
                self.splits = -(-longest // size)
            self.split_size[window] = max(size, round_up(-(-longest // self.splits), LEAST_SPLIT))


class Plan:
    """One step's tables, and its rows cut into tiles."""

    def __init__(self, step: Step, tables: Tables | None = None, splits: int = 1) -> None:
        """`tables` are given, filled and with room to spare, where a graph is captured over them. `splits`
        are then as many as any step will need that it is run for.

        Such a step has rows of one query only, and none that needs positions: those are not in the tables.
        """
        pool = step.pool
        self.step = step
        self.single = [i for i, row in enumerate(step.rows) if row.queries == 1]
        self.chunks = [i for i, row in enumerate(step.rows) if row.queries > 1]
        self._processors = processors(pool.device)
        self._heads = min(shape.kv_heads for shape in pool.layers)
        if tables is None:
            blocks = sum(-(-row.length // pool.block_size) for row in step.rows)
            tables = Tables(pool, len(step.rows), step.starts[-1], blocks)
            tables.fill(step)
            single, splits, least = len(self.single), tables.splits, tables.split_size
        else:  # sizes will change, so as many programs as the least of them needs
            if splits < tables.splits:
                raise AssertionError(
                    f"{splits} splits, but {tables.splits} are needed: keys would be left out"
                )
            single, least = len(tables.tiles), dict.fromkeys(tables.split, LEAST_SPLIT)
        self.tables = tables
        self.decode = {
            window: Tiles(tables.tiles[:single], 1, splits, split, least[window])
            for window, split in tables.split.items()
        }
        """The rows of one query, by a layer's window."""
        self._tiles: dict[tuple[tuple[int, ...], int], Tiles] = {}
        self._needing: dict[bool, set[int]] = {}  # rows that need their positions, with windows or without
        self._positions: dict[bool, torch.Tensor] = {}
        self._neighbours: dict[tuple[int, int], bool] = {}  # whether so many blocks of a row are neighbours

    def tiles(self, rows: Sequence[int], queries: int) -> Tiles:
        """Some rows' queries in tiles of at most `queries`; those that read most keys come last."""
        key = tuple(rows), queries
        if key not in self._tiles:
            found: list[tuple[int, int, int]] = []  # keys to read, row, first query
            for index in rows:
                row = self.step.rows[index]
                found.extend((row.context + at, index, at) for at in range(0, row.queries, queries))
            found.sort()
            keys, longest = self._heads * sum(n for n, _, _ in found), found[-1][0] + queries
            few = self._heads * len(found) < self._processors
            programs = PROGRAMS * self._processors
            split = split_keys(keys, longest, programs, LEAST_CHUNK_SPLIT) if few else longest
            entries = [split, *(0 for _ in range(ALIGN - 1)), *(n for tile in found for n in tile[1:])]
            table = to_device(torch.tensor(entries, dtype=torch.int32, device="cpu"), self.step.pool.device)
            splits = -(-longest // split)
            self._tiles[key] = Tiles(table[ALIGN:].view(-1, 2), queries, splits, table[:1], split)
        return self._tiles[key]

    def prefix(self, layer: int, index: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a row's first slots. [slots, kv_heads, dim]

        In place where the row's blocks are neighbours, otherwise a copy.
        """
        size = self.step.pool.block_size
        blocks = self.step.rows[index].blocks
        slab = self.step.pool.slabs[0]
        count = -(-slots // size)
        if (index, count) not in self._neighbours:
            self._neighbours[index, count] = all(b == blocks[0] + i for i, b in enumerate(blocks[:count]))
        if self._neighbours[index, count]:
            at = slice(blocks[0] * size, blocks[0] * size + slots)
            return slab.key_slots[layer][at], slab.value_slots[layer][at]
        begin = sum(-(-row.length // size) for row in self.step.rows[:index])
        table = self.tables.blocks[begin : begin + count]
        keys, values = (t[layer].index_select(0, table) for t in (slab.keys, slab.values))
        return keys.flatten(0, 1)[:slots], values.flatten(0, 1)[:slots]

    def positions(self, rows: Sequence[int], windowed: bool) -> torch.Tensor | None:
        """[all rows] where a row's positions begin, or -1 where they are its slots, then the positions.

        None if none of the given rows needs its own.
        """
        if windowed not in self._needing:
            found = {i for i, row in enumerate(self.step.rows) if needs_positions(row, windowed)}
            self._needing[windowed] = found
        needing = self._needing[windowed]
        if needing.isdisjoint(rows):
            return None
        if windowed not in self._positions:
            starts: list[int] = []
            flat: list[int] = []
            for index, row in enumerate(self.step.rows):
                own = row.positions if index in needing else None
                starts.append(-1 if own is None else len(self.step.rows) + len(flat))
                flat.extend(() if own is None else own[: row.length])
            entries = torch.tensor(starts + flat, dtype=torch.int32, device="cpu")
            self._positions[windowed] = to_device(entries, self.step.pool.device)
        return self._positions[windowed]


def needs_positions(row: Row, windowed: bool) -> bool:
    """Whether slots do not tell what the row's queries see, be it all before or from a window's edge on."""
    if not windowed:
        return not row.sees_all_before
    return row.positions is not None and (row.queries > 1 or not row.ascending)


def processors(device: torch.device) -> int:
    """How many programs the device runs side by side; on the CPU there is the interpreter alone."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
