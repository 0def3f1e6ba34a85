"""Parts of a step's metadata: tiles of queries, sources of keys, and the block tables that kernels look up.

Everything here is plain data or a pure decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skim.attention.step import Row
from skim.memory.store import LayerShape

MOST_SPLITS = 128  # programs that may share one tile's keys
LEAST_SPLIT = 64  # fewest keys for a program with one query; splits are multiples of this
LEAST_CHUNK_SPLIT = 256  # the same for a program with many queries, which has more to merge
SPLITS = (1, 2, 4, 8, 16, 32, 64, MOST_SPLITS)  # graphs are captured for these numbers of splits
PROGRAMS = 4  # programs per multiprocessor, so that the last ones end together
CODED_PROGRAMS = 12  # the same for decode over codes, whose programs are small
FURTHEST = 2**31 - 1  # widest sliding window that fits an entry
WIDEST_TILE = 128  # most keys that a program reads at a time
ONE_PIECE = 2**30  # a block that holds any row
ALIGN = 4  # entries: every part of the buffer begins at a multiple of 16 bytes


@dataclass(frozen=True)
class Tiles:
    """The queries of one launch: each tile is some queries of one row."""

    table: torch.Tensor  # [tiles, 2] int32: row, first query
    queries: int  # at most this many in a tile
    splits: int  # programs that share a tile's keys
    split: torch.Tensor  # [1] int32: keys per program
    least: int  # fewest keys per program

    def splits_within(self, keys: int) -> int:
        """Programs that have keys to read if a tile reads at most `keys` keys."""
        return min(self.splits, max(1, -(-keys // self.least)))


@dataclass(frozen=True)
class Source:
    """A layer's keys and values as the attention kernel reads them."""

    keys: torch.Tensor  # [slots, kv_heads, key_dim]
    values: torch.Tensor  # [slots, kv_heads, value_dim]
    blocks: torch.Tensor  # int32: the block tables of all rows, concatenated
    block_size: int  # slots; `ONE_PIECE` if this is one row's slots in order
    group: int = 0  # of the layer

    @property
    def shape(self) -> LayerShape:
        """Sizes of the heads, without the sliding window."""
        _, kv_heads, key_dim = self.keys.shape
        return LayerShape(kv_heads, key_dim, self.values.shape[2])


def split_keys(keys: int, longest: int, programs: int, least: int) -> int:
    """Keys per program, for `keys` keys in all tiles and `longest` keys in the longest tile.

    A tile with work for at most one and a half programs gets one: that saves merging.
    """
    size = max(least, keys // max(1, programs), -(-longest // MOST_SPLITS))
    if longest <= size + size // 2:
        size = longest
    return round_up(size, least)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def first_block(row: Row, window: int | None, block_size: int) -> int:
    """The first block of a row's table that the kernels may look up, if blocks end behind `window`.

    They begin at a tile of keys, before the window, and rows masked by position at the first slot.
    """
    if window is None or needs_positions(row, windowed=True):
        return 0
    return row.first_slot(window) // WIDEST_TILE * WIDEST_TILE // block_size


@dataclass(frozen=True)
class GroupTables:
    """A step's rows as the kernels read them in the layers of one group."""

    rows: torch.Tensor  # [rows, 4] first token, context, queries, and the place of block 0 in `blocks`
    slot_mapping: torch.Tensor  # [tokens] the slot of each new token, -1 for padding
    blocks: torch.Tensor  # concatenated block tables of all groups
    windows: dict[int, torch.Tensor]  # [rows] slots seen, by sliding window


def count_entries(rows: Sequence[Row], windows: Sequence[int | None], block_size: int) -> int:
    """The entries of the rows' block tables, in groups whose blocks end behind these windows."""
    return sum(
        -(-row.length // block_size) - first_block(row, window, block_size)
        for window in windows
        for row in rows
    )


def needs_positions(row: Row, windowed: bool) -> bool:
    """True if slots alone do not determine what the row's queries see, with or without a sliding window."""
    if not windowed:
        return not row.sees_all_before
    return row.positions is not None and (row.queries > 1 or not row.ascending)
