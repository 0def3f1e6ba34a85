"""Launching the choice of blocks for fast decode rows: two kernels a layer, before attention.

`attention/glance.py` says what is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from skim.attention.cuda import metadata
from skim.attention.cuda.glance_kernels import score_kernel, select_kernel
from skim.attention.cuda.launch import Chosen
from skim.attention.cuda.layout import FastRows, GroupTables, Tiles
from skim.memory.store import Planes
from skim.memory.summary import MEAN, VARIANCE

MOST_SPLITS = 64  # programs that may share the summaries of one KV head of a row
HELD = 32  # numbers that a thread of the selecting kernel holds of each tensor


@dataclass(frozen=True)
class GlanceConfig:
    """Tile sizes and Triton options of the scoring kernel."""

    tile: int  # blocks whose summaries are read at a time
    warps: int
    stages: int
    programs: int  # per multiprocessor


CONFIG = GlanceConfig(tile=64, warps=4, stages=2, programs=4)


def choose_blocks(
    query: torch.Tensor,  # [tokens, heads, key_dim], in the store's basis
    planes: Planes,
    scale: float,
    tables: GroupTables,
    tiles: Tiles,  # of rows with one query each
    fast: FastRows,
    column: int,  # of the layer's first KV head, in `FastRows.mass`
    block_size: int,
    config: GlanceConfig | None = None,
) -> Chosen:
    """The blocks that each KV head of the fast rows reads. Writes the mass that they hold."""
    mean, variance = planes.blocks[MEAN], planes.blocks[VARIANCE]
    _, kv_heads, key_dim = mean.shape
    heads = query.shape[1]
    group = heads // kv_heads
    count = tiles.table.shape[0]
    if query.stride(2) != 1:
        query = query.contiguous()
    config = config or config_of(key_dim, query.dtype)
    width = fast.width
    splits = splits_of(width, kv_heads * count, metadata.processors(query.device), config)
    scores = torch.empty(count, kv_heads, group + 1, width, dtype=torch.float32, device=query.device)
    parts = scores.new_empty(count, kv_heads, 2, group, splits)
    lists = torch.empty(count, kv_heads, width, dtype=torch.int32, device=query.device)
    bfloat16 = query.dtype == mean.dtype == torch.bfloat16
    score_kernel[(kv_heads, count, splits)](
        query,
        mean,
        variance,
        scores,
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
        WIDTH=width,
        BLOCK_SIZE=block_size,
        TILE=config.tile,
        DOT=tl.bfloat16 if bfloat16 else tl.float32,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=config.warps,
        num_stages=config.stages,
    )
    warps = min(16, max(4, width // 256))
    pack = triton.next_power_of_2(group)
    select_kernel[(kv_heads, count)](
        scores,
        parts,
        lists,
        fast.mass,
        tables.rows,
        tiles.table,
        tables.blocks,
        fast.picks,
        splits,
        fast.mass.stride(0),
        column,
        GROUP=group,
        KV_HEADS=kv_heads,
        WIDTH=width,
        PIECE=min(width, max(1, HELD * 32 * warps // pack)),
        PACK=pack,
        PAD_SPLITS=triton.next_power_of_2(splits),
        BLOCK_SIZE=block_size,
        num_warps=warps,
    )
    return Chosen(lists, fast.picks)


def config_of(key_dim: int, dtype: torch.dtype) -> GlanceConfig:
    """Bound by reads of summaries, so many loads in flight; wide heads need smaller tiles."""
    if key_dim * dtype.itemsize <= 256:
        return CONFIG
    return GlanceConfig(tile=32, warps=4, stages=2, programs=CONFIG.programs)


def splits_of(width: int, pairs: int, processors: int, config: GlanceConfig) -> int:
    """Programs that share the summaries of a KV head of a row. Does not depend on lengths, for graphs."""
    wanted = -(-config.programs * processors // pairs)
    return max(1, min(wanted, -(-width // config.tile), MOST_SPLITS))
