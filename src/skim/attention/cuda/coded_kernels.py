"""Decode over codes: attention of one query per row, and the merge of its splits.

Codes are the left operand of both products, so that queries and weights fill the narrow side of the tensor
cores' tiles. Keys are loaded as [keys, units] and values as [units, keys]: so both go from global memory
through shared memory to the tensor cores as they are stored, tiles ahead, and are unpacked in between.

Scales are applied to scores and weights, not to codes: with codes c, scale s and middle m of each group of a
head, q . k = s (q . c) + m sum(q). 4-bit codes stay raised by 128, which saves an operation for every pair of
codes. The products with their raise are subtracted from scores, and from sums of values at the end. Sums that
have one term per key stay spread over eight keys until then.

Exponentials and logs are to the base 2.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

import triton
import triton.language as tl

from skim.attention.cuda.codes import RAISED, split_scales, unpack

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _fold(x):
    """Add up rows to eight: those of one thread of a warp. [rows, PACK] -> [8, PACK]"""
    return tl.sum(tl.reshape(x, [x.shape[0] // 8, 8, x.shape[1]]), 0)


@triton.jit
def _add(out, codes, weights, shrink, LEVEL: tl.constexpr, PRECISION: tl.constexpr):
    """out * shrink + codes @ weights. [rows, PACK]

    With `LEVEL`, sums are rounded to nearest once a tile, as raised codes need, whose sums cancel at the end:
    tensor cores cut off digits. The argument about imprecise sums keeps compilers from adding `out` there.
    """
    if LEVEL:
        tile = tl.dot(codes, weights, input_precision=PRECISION, max_num_imprecise_acc=weights.shape[0])
        out = out * shrink[None, :] + tile
    else:
        out = tl.dot(codes, weights, out * shrink[None, :], input_precision=PRECISION)
    return out


@triton.jit
def _read_codes(
    queries,  # parts of the turned queries, each [PAD_KEY, PACK]
    sums,  # of the queries' first and second halves, [PACK]
    parts,  # parts of the weighted sums of values, each [PAD_VALUE, PACK]
    peak,  # [PACK] highest score so far
    spread,  # sums of weights, and of weighted middles of both groups, each [8, PACK]
    raises,  # sums of the scaled weights of both groups, equal rows, each [16, PACK]
    begin,
    end,  # slots
    key_ptr,
    key_scales_ptr,
    value_ptr,
    value_scales_ptr,
    table_ptr,
    kv_head,
    scale,
    softcap,
    masses_at,  # with MASSES: [PACK] addresses of the first entries
    entries,
    MASKED: tl.constexpr,
    MASSES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    KEY_UNITS: tl.constexpr,
    KEY_GROUPS: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_UNITS: tl.constexpr,
    VALUE_GROUPS: tl.constexpr,
    PAD_KEY: tl.constexpr,
    PAD_VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_N: tl.constexpr,
    GRAIN: tl.constexpr,
    WIDE: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the keys `begin : end` to a running softmax; without `MASKED` they fill whole tiles."""
    dtype: tl.constexpr = queries[0].dtype
    LEVEL: tl.constexpr = VALUE == "int4"
    number = tl.arange(0, TILE_N)
    key_unit = tl.arange(0, PAD_KEY)
    value_unit = tl.arange(0, PAD_VALUE)
    first, second, third, fourth = queries
    sum_first, sum_second = sums
    out_first, out_second, out_third, out_fourth = parts
    total, middle, other_middle = spread
    raised, other_raised = raises
    ones = tl.full([16, TILE_N], 1.0, dtype)
    for start in range(begin, end, TILE_N):
        slot = start + number
        readable = slot < end
        if MASKED:
            page = tl.load(table_ptr + slot // BLOCK_SIZE, mask=readable, other=0)
        else:
            page = tl.load(table_ptr + slot // BLOCK_SIZE)
        if WIDE:
            page = page.to(tl.int64)
        place = (page * BLOCK_SIZE + slot % BLOCK_SIZE) * KV_HEADS + kv_head
        keys_at = key_ptr + place[:, None] * KEY_UNITS + key_unit[None, :]
        values_at = value_ptr + place[None, :] * VALUE_UNITS + value_unit[:, None]
        if MASKED:
            key = tl.load(keys_at, mask=readable[:, None] & (key_unit < KEY_UNITS)[None, :], other=0)
            value = tl.load(values_at, mask=readable[None, :] & (value_unit < VALUE_UNITS)[:, None], other=0)
            key_word = tl.load(key_scales_ptr + place, mask=readable, other=0)
            value_word = tl.load(value_scales_ptr + place, mask=readable, other=0)
        else:
            if PAD_KEY == KEY_UNITS:
                key = tl.load(keys_at)
            else:
                key = tl.load(keys_at, mask=(key_unit < KEY_UNITS)[None, :], other=0)
            if PAD_VALUE == VALUE_UNITS:
                value = tl.load(values_at)
            else:
                value = tl.load(values_at, mask=(value_unit < VALUE_UNITS)[:, None], other=0)
            key_word = tl.load(key_scales_ptr + place)
            value_word = tl.load(value_scales_ptr + place)

        of_keys, key_middle, of_second, second_middle = split_scales(key_word, KEY, KEY_GROUPS)
        of_keys *= scale
        of_second *= scale
        score = tl.dot(unpack(key, KEY, 0, dtype, FAST), first, input_precision=PRECISION)
        if KEY == "int4":
            score = tl.dot(unpack(key, KEY, 1, dtype, FAST), second, score, input_precision=PRECISION)
            other = tl.dot(unpack(key, KEY, 2, dtype, FAST), third, input_precision=PRECISION)
            other = tl.dot(unpack(key, KEY, 3, dtype, FAST), fourth, other, input_precision=PRECISION)
        else:
            other = tl.dot(unpack(key, KEY, 1, dtype, FAST), second, input_precision=PRECISION)
        score = score * of_keys[:, None] + other * of_second[:, None]
        if KEY == "int4":
            key_middle = key_middle * scale - RAISED * of_keys
            second_middle = second_middle * scale - RAISED * of_second
            score += sum_first[None, :] * key_middle[:, None] + sum_second[None, :] * second_middle[:, None]
        if SOFTCAP:
            score = softcap * LOG2E * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
        if MASKED:
            score = tl.where(readable[:, None], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        weight = tl.exp2(score - base[None, :])
        shrink = tl.exp2(peak - base)
        total = total * shrink[None, :] + _fold(weight)
        if MASSES:
            if GRAIN == TILE_N:
                entry = start // GRAIN + tl.zeros([weight.shape[1]], tl.int32)
                tl.store(masses_at + entry, base + tl.log2(tl.sum(weight, 0)), mask=entry < entries)
            else:
                grains: tl.constexpr = TILE_N // GRAIN
                mass = tl.sum(tl.reshape(weight, [grains, GRAIN, weight.shape[1]]), 1)
                entry = start // GRAIN + tl.arange(0, grains)
                inside = (entry < entries) & (entry * GRAIN < end)
                log = base[None, :] + tl.log2(mass)
                tl.store(masses_at[None, :] + entry[:, None], log, mask=inside[:, None])

        of_values, value_middle, of_second, second_middle = split_scales(value_word, VALUE, VALUE_GROUPS)
        scaled = (weight * of_values[:, None]).to(dtype)
        other_scaled = (weight * of_second[:, None]).to(dtype)
        out_first = _add(out_first, unpack(value, VALUE, 0, dtype, FAST), scaled, shrink, LEVEL, PRECISION)
        if VALUE == "int4":
            out_second = _add(
                out_second, unpack(value, VALUE, 1, dtype, FAST), scaled, shrink, LEVEL, PRECISION
            )
            out_third = _add(
                out_third, unpack(value, VALUE, 2, dtype, FAST), other_scaled, shrink, LEVEL, PRECISION
            )
            out_fourth = _add(
                out_fourth, unpack(value, VALUE, 3, dtype, FAST), other_scaled, shrink, LEVEL, PRECISION
            )
            middle = middle * shrink[None, :] + _fold(weight * value_middle[:, None])
            raised = _add(raised, ones, scaled, shrink, LEVEL, PRECISION)
            if VALUE_GROUPS == 2:
                other_middle = other_middle * shrink[None, :] + _fold(weight * second_middle[:, None])
                other_raised = _add(other_raised, ones, other_scaled, shrink, LEVEL, PRECISION)
        else:
            out_second = _add(
                out_second, unpack(value, VALUE, 1, dtype, FAST), other_scaled, shrink, LEVEL, PRECISION
            )
        peak = higher
    parts = (out_first, out_second, out_third, out_fourth)
    return parts, peak, (total, middle, other_middle), (raised, other_raised)


@triton.jit(do_not_specialize=["splits", "list_stride", "entries"])
def decode_kernel(
    query_ptr,  # [tokens, heads, key_dim] turned
    key_ptr,  # [slots, kv_heads, KEY_UNITS] int16
    key_scales_ptr,  # [slots, kv_heads]
    value_ptr,
    value_scales_ptr,
    part_ptr,  # [tiles, kv_heads, splits, GROUP, value_dim] float32
    log_ptr,  # [tiles, kv_heads, splits, GROUP] float32
    rows_ptr,  # [rows, 4]: first token, context, queries, first entry of `blocks_ptr`
    tiles_ptr,  # [tiles, 2]: row, first query
    blocks_ptr,  # concatenated block tables
    split_ptr,  # [1] keys per split
    list_ptr,  # with CHOSEN: [tiles, kv_heads, list_stride], the `list_ptr` of `select_kernel`
    picks_ptr,  # with CHOSEN: [rows, 4]
    mass_ptr,  # with MASSES: [tiles, kv_heads, PACK, entries] float32, logs of the mass in GRAIN keys each
    list_stride,
    entries,
    splits,
    scale,  # of scores; without SOFTCAP, times log2(e)
    softcap,
    CHOSEN: tl.constexpr,
    MASSES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_UNITS: tl.constexpr,
    KEY_GROUPS: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_UNITS: tl.constexpr,
    VALUE_GROUPS: tl.constexpr,
    PAD_KEY: tl.constexpr,
    PAD_VALUE: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_N: tl.constexpr,
    GRAIN: tl.constexpr,
    WIDE: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend one query of every head that shares a key head, over one split of its row."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(0)  # concurrent programs read neighbouring memory
    tile = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(tiles_ptr + 2 * tile)
    if tl.load(tiles_ptr + 2 * tile + 1) >= tl.load(rows_ptr + 4 * row + 2):
        return  # padding
    token = tl.load(rows_ptr + 4 * row).to(tl.int64)
    table_ptr = blocks_ptr + tl.load(rows_ptr + 4 * row + 3)
    length = tl.load(rows_ptr + 4 * row + 1) + 1
    if CHOSEN:
        chosen = tl.load(picks_ptr + 4 * row + 3)
        if chosen > 0:
            length = chosen
            table_ptr = list_ptr + (tile * KV_HEADS + kv_head).to(tl.int64) * list_stride
    size = tl.load(split_ptr)
    begin = split * size
    end = tl.minimum(begin + size, length)
    member = tl.arange(0, PACK)
    live = member < GROUP
    place = ((tile * KV_HEADS + kv_head) * splits + split).to(tl.int64) * GROUP
    if begin >= end:
        tl.store(log_ptr + place + member, tl.full([PACK], float("-inf"), tl.float32), mask=live)
        return

    head = kv_head * GROUP + member
    unit = tl.arange(0, PAD_KEY)
    queries_at = query_ptr + (token * HEADS + head)[None, :] * KEY_DIM + 2 * unit[:, None]
    mask = (unit < KEY_UNITS)[:, None] & live[None, :]
    first = tl.load(queries_at, mask=mask, other=0.0)
    second = tl.load(queries_at + 1, mask=mask, other=0.0)
    third, fourth = first, second
    sum_first = tl.zeros([PACK], tl.float32)
    sum_second = sum_first
    if KEY == "int4":
        third = tl.load(queries_at + KEY_DIM // 2, mask=mask, other=0.0)
        fourth = tl.load(queries_at + KEY_DIM // 2 + 1, mask=mask, other=0.0)
        sum_first = tl.sum(first.to(tl.float32) + second.to(tl.float32), 0)
        sum_second = tl.sum(third.to(tl.float32) + fourth.to(tl.float32), 0)

    masses_at = mass_ptr
    if MASSES:
        masses_at = mass_ptr + ((tile * KV_HEADS + kv_head).to(tl.int64) * PACK + member) * entries
    none = tl.zeros([PAD_VALUE, PACK], tl.float32)
    peak = tl.full([PACK], float("-inf"), tl.float32)
    nothing = tl.zeros([8, PACK], tl.float32)
    level = tl.zeros([16, PACK], tl.float32)
    full = begin + (end - begin) // TILE_N * TILE_N
    parts, peak, spread, raises = _read_codes(
        (first, second, third, fourth), (sum_first, sum_second), (none, none, none, none), peak,
        (nothing, nothing, nothing), (level, level), begin, full, key_ptr, key_scales_ptr, value_ptr,
        value_scales_ptr, table_ptr, kv_head, scale, softcap, masses_at, entries, False, MASSES, SOFTCAP,
        KV_HEADS, KEY, KEY_UNITS, KEY_GROUPS, VALUE, VALUE_UNITS, VALUE_GROUPS, PAD_KEY, PAD_VALUE,
        BLOCK_SIZE, TILE_N, GRAIN, WIDE, FAST, PRECISION,
    )  # fmt: skip
    parts, peak, spread, raises = _read_codes(
        (first, second, third, fourth), (sum_first, sum_second), parts, peak,
        spread, raises, full, end, key_ptr, key_scales_ptr, value_ptr, value_scales_ptr,
        table_ptr, kv_head, scale, softcap, masses_at, entries, True, MASSES, SOFTCAP,
        KV_HEADS, KEY, KEY_UNITS, KEY_GROUPS, VALUE, VALUE_UNITS, VALUE_GROUPS, PAD_KEY, PAD_VALUE,
        BLOCK_SIZE, TILE_N, GRAIN, WIDE, FAST, PRECISION,
    )  # fmt: skip

    total = tl.sum(spread[0], 0)
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    tl.store(log_ptr + place + member, peak + tl.log2(total), mask=live)
    unit = tl.arange(0, PAD_VALUE)
    out_at = part_ptr + (place + member)[None, :] * VALUE_DIM + 2 * unit[:, None]
    mask = (unit < VALUE_UNITS)[:, None] & live[None, :]
    middle = tl.sum(spread[1], 0) - RAISED * tl.sum(raises[0], 0) / 16
    tl.store(out_at, (parts[0] + middle[None, :]) * share[None, :], mask=mask)
    tl.store(out_at + 1, (parts[1] + middle[None, :]) * share[None, :], mask=mask)
    if VALUE == "int4":
        if VALUE_GROUPS == 2:
            middle = tl.sum(spread[2], 0) - RAISED * tl.sum(raises[1], 0) / 16
        out_at += VALUE_DIM // 2
        tl.store(out_at, (parts[2] + middle[None, :]) * share[None, :], mask=mask)
        tl.store(out_at + 1, (parts[3] + middle[None, :]) * share[None, :], mask=mask)


@triton.jit(do_not_specialize=["splits"])
def merge_turned_kernel(
    part_ptr,  # [tiles, kv_heads, splits, GROUP, value_dim] float32
    log_ptr,  # [tiles, kv_heads, splits, GROUP] float32
    out_ptr,  # [tokens, heads, value_dim]
    turn_ptr,  # [kv_heads, value_dim, value_dim]: from the store's basis
    sinks_ptr,  # [heads]
    rows_ptr,
    tiles_ptr,
    splits,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAD_VALUE: tl.constexpr,
    PAD_SPLITS: tl.constexpr,
):
    """Merge the splits of one query head by their softmax denominators, and turn the result back."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.load(tiles_ptr + 2 * tile)
    if tl.load(tiles_ptr + 2 * tile + 1) >= tl.load(rows_ptr + 4 * row + 2):
        return
    token = tl.load(rows_ptr + 4 * row).to(tl.int64)
    kv_head = head // GROUP
    split = tl.arange(0, PAD_SPLITS)
    dim = tl.arange(0, PAD_VALUE)
    inside = dim < VALUE_DIM
    place = ((tile * KV_HEADS + kv_head) * splits + split).to(tl.int64) * GROUP + head % GROUP
    log = tl.load(log_ptr + place, mask=split < splits, other=float("-inf"))
    peak = tl.max(log, 0)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        peak = tl.maximum(peak, sink)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(log - base)
    total = tl.sum(weight, 0)
    if SINKS:
        total += tl.exp2(sink - base)
    part = tl.load(
        part_ptr + place[None, :] * VALUE_DIM + dim[:, None],
        mask=inside[:, None] & (log != float("-inf"))[None, :],
        other=0.0,
    )
    stored = tl.sum(part * weight[None, :], 1) / tl.where(total == 0.0, 1.0, total)
    turn = tl.load(
        turn_ptr + (kv_head * VALUE_DIM + dim[:, None]) * VALUE_DIM + dim[None, :],
        mask=inside[:, None] & inside[None, :],
        other=0.0,
    )
    out = tl.sum(stored[:, None] * turn.to(tl.float32), 0)
    tl.store(
        out_ptr + (token * HEADS + head) * VALUE_DIM + dim, out.to(out_ptr.dtype.element_ty), mask=inside
    )
