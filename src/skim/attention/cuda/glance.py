"""Launching the choice of blocks for fast decode rows, and the renewal of evidence by slow ones.

A layer of a fast step runs two kernels before attention, a layer of a slow step one kernel after it.

`attention/glance.py` says what is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from skim.attention.cuda import metadata
from skim.attention.cuda.glance_kernels import renew_kernel, score_kernel, select_kernel
from skim.attention.cuda.glance_tables import FastRows, RenewingRows
from skim.attention.cuda.launch import Chosen, Config, Masses
from skim.attention.cuda.layout import GroupTables, Tiles
from skim.attention.glance import near_blocks
from skim.attention.triton_overlap import overlapping
from skim.memory.store import Planes
from skim.memory.summary import MEAN, VARIANCE

MOST_SPLITS = 64  # programs that may share the summaries of one KV head of a row
HELD = 32  # numbers that a thread of the selecting kernel holds of each tensor


@dataclass(frozen=True)
class ScoreConfig:
    """Tile sizes and Triton options of the scoring kernel."""

    tile: int  # blocks whose summaries are read at a time
    warps: int
    stages: int
    programs: int  # per multiprocessor


CONFIG = ScoreConfig(tile=64, warps=4, stages=2, programs=4)


class Place(NamedTuple):
    """A layer's place in tensors of all layers with summaries."""

    layer: int  # among them
    column: int  # its first KV head among theirs
    heads: int  # the most KV heads that one of them has


@dataclass(frozen=True)
class Scores:
    """Scores of the full blocks of fast rows; those of other blocks and rows are undefined."""

    logs: torch.Tensor  # [tiles, kv_heads, group + 1, width] float32; the last is room for shares
    parts: torch.Tensor  # [tiles, kv_heads, 2, group, splits] float32: sums of masses, split by split


def choose_blocks(
    query: torch.Tensor,  # [tokens, heads, key_dim], in the store's basis
    planes: Planes,
    scale: float,
    tables: GroupTables,
    tiles: Tiles,  # of rows with one query each
    fast: FastRows,
    place: Place,
    block_size: int,
) -> Chosen:
    """The blocks that each KV head of the fast rows reads. Writes the mass that they hold."""
    config = score_config(query.shape[2], query.dtype)
    scores = score_blocks(query, planes, scale, tables, tiles, fast, block_size, config)
    return select_blocks(scores, tables, tiles, fast, place, block_size)


def score_blocks(
    query: torch.Tensor,
    planes: Planes,
    scale: float,
    tables: GroupTables,
    tiles: Tiles,
    fast: FastRows,
    block_size: int,
    config: ScoreConfig,
) -> Scores:
    """Score the blocks of fast rows by their summaries."""
    mean, variance = planes.blocks[MEAN], planes.blocks[VARIANCE]
    _, kv_heads, key_dim = mean.shape
    group = query.shape[1] // kv_heads
    count = tiles.table.shape[0]
    if query.stride(2) != 1:
        query = query.contiguous()
    splits = splits_of(fast.width, kv_heads * count, metadata.processors(query.device), config)
    logs = torch.empty(count, kv_heads, group + 1, fast.width, dtype=torch.float32, device=query.device)
    parts = logs.new_empty(count, kv_heads, 2, group, splits)
    bfloat16 = query.dtype == mean.dtype == torch.bfloat16
    score_kernel[(kv_heads, count, splits)](
        query,
        mean,
        variance,
        logs,
        parts,
        tables.rows,
        tiles.table,
        tables.blocks,
        fast.picks,
        query.stride(0),
        query.stride(1),
        splits,
        scale,
        GROUP=group,
        KV_HEADS=kv_heads,
        KEY_DIM=key_dim,
        PAD_KEY=max(16, triton.next_power_of_2(key_dim)),
        PACK=max(16, triton.next_power_of_2(group)),
        WIDTH=fast.width,
        BLOCK_SIZE=block_size,
        TILE=config.tile,
        DOT=tl.bfloat16 if bfloat16 else tl.float32,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=config.warps,
        num_stages=config.stages,
        **overlapping(query.device),
    )
    return Scores(logs, parts)


def select_blocks(
    scores: Scores,
    tables: GroupTables,
    tiles: Tiles,
    fast: FastRows,
    place: Place,
    block_size: int,
    warps: int | None = None,
) -> Chosen:
    """List the blocks that fast rows read, by their scores."""
    count, kv_heads, rest, width = scores.logs.shape
    splits = scores.parts.shape[4]
    lists = torch.empty(count, kv_heads, width, dtype=torch.int32, device=scores.logs.device)
    warps = warps or min(16, max(4, width // 256))
    pack = triton.next_power_of_2(rest - 1)
    select_kernel[(kv_heads, count)](
        scores.logs,
        scores.parts,
        lists,
        fast.mass,
        tables.rows,
        tiles.table,
        tables.blocks,
        fast.picks,
        fast.evidence,
        place.layer,
        place.heads,
        splits,
        fast.mass.stride(0),
        place.column,
        GROUP=rest - 1,
        KV_HEADS=kv_heads,
        WIDTH=width,
        PIECE=min(width, max(1, HELD * 32 * warps // pack)),
        PACK=pack,
        PAD_SPLITS=triton.next_power_of_2(splits),
        BLOCK_SIZE=block_size,
        NEAR=near_blocks(block_size),
        num_warps=warps,
        **overlapping(lists.device),
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
        **overlapping(masses.logs.device),
    )


def score_config(key_dim: int, dtype: torch.dtype) -> ScoreConfig:
    """Bound by reads of summaries, so many loads in flight; wide heads need smaller tiles."""
    if key_dim * dtype.itemsize <= 256:
        return CONFIG
    return ScoreConfig(tile=32, warps=4, stages=2, programs=CONFIG.programs)


def splits_of(width: int, pairs: int, processors: int, config: ScoreConfig) -> int:
    """Programs that share the summaries of a KV head of a row. Does not depend on lengths, for graphs."""
    wanted = -(-config.programs * processors // pairs)
    return max(1, min(wanted, -(-width // config.tile), MOST_SPLITS))
