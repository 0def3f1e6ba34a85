"""Tables of captured steps, refilled in place for every replay (`GraphBuffers`)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from skim.attention.cuda import metadata
from skim.attention.cuda.layout import (
    LEAST_CHUNK_SPLIT,
    MOST_SPLITS,
    PROGRAMS,
    SPLITS,
    WIDEST_TILE,
    Tiles,
    needs_positions,
)
from skim.attention.cuda.metadata import CudaMetadata, Tables
from skim.attention.step import Step
from skim.device import to_device
from skim.memory.pool import KVPool


def refuses_capture(step: Step) -> str | None:
    """The reason a step cannot be captured, as a metric label; None if it can."""
    kinds = {False, step.pool.windowed}
    if any(needs_positions(row, windowed) for row in step.rows for windowed in kinds):
        return "positions"  # captured tables have none
    if any(row.watch is not None for row in step.rows):
        return "watch"  # slots and keys of the watched tokens differ from step to step
    return None


class CapturedTables:
    """Tables of captured steps (`GraphBuffers`): decode rows, or chunks of up to `queries` queries.

    The graph key of decode rows is the number of splits, and the most blocks of fast rows and of slow rows
    that renew their evidence, all rounded up. Without such rows, that is 0. The splits of chunks depend on
    the number of their tiles alone, and their size on the longest row.
    """

    def __init__(self, pool: KVPool, rows: int, slots: int, queries: int = 1) -> None:
        every = -(-slots // pool.block_size)
        tile = -(-WIDEST_TILE // pool.block_size) + 2
        most = (
            every if window is None else min(every, -(-(window + queries) // pool.block_size) + tile)
            for window in pool.geometry.windows
        )
        blocks = rows * sum(most)
        self._tables = Tables(pool, rows, tokens=rows * queries, blocks=blocks)
        self._pool = pool
        self._queries = queries
        self._tiles: dict[tuple[tuple[int, ...], int], Tiles] = {}  # by rows, and queries of a tile

    def refill(self, step: Step) -> Hashable:
        self._tables.fill(step)
        if self._queries > 1:
            return None
        splits = next(count for count in SPLITS if count >= self._tables.splits)
        return splits, self._tables.widths

    def metadata(self, step: Step, key: Hashable) -> CudaMetadata:
        if key is None:
            return CudaMetadata(step, self._tables, self._tables.splits, self._chunk_tiles)
        assert isinstance(key, tuple)
        splits, widths = key
        return CudaMetadata(step, self._tables, splits=splits, widths=widths)

    def _chunk_tiles(self, rows: Sequence[int], queries: int) -> Tiles:
        """All tiles of some rows. Those beyond the queries of a row end at once."""
        key = tuple(rows), queries
        if key not in self._tiles:
            device = self._pool.device
            entries = [(row, first) for row in rows for first in range(0, self._queries, queries)]
            processors = metadata.processors(device)
            programs = len(entries) * min(shape.kv_heads for shape in self._pool.layers)
            wanted = -(-PROGRAMS * processors // programs) if programs < processors else 1
            index, splits = next((i, n) for i, n in enumerate(SPLITS) if n >= min(wanted, MOST_SPLITS))
            table = torch.tensor(entries, dtype=torch.int32, device="cpu")
            split = self._tables.chunk_split[index : index + 1]
            self._tiles[key] = Tiles(to_device(table, device), queries, splits, split, LEAST_CHUNK_SPLIT)
        return self._tiles[key]
