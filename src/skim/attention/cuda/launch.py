"""Launching the attention kernel: tile sizes, strides, and the buffers between its two launches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from skim.attention.cuda.kernels import attend_kernel, merge_kernel
from skim.attention.cuda.layout import GroupTables, Source, Tiles
from skim.attention.step import AttentionCall
from skim.attention.triton_overlap import overlapping
from skim.memory.store import LayerShape

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Config:
    """Tile sizes and Triton options of a launch."""

    tile_m: int  # queries of a program times the heads packed with them
    tile_n: int  # keys read at a time
    warps: int
    stages: int
    registers: int | None = None  # most of a thread: fewer let more programs run at a time


@dataclass(frozen=True)
class BlockList:
    """The key blocks that each tile reads: ascending, without repeats, none after its queries.

    A program is a key head with the query heads that share it or, in block-sparse prefill, one query head.
    """

    blocks: torch.Tensor  # [tiles, programs, most] int32, counted from the row's first slot
    counts: torch.Tensor  # [tiles, programs] int32
    block_size: int  # slots; any power of two


@dataclass(frozen=True)
class Chosen:
    """The blocks that each KV head of a fast row reads, as a block table: see `select_kernel`."""

    blocks: torch.Tensor  # [tiles, kv_heads, most] int32, blocks of the pool
    picks: torch.Tensor  # [rows, 4] int32; the last is the slots to read, 0 for all slots of the row


@dataclass(frozen=True)
class Masses:
    """Room for the attention mass of neighbouring keys, for each query of a tile. Rows of one query only."""

    logs: torch.Tensor  # [tiles, programs, Config.tile_m, entries] float32: logs to the base 2
    grain: int  # keys of an entry


@dataclass(frozen=True)
class Prior:
    """Attention of the same queries over the slots before `first_slot`, to be merged in."""

    out: torch.Tensor  # [tokens, heads, value_dim]
    log: torch.Tensor  # [tokens, heads] float32, of the softmax denominators
    first_slot: int


def decode_config(shape: LayerShape, group: int, dtype: torch.dtype) -> Config:
    """For one query per tile: bound by reads, so small tiles and many loads in flight."""
    wide = max(shape.key_dim, shape.value_dim) * dtype.itemsize > 256
    return Config(max(16, triton.next_power_of_2(group)), 32 if wide else 64, 4, 2)


def chunk_config(shape: LayerShape, group: int, queries: int, dtype: torch.dtype) -> Config:
    """For tiles of many queries: bound by matrix products, so large tiles."""
    width = triton.next_power_of_2(max(shape.key_dim, shape.value_dim))
    if dtype == torch.float32:
        tile = Config(32 if width > 128 else 64, 32, 4, 1)
    elif width > 128:
        tile = Config(128, 64, 8, 2)
    else:
        tile = Config(128, 64, 4, 3)
    need = triton.next_power_of_2(group * queries)
    if need <= tile.tile_m // 2:  # a smaller tile wastes less on few queries
        return Config(max(16, need), min(tile.tile_n, 8192 // width), 4, tile.stages)
    return replace(tile, tile_m=max(tile.tile_m, triton.next_power_of_2(group)))


def attend_tiles(
    out: torch.Tensor,  # [tokens, heads, value_dim]; tokens in the tiles are written
    query: torch.Tensor,  # [tokens, heads, key_dim]
    source: Source,
    call: AttentionCall,
    tables: GroupTables,
    tiles: Tiles,
    config: Config,
    *,
    pack: int,
    positions: torch.Tensor | None = None,
    listed: BlockList | None = None,
    chosen: Chosen | None = None,
    masses: Masses | None = None,
    prior: Prior | None = None,
    in_one_piece: bool = False,
) -> None:
    """Attend the tiles' queries over the slots they may read, or over `listed` or `chosen` blocks.

    `pack` query heads share a program: all heads of a key head, or one. With `in_one_piece` all tiles belong
    to one row, and the source is that row's slots in order instead of the pool's. The copy engine then
    fetches whole tiles; this needs head sizes that are powers of two.
    """
    heads, key_dim = query.shape[1:]
    kv_heads, value_dim = source.values.shape[1:]
    programs = heads // pack
    rows = tiles.queries * pack
    count = tiles.table.shape[0]
    splits = tiles.splits
    if prior is not None:
        splits = 1  # otherwise every split would add the prior
    elif listed is not None:
        splits = tiles.splits_within(listed.blocks.shape[2] * listed.block_size)
    elif call.window is not None and positions is None:
        splits = tiles.splits_within(call.window + tiles.queries + config.tile_n)
    if query.stride(2) != 1:
        query = query.contiguous()
    split = splits > 1
    if split and tiles.least % config.tile_n:
        raise AssertionError(f"splits of {tiles.least} keys are no multiple of tiles of {config.tile_n}")
    target, logs = out, out
    if split:
        target = torch.empty(count, programs, splits, rows, value_dim, dtype=torch.float32, device=out.device)
        logs = target.new_empty(count, programs, splits, rows)
    keys: torch.Tensor | TensorDescriptor = source.keys
    values: torch.Tensor | TensorDescriptor = source.values
    if in_one_piece:
        keys = TensorDescriptor.from_tensor(source.keys.flatten(1), [config.tile_n, key_dim])
        values = TensorDescriptor.from_tensor(source.values.flatten(1), [config.tile_n, value_dim])
    none = tables.rows  # placeholder for a tensor that is not read
    lists, counts = none, none
    if listed is not None:
        lists, counts = listed.blocks, listed.counts
    elif chosen is not None:
        lists, counts = chosen.blocks, chosen.picks
    softcap = call.softcap
    grid = (programs, count, splits) if tiles.queries == 1 else (count, programs, splits)
    attend_kernel[grid](
        query,
        keys,
        values,
        target,
        logs,
        out if prior is None else prior.out,
        out if prior is None else prior.log,
        out if call.sinks is None else call.sinks,
        tables.rows,
        tiles.table,
        source.blocks,
        none if positions is None else positions,
        none if call.window is None else tables.windows[call.window],
        tiles.split,
        lists,
        counts,
        out if masses is None else masses.logs,
        query.stride(0),
        query.stride(1),
        lists.stride(-2),
        0 if masses is None else masses.logs.shape[3],
        splits,
        0 if prior is None else prior.first_slot,
        call.scale,
        1.0 if softcap is None else softcap,
        call.scale * LOG2E if softcap is None else LOG2E,
        HEADS_FIRST=tiles.queries == 1,
        SPLIT=split,
        PRIOR=prior is not None,
        SINKS=call.sinks is not None,
        IN_ONE_PIECE=in_one_piece,
        LISTED=listed is not None,
        CHOSEN=chosen is not None,
        MASSES=masses is not None,
        POSITIONED=positions is not None,
        WINDOWED=call.window is not None,
        SOFTCAP=softcap is not None,
        HEADS=heads,
        KV_HEADS=kv_heads,
        PACK=pack,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        PAD_KEY=max(16, triton.next_power_of_2(key_dim)),
        PAD_VALUE=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_SIZE=source.block_size,
        LIST_BLOCK=1 if listed is None else listed.block_size,
        TILE_Q=tiles.queries,
        TILE_M=config.tile_m,
        TILE_N=config.tile_n,
        GRAIN=1 if masses is None else masses.grain,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=config.warps,
        num_stages=config.stages,
        **overlapping(out.device),
    )
    if split:
        merge_kernel[(programs * rows, count)](
            target,
            logs,
            out,
            out if call.sinks is None else call.sinks,
            tables.rows,
            tiles.table,
            splits,
            programs,
            SINKS=call.sinks is not None,
            HEADS=heads,
            PACK=pack,
            VALUE_DIM=value_dim,
            PAD_VALUE=triton.next_power_of_2(value_dim),
            PAD_SPLITS=triton.next_power_of_2(splits),
            TILE_Q=tiles.queries,
            num_warps=4,
            **overlapping(out.device),
        )
