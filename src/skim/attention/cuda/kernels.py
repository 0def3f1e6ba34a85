"""The attention kernel over the paged pool, and the kernel that merges its splits.

A program takes one *tile*, some queries of one row, over one split of the keys they may read. The `PACK`
query heads that share a key head are side by side in the tile, so their keys are read once. With a list of
blocks, keys are numbered in list order; otherwise a key's number is its slot. Of a fast row, a program takes
the blocks chosen for its KV head as its block table.

Exponentials and logs are to the base 2; the scale is already multiplied by log2(e).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from skim.attention.triton_overlap import await_inputs

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _read(
    query,  # [TILE_M, PAD_KEY]
    acc,  # [TILE_M, PAD_VALUE] weighted sum of values
    peak,  # [TILE_M] highest score so far
    total,  # [TILE_M] sum of 2 ** (score - peak)
    begin,
    end,  # keys begin : end, by number
    limit,  # slots at or after this one are not read
    query_slot,  # [TILE_M]
    query_position,  # [TILE_M]
    key_ptr,
    value_ptr,
    kv_head,
    table_ptr,
    list_ptr,
    positions_ptr,
    positions_at,
    inner,
    softcap,
    scale,
    window,
    masses_at,  # with MASSES: [TILE_M] addresses of the first entries
    entries,
    MASKED: tl.constexpr,
    MASSES: tl.constexpr,
    IN_ONE_PIECE: tl.constexpr,
    LISTED: tl.constexpr,
    POSITIONED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAD_KEY: tl.constexpr,
    PAD_VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
    TILE_N: tl.constexpr,
    GRAIN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add keys to a running softmax. Without `MASKED`, every query sees every key."""
    number = tl.arange(0, TILE_N)
    key_dim = tl.arange(0, PAD_KEY)
    value_dim = tl.arange(0, PAD_VALUE)
    for start in range(begin, end, TILE_N):
        index = start + number
        readable = index < end
        first = start
        if not LISTED:
            slot = index
        elif LIST_BLOCK % TILE_N == 0:
            first = tl.load(list_ptr + start // LIST_BLOCK) * LIST_BLOCK + start % LIST_BLOCK
            slot = first + number
        elif MASKED:
            block = tl.load(list_ptr + index // LIST_BLOCK, mask=readable, other=0)
            slot = block * LIST_BLOCK + index % LIST_BLOCK
        else:
            slot = tl.load(list_ptr + index // LIST_BLOCK) * LIST_BLOCK + index % LIST_BLOCK
        if MASKED:
            readable = readable & (slot < limit)
        if not IN_ONE_PIECE:
            if MASKED:
                page = tl.load(table_ptr + slot // BLOCK_SIZE, mask=readable, other=0)
            else:
                page = tl.load(table_ptr + slot // BLOCK_SIZE)
            place = (page.to(tl.int64) * BLOCK_SIZE + slot % BLOCK_SIZE) * KV_HEADS + kv_head
            keys_at = key_ptr + place[:, None] * KEY_DIM + key_dim[None, :]
            values_at = value_ptr + place[:, None] * VALUE_DIM + value_dim[None, :]
        if IN_ONE_PIECE:
            key = key_ptr.load([first, kv_head * KEY_DIM])
        elif MASKED:
            key = tl.load(keys_at, mask=readable[:, None] & (key_dim < KEY_DIM)[None, :], other=0.0)
        elif PAD_KEY == KEY_DIM:
            key = tl.load(keys_at)
        else:
            key = tl.load(keys_at, mask=(key_dim < KEY_DIM)[None, :], other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if SOFTCAP:
            score = softcap * (2.0 * tl.sigmoid(2.0 * inner * score / softcap) - 1.0)
        if MASKED:
            seen = readable[None, :] & (slot[None, :] <= query_slot[:, None])
            if POSITIONED:
                own = number * 0 + positions_at >= 0
                known = tl.load(positions_ptr + positions_at + slot, mask=readable & own, other=0)
                position = tl.where(own, known, slot)
            else:
                position = slot
            distance = query_position[:, None] - position[None, :]
            if POSITIONED:
                seen = seen & (distance >= 0)
            if WINDOWED:
                seen = seen & (distance < window)
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1) * scale)
        base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        weight = tl.exp2(score * scale - base[:, None])
        shrink = tl.exp2(peak - base)
        added = tl.sum(weight, 1)
        total = total * shrink + added
        if MASSES:
            if GRAIN == TILE_N:
                entry = start // GRAIN + tl.zeros([weight.shape[0]], tl.int32)
                tl.store(masses_at + entry, base + tl.log2(added), mask=entry < entries)
            else:
                grains: tl.constexpr = TILE_N // GRAIN
                mass = tl.sum(tl.reshape(weight, [weight.shape[0], grains, GRAIN]), 2)
                entry = start // GRAIN + tl.arange(0, grains)
                inside = (entry < entries) & (entry * GRAIN < end)
                log = base[:, None] + tl.log2(mass)
                tl.store(masses_at[:, None] + entry[None, :], log, mask=inside[None, :])
        if IN_ONE_PIECE:
            value = value_ptr.load([first, kv_head * VALUE_DIM])
        elif MASKED:
            value = tl.load(values_at, mask=readable[:, None] & (value_dim < VALUE_DIM)[None, :], other=0.0)
        elif PAD_VALUE == VALUE_DIM:
            value = tl.load(values_at)
        else:
            value = tl.load(values_at, mask=(value_dim < VALUE_DIM)[None, :], other=0.0)
        acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
        peak = higher
    return acc, peak, total


@triton.jit(do_not_specialize=["splits", "list_stride", "entries"])
def attend_kernel(
    query_ptr,  # [tokens, heads, key_dim] by strides
    key_ptr,  # [slots, kv_heads, key_dim]; with IN_ONE_PIECE, descriptors of one row's slots in order
    value_ptr,  # [slots, kv_heads, value_dim]
    out_ptr,  # [tokens, heads, value_dim]; with SPLIT, the `part_ptr` of `merge_kernel`
    log_ptr,  # with SPLIT: [tiles, programs, splits, TILE_Q * PACK] float32
    prior_ptr,  # with PRIOR: [tokens, heads, value_dim], attention over keys that are not read here
    prior_log_ptr,  # with PRIOR: [tokens, heads] float32, its logs to the base e
    sinks_ptr,  # [heads]
    rows_ptr,  # [rows, 4]: first token, context, queries, first entry of `blocks_ptr`
    tiles_ptr,  # [tiles, 2]: row, first query
    blocks_ptr,  # concatenated block tables
    positions_ptr,  # [rows] index of each row's positions, or -1; then the positions
    windows_ptr,  # with WINDOWED: [rows] in positions, or in slots for rows without positions
    split_ptr,  # [1] keys per split, a multiple of TILE_N
    list_ptr,  # [tiles, programs, list_stride]
    count_ptr,  # [tiles, programs]; with CHOSEN, [rows, 4]: the `picks_ptr` of `select_kernel`
    mass_ptr,  # with MASSES: [tiles, programs, TILE_M, entries] float32, logs of the mass in GRAIN keys each
    query_token,
    query_head,
    list_stride,
    entries,
    splits,
    first_slot,
    inner,  # with SOFTCAP: scores are softcap * tanh(inner * score / softcap)
    softcap,
    scale,  # of the scores after the softcap, times log2(e)
    HEADS_FIRST: tl.constexpr,
    SPLIT: tl.constexpr,
    PRIOR: tl.constexpr,
    SINKS: tl.constexpr,
    IN_ONE_PIECE: tl.constexpr,
    LISTED: tl.constexpr,
    CHOSEN: tl.constexpr,
    MASSES: tl.constexpr,
    POSITIONED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PACK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAD_KEY: tl.constexpr,
    PAD_VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    GRAIN: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attend one tile. A query that sees no key gets zeros and a log of -inf."""
    if HEADS_FIRST:  # concurrent programs read neighbouring memory
        program = tl.program_id(0)
        tile = tl.program_id(1)
    else:  # concurrent programs read the same head's keys; the last queries, which read most, go first
        program = tl.program_id(1)
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
    split = tl.program_id(2)
    row = tl.load(tiles_ptr + 2 * tile)
    first = tl.load(tiles_ptr + 2 * tile + 1)
    first_token = tl.load(rows_ptr + 4 * row)
    context = tl.load(rows_ptr + 4 * row + 1)
    queries = tl.load(rows_ptr + 4 * row + 2)
    table_ptr = blocks_ptr + tl.load(rows_ptr + 4 * row + 3)
    here = tile * (HEADS // PACK) + program
    if SPLIT:
        size = tl.load(split_ptr)
    if CHOSEN:
        chosen = tl.load(count_ptr + 4 * row + 3)
    await_inputs(OVERLAP)
    if CHOSEN:
        own_table_ptr = list_ptr + here.to(tl.int64) * list_stride
        if chosen > 0:
            context = chosen - 1
            table_ptr = own_table_ptr
    if first >= queries:
        return

    member = tl.arange(0, TILE_M)
    local = first + member // PACK
    head = program * PACK + member % PACK
    live = (member < TILE_Q * PACK) & (local < queries)
    token = (first_token + local).to(tl.int64)
    query_slot = context + local

    window = 0
    if WINDOWED:
        window = tl.load(windows_ptr + row)
    positions_at = -1
    query_position = query_slot
    if POSITIONED:
        positions_at = tl.load(positions_ptr + row)
        own = member * 0 + positions_at >= 0
        known = tl.load(positions_ptr + positions_at + query_slot, mask=live & own, other=0)
        query_position = tl.where(own, known, query_slot)

    limit = context + tl.minimum(first + TILE_Q, queries)
    begin = first_slot
    if LISTED:
        list_ptr += here.to(tl.int64) * list_stride
        end = tl.load(count_ptr + here) * LIST_BLOCK
        unmasked = end - ((TILE_Q + LIST_BLOCK - 2) // LIST_BLOCK + 1) * LIST_BLOCK
    else:
        end = limit
        unmasked = context + first + 1
        if WINDOWED:
            reach = tl.maximum(context + first - window + 1, 0) // TILE_N * TILE_N
            if POSITIONED:
                reach = tl.where(positions_at >= 0, 0, reach)
            begin = tl.maximum(begin, reach)

    if SPLIT:
        rows: tl.constexpr = TILE_Q * PACK
        place = (here * splits + split).to(tl.int64) * rows
        begin += split * size
        end = tl.minimum(end, begin + size)
        if begin >= end:
            tl.store(log_ptr + place + member, tl.full([TILE_M], float("-inf"), tl.float32), mask=live)
            return

    key_dim = tl.arange(0, PAD_KEY)
    value_dim = tl.arange(0, PAD_VALUE)
    query = tl.load(
        query_ptr + token[:, None] * query_token + head[:, None] * query_head + key_dim[None, :],
        mask=live[:, None] & (key_dim < KEY_DIM)[None, :],
        other=0.0,
    )
    out_at = (token * HEADS + head)[:, None] * VALUE_DIM + value_dim[None, :]
    out_mask = live[:, None] & (value_dim < VALUE_DIM)[None, :]
    if PRIOR:
        peak = tl.load(prior_log_ptr + token * HEADS + head, mask=live, other=0.0) * LOG2E
        total = tl.full([TILE_M], 1.0, tl.float32)
        acc = tl.load(prior_ptr + out_at, mask=out_mask, other=0.0).to(tl.float32)
    else:
        peak = tl.full([TILE_M], float("-inf"), tl.float32)
        total = tl.zeros([TILE_M], tl.float32)
        acc = tl.zeros([TILE_M, PAD_VALUE], tl.float32)

    kv_head = program * PACK // (HEADS // KV_HEADS)
    masses_at = mass_ptr
    if MASSES:
        masses_at = mass_ptr + (here.to(tl.int64) * TILE_M + member) * entries
    masked_from = begin
    if not (WINDOWED or POSITIONED):
        masked_from += tl.maximum(tl.minimum(unmasked, end) - begin, 0) // TILE_N * TILE_N
        acc, peak, total = _read(
            query, acc, peak, total, begin, masked_from, limit, query_slot, query_position, key_ptr,
            value_ptr, kv_head, table_ptr, list_ptr, positions_ptr, positions_at, inner, softcap, scale,
            window, masses_at, entries, False, MASSES, IN_ONE_PIECE, LISTED, POSITIONED, WINDOWED,
            SOFTCAP, KV_HEADS, KEY_DIM, VALUE_DIM, PAD_KEY, PAD_VALUE, BLOCK_SIZE, LIST_BLOCK, TILE_N,
            GRAIN, PRECISION,
        )  # fmt: skip
    acc, peak, total = _read(
        query, acc, peak, total, masked_from, end, limit, query_slot, query_position, key_ptr,
        value_ptr, kv_head, table_ptr, list_ptr, positions_ptr, positions_at, inner, softcap, scale,
        window, masses_at, entries, True, MASSES, IN_ONE_PIECE, LISTED, POSITIONED, WINDOWED,
        SOFTCAP, KV_HEADS, KEY_DIM, VALUE_DIM, PAD_KEY, PAD_VALUE, BLOCK_SIZE, LIST_BLOCK, TILE_N,
        GRAIN, PRECISION,
    )  # fmt: skip

    if SINKS and not SPLIT:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * LOG2E
        higher = tl.maximum(peak, sink)
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.exp2(sink - higher)
        acc = acc * shrink[:, None]
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if SPLIT:
        tl.store(log_ptr + place + member, peak + tl.log2(total), mask=live)
        out_at = (place + member)[:, None] * VALUE_DIM + value_dim[None, :]
    tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["splits", "programs"])
def merge_kernel(
    part_ptr,  # [tiles, programs, splits, TILE_Q * PACK, value_dim] float32
    log_ptr,  # [tiles, programs, splits, TILE_Q * PACK] float32
    out_ptr,  # [tokens, heads, value_dim]
    sinks_ptr,
    rows_ptr,
    tiles_ptr,
    splits,
    programs,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    PACK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAD_VALUE: tl.constexpr,
    PAD_SPLITS: tl.constexpr,
    TILE_Q: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Merge the splits of one query head of one token by their softmax denominators, and its sink."""
    rows: tl.constexpr = TILE_Q * PACK
    member = tl.program_id(0) % rows
    program = tl.program_id(0) // rows
    tile = tl.program_id(1)
    row = tl.load(tiles_ptr + 2 * tile)
    local = tl.load(tiles_ptr + 2 * tile + 1) + member // PACK
    queries = tl.load(rows_ptr + 4 * row + 2)
    token = tl.load(rows_ptr + 4 * row) + local
    await_inputs(OVERLAP)
    if local >= queries:
        return
    head = program * PACK + member % PACK
    split = tl.arange(0, PAD_SPLITS)
    value_dim = tl.arange(0, PAD_VALUE)
    place = ((tile * programs + program) * splits + split).to(tl.int64) * rows + member
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
        part_ptr + place[:, None] * VALUE_DIM + value_dim[None, :],
        mask=(log != float("-inf"))[:, None] & (value_dim < VALUE_DIM)[None, :],
        other=0.0,
    )
    out = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    out_at = (token.to(tl.int64) * HEADS + head) * VALUE_DIM + value_dim
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=value_dim < VALUE_DIM)
