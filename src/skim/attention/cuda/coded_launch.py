"""Launching decode over codes: its tile sizes, and the buffers between its two kernels."""

from __future__ import annotations

import torch
import triton

from skim.attention.cuda.coded_kernels import decode_kernel, merge_turned_kernel
from skim.attention.cuda.coded_write import pad_of
from skim.attention.cuda.codes import as_units, as_words, group_count, kind_of, units_of
from skim.attention.cuda.launch import LOG2E, Chosen, Config, Masses
from skim.attention.cuda.layout import GroupTables, Tiles
from skim.attention.step import AttentionCall
from skim.memory.codec import CodedStore
from skim.memory.store import Planes

INT32 = 2**31  # units that 32 bits can count

CONFIGS = {
    ("int8", "int8"): Config(8, 32, 1, 2, 168),
    ("fp8", "fp8"): Config(8, 32, 1, 2, 168),
    ("int8", "int4"): Config(8, 32, 1, 2, 168),
    ("int4", "int4"): Config(8, 64, 1, 3, 255),
}
"""By the codecs of keys and values, for heads of up to 128 and up to eight query heads per key head.

Programs of one warp need no barriers, and with 168 registers twelve of them share a multiprocessor. A tile of
4-bit codes has half the bytes, so fewer programs with longer tiles are faster there.
"""


def coded_config(store: CodedStore, group: int, dtype: torch.dtype) -> Config:
    """For one query per tile: bound by reads and by unpacking, so small programs, many at a time."""
    found = CONFIGS[kind_of(store.key), kind_of(store.value)]
    pack = max(found.tile_m, triton.next_power_of_2(group))
    wide = max(store.shape.key_dim, store.shape.value_dim) > 128 or dtype == torch.float32
    if pack > 8 or wide:
        return Config(pack, 32, 4, 2)
    return found


def attend_codes(
    out: torch.Tensor,  # [tokens, heads, value_dim]; tokens in the tiles are written
    query: torch.Tensor,  # [tokens, heads, key_dim] turned
    store: CodedStore,
    planes: Planes,
    call: AttentionCall,
    tables: GroupTables,
    tiles: Tiles,
    block_size: int,
    config: Config,
    chosen: Chosen | None = None,
    masses: Masses | None = None,
) -> None:
    """Attend the tiles' queries, one each, over all slots of their rows, or over the `chosen` blocks."""
    heads, key_dim = query.shape[1:]
    kv_heads, value_dim = store.shape.kv_heads, store.shape.value_dim
    group = heads // kv_heads
    count, splits = tiles.table.shape[0], tiles.splits
    slots = planes.slots
    key_codes, value_codes = (as_units(slots[names[0]]) for names in (store.KEYS, store.VALUES))
    parts = torch.empty(count, kv_heads, splits, group, value_dim, dtype=torch.float32, device=out.device)
    logs = parts.new_empty(count, kv_heads, splits, group)
    decode_kernel[(kv_heads, count, splits)](
        query,
        key_codes,
        as_words(slots[store.KEYS[1]]),
        value_codes,
        as_words(slots[store.VALUES[1]]),
        parts,
        logs,
        tables.rows,
        tiles.table,
        tables.blocks,
        tiles.split,
        tables.blocks if chosen is None else chosen.blocks,
        tables.rows if chosen is None else chosen.picks,
        logs if masses is None else masses.logs,
        0 if chosen is None else chosen.blocks.stride(1),
        0 if masses is None else masses.logs.shape[3],
        splits,
        call.scale * LOG2E if call.softcap is None else call.scale,
        1.0 if call.softcap is None else call.softcap,
        CHOSEN=chosen is not None,
        MASSES=masses is not None,
        SOFTCAP=call.softcap is not None,
        HEADS=heads,
        KV_HEADS=kv_heads,
        KEY=kind_of(store.key),
        KEY_DIM=key_dim,
        KEY_UNITS=units_of(store.key),
        KEY_GROUPS=group_count(store.key),
        VALUE=kind_of(store.value),
        VALUE_DIM=value_dim,
        VALUE_UNITS=units_of(store.value),
        VALUE_GROUPS=group_count(store.value),
        PAD_KEY=pad_of(units_of(store.key)),
        PAD_VALUE=pad_of(units_of(store.value)),
        PACK=config.tile_m,
        BLOCK_SIZE=block_size,
        TILE_N=config.tile_n,
        GRAIN=1 if masses is None else masses.grain,
        WIDE=max(key_codes.numel(), value_codes.numel()) >= INT32,
        FAST=query.dtype == torch.bfloat16,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=config.warps,
        num_stages=config.stages,
        maxnreg=config.registers,
    )
    merge_turned_kernel[(heads, count)](
        parts,
        logs,
        out,
        store.bases(out.device)[1].matrix("out", out.dtype),
        out if call.sinks is None else call.sinks,
        tables.rows,
        tiles.table,
        splits,
        SINKS=call.sinks is not None,
        HEADS=heads,
        KV_HEADS=kv_heads,
        VALUE_DIM=value_dim,
        PAD_VALUE=triton.next_power_of_2(value_dim),
        PAD_SPLITS=triton.next_power_of_2(splits),
        num_warps=8,
    )
