"""Launching the choice of blocks for fast decode rows, and the renewal of evidence by slow ones.

A layer of a fast step runs one kernel before attention, a layer of a slow step one kernel after it.

`attention/glance.py` says what is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from skim.attention.cuda import metadata, write
from skim.attention.cuda.glance_kernels import choose_kernel, renew_kernel
from skim.attention.cuda.glance_tables import FastRows, RenewingRows
from skim.attention.cuda.launch import Chosen, Config, Masses
from skim.attention.cuda.layout import GroupTables, Tiles
from skim.memory.store import PlainStore, Planes
from skim.memory.summary import MEAN, VARIANCE

MOST_SPLITS = 64  # programs that may share the summaries of one KV head of a row
WIDE = 2048  # blocks of a long row
HELD = 64  # numbers that a thread holds of each tensor while it lists blocks


@dataclass(frozen=True)
class ScoreConfig:
    """Tile sizes and Triton options of the choosing kernel."""

    tile: int  # blocks whose summaries are read at a time
    warps: int
    stages: int
    programs: int  # per multiprocessor


CONFIG = ScoreConfig(tile=64, warps=4, stages=3, programs=2)


class Place(NamedTuple):
    """A layer's place in tensors of all layers with summaries."""

    layer: int  # among them
    column: int  # its first KV head among theirs
    heads: int  # the most KV heads that one of them has


@dataclass(frozen=True)
class NewTokens:
    """Keys and values of new tokens, one of each row, that are not in the pool yet."""

    key: torch.Tensor  # [tokens, kv_heads, key_dim]
    value: torch.Tensor  # [tokens, kv_heads, value_dim]


def choose_blocks(
    query: torch.Tensor,  # [tokens, heads, key_dim], in the store's basis
    new: NewTokens | None,
    planes: Planes,
    scale: float,
    tables: GroupTables,
    tiles: Tiles,  # of rows with one query each
    fast: FastRows,
    place: Place,
    block_size: int,
    config: ScoreConfig | None = None,
) -> Chosen:
    """The blocks that each KV head of the fast rows reads. Writes the mass that they hold.

    Writes the `new` tokens of all rows into a plain store, and summarizes the blocks that they fill. No two
    of them may belong to one block.
    """
    mean, variance = planes.blocks[MEAN], planes.blocks[VARIANCE]
    _, kv_heads, key_dim = mean.shape
    group = query.shape[1] // kv_heads
    count = tiles.table.shape[0]
    config = config or score_config(key_dim, query.dtype, fast.width)
    splits = splits_of(fast.width, kv_heads * count, metadata.processors(query.device), config)
    scores = torch.empty(count, kv_heads, group + 1, fast.width, dtype=torch.float32, device=query.device)
    parts = scores.new_empty(count, kv_heads, 2, group, splits)
    lists = torch.empty(count, kv_heads, fast.width, dtype=torch.int32, device=query.device)
    written = [] if new is None else [new.key, new.value]
    query, *written = (t if t.stride(2) == 1 else t.contiguous() for t in (query, *written))
    key, value = written or (mean, mean)  # placeholders for tensors that are not read
    pools = (mean, mean) if new is None else (planes.slots[PlainStore.KEY], planes.slots[PlainStore.VALUE])
    bfloat16 = query.dtype == mean.dtype == torch.bfloat16
    pack = triton.next_power_of_2(group)
    choose_kernel[(kv_heads, count, splits + (new is not None))](
        query,
        mean,
        variance,
        scores,
        parts,
        lists,
        fast.mass,
        tiles.ended,
        tables.rows,
        tiles.table,
        tables.blocks,
        fast.picks,
        fast.evidence,
        key,
        value,
        *pools,
        tables.slot_mapping,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        place.layer,
        place.heads,
        splits,
        fast.mass.stride(0),
        place.column,
        scale,
        WRITES=new is not None,
        GROUP=group,
        KV_HEADS=kv_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value.shape[2],
        PAD_KEY=max(16, triton.next_power_of_2(key_dim)),
        PAD_VALUE=triton.next_power_of_2(value.shape[2]),
        MEMBERS=max(16, pack),
        WIDTH=fast.width,
        PIECE=min(fast.width, max(1, HELD * 32 * config.warps // pack)),
        PACK=pack,
        PAD_SPLITS=triton.next_power_of_2(splits),
        BLOCK_SIZE=block_size,
        TILE=config.tile,
        WRITE_TILE=min(block_size, write.TILE),
        DOT=tl.bfloat16 if bfloat16 else tl.float32,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return Chosen(lists, fast.picks)


def make_masses(
    tiles: Tiles, kv_heads: int, config: Config, renewing: RenewingRows, block_size: int
) -> Masses:
    """Room for the masses that attention with this config writes for `renew_evidence`."""
    grain = min(config.tile_n, block_size)
    sizes = (tiles.table.shape[0], kv_heads, config.tile_m, renewing.width * (block_size // grain))
    return Masses(torch.empty(sizes, dtype=torch.float32, device=tiles.table.device), grain)


def renew_evidence(
    masses: Masses,
    group: int,
    tables: GroupTables,
    tiles: Tiles,
    renewing: RenewingRows,
    place: Place,
    block_size: int,
) -> None:
    """Renew the evidence of slow rows by the masses that attention has written."""
    count, kv_heads, pack, entries = masses.logs.shape
    renew_kernel[(kv_heads, count)](
        masses.logs,
        tables.rows,
        tiles.table,
        renewing.picks,
        renewing.evidence,
        place.layer,
        place.heads,
        entries,
        GROUP=group,
        KV_HEADS=kv_heads,
        PACK=pack,
        GRAIN=masses.grain,
        BLOCK_SIZE=block_size,
        PIECE=max(256, block_size // masses.grain),
        num_warps=4,
    )


def score_config(key_dim: int, dtype: torch.dtype, width: int) -> ScoreConfig:
    """Bound by reads of summaries, so many loads in flight; wide heads need smaller tiles. Listing the blocks
    of long rows needs more threads."""
    config = CONFIG if key_dim * dtype.itemsize <= 256 else replace(CONFIG, tile=32, stages=2)
    return config if width <= WIDE else replace(config, warps=2 * config.warps)


def splits_of(width: int, pairs: int, processors: int, config: ScoreConfig) -> int:
    """Programs that share the summaries of a KV head of a row. Does not depend on lengths, for graphs.

    All programs run at the same time, if they can.
    """
    wanted = config.programs * processors // pairs
    return max(1, min(wanted, -(-width // config.tile), MOST_SPLITS))
