"""Kernels of slow-fast decode: the choice of blocks for fast rows, and the evidence that slow rows leave.

One launch chooses the blocks of a layer. Its programs share the summaries of a KV head; the last one of them
to end lists the blocks (`glance_select.py`). `attention/glance.py` is the plain twin.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

import triton
import triton.language as tl

from skim.attention.cuda.glance_select import evidence_of, list_blocks
from skim.attention.cuda.write import write_head

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["layer", "heads", "splits", "columns", "column"])
def choose_kernel(
    query_ptr,  # [tokens, heads, key_dim] by strides, in the store's basis
    mean_ptr,  # [blocks, kv_heads, key_dim]
    variance_ptr,
    score_ptr,  # [tiles, kv_heads, GROUP + 1, WIDTH] float32; the last of each KV head is for `list_blocks`
    part_ptr,  # [tiles, kv_heads, 2, GROUP, splits] float32: peaks, and sums of 2 ** (score - peak)
    list_ptr,  # [tiles, kv_heads, WIDTH] int32: blocks of the pool
    mass_ptr,  # [rows, columns] float32
    ended_ptr,  # [tiles, kv_heads] int32: programs that have ended; zeros before and after the launch
    rows_ptr,  # [rows, 4]: first token, context, queries, first entry of `blocks_ptr`
    tiles_ptr,  # [tiles, 2]: row, first query
    blocks_ptr,  # concatenated block tables
    picks_ptr,  # [rows, 4]: blocks chosen by rank, first blocks, first of the last blocks, slots to read
    evidence_ptr,  # [rows, 4]: address (two entries) and blocks of the row's evidence, 0 for none
    key_ptr,  # with WRITES: of the new tokens, [tokens, kv_heads, key_dim] by strides
    value_ptr,  # [tokens, kv_heads, value_dim] by strides
    key_pool_ptr,  # [slots, kv_heads, key_dim]
    value_pool_ptr,  # [slots, kv_heads, value_dim]
    slots_ptr,  # [tokens]
    query_token,
    query_head,
    key_token,
    key_head,
    value_token,
    value_head,
    layer,  # of those with summaries
    heads,  # of the evidence
    splits,
    columns,
    column,  # of the first KV head
    scale,
    WRITES: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAD_KEY: tl.constexpr,
    PAD_VALUE: tl.constexpr,
    MEMBERS: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    PACK: tl.constexpr,
    PAD_SPLITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WRITE_TILE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Score every `splits`-th tile of full blocks for the query heads of one KV head of one row.

    With WRITES, the first programs write the new tokens, of slow rows too. The block of a new token is not
    scored, so no program reads what another one writes, but for the scores.
    """
    kv_head = tl.program_id(0)  # concurrent programs read neighbouring memory
    tile = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(tiles_ptr + 2 * tile)
    first = tl.load(rows_ptr + 4 * row)
    context = tl.load(rows_ptr + 4 * row + 1)
    queries = tl.load(rows_ptr + 4 * row + 2)
    table_ptr = blocks_ptr + tl.load(rows_ptr + 4 * row + 3)
    slots = tl.load(picks_ptr + 4 * row + 3)
    if tl.load(tiles_ptr + 2 * tile + 1) >= queries:
        return  # padding
    token = first.to(tl.int64)
    if WRITES:
        if split == 0:
            write_head(
                key_ptr + token * key_token + kv_head * key_head,
                value_ptr + token * value_token + kv_head * value_head,
                key_pool_ptr, value_pool_ptr, mean_ptr, variance_ptr,
                tl.load(slots_ptr + token).to(tl.int64), kv_head, KV_HEADS, KEY_DIM, VALUE_DIM, PAD_KEY,
                PAD_VALUE, BLOCK_SIZE, WRITE_TILE,
            )  # fmt: skip
            return
        split -= 1
    mass_ptr += row * columns + column + kv_head
    if slots == 0:  # a slow row
        tl.store(mass_ptr, 1.0)
        return
    full = context // BLOCK_SIZE

    member = tl.arange(0, MEMBERS)
    live = member < GROUP
    dim = tl.arange(0, PAD_KEY)
    inside = dim < KEY_DIM
    head = kv_head * GROUP + member
    query = tl.load(
        query_ptr + token * query_token + head[:, None] * query_head + dim[None, :],
        mask=live[:, None] & inside[None, :],
        other=0.0,
    )
    scaled = query.to(tl.float32) * scale
    squares = (scaled * scaled * (0.5 * LOG2E)).to(DOT)
    query = query.to(DOT)

    here = (tile * KV_HEADS + kv_head).to(tl.int64)
    score_ptr += here * ((GROUP + 1) * WIDTH)
    part_ptr += here * (2 * GROUP * splits)
    peak = tl.full([MEMBERS], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    for start in range(split * TILE, full, splits * TILE):
        block = start + tl.arange(0, TILE)
        known = block < full
        page = tl.load(table_ptr + block, mask=known, other=0).to(tl.int64)
        at = (page * KV_HEADS + kv_head)[:, None] * KEY_DIM + dim[None, :]
        mask = known[:, None] & inside[None, :]
        mean = tl.load(mean_ptr + at, mask=mask, other=0.0).to(DOT)
        variance = tl.load(variance_ptr + at, mask=mask, other=0.0).to(DOT)
        score = tl.dot(query, tl.trans(mean), input_precision=PRECISION) * (scale * LOG2E)
        score = tl.dot(squares, tl.trans(variance), score, input_precision=PRECISION)
        scores_at = score_ptr + member[:, None] * WIDTH + block[None, :]
        tl.store(scores_at, score, mask=live[:, None] & known[None, :])
        finite = (score - score == 0.0) & known[None, :]
        score = tl.where(finite, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(peak - base) + tl.sum(tl.exp2(score - base[:, None]), 1)
        peak = higher
    parts_at = part_ptr + member * splits + split
    tl.store(parts_at, peak, mask=live)
    tl.store(parts_at + GROUP * splits, total, mask=live)

    tl.debug_barrier()  # all threads have stored before one counts the program
    if tl.atomic_add(ended_ptr + here, 1, sem="acq_rel") == splits - 1:
        own_ptr, room = evidence_of(evidence_ptr, row)
        list_blocks(
            score_ptr, part_ptr, list_ptr + here * WIDTH, mass_ptr, table_ptr, picks_ptr + 4 * row,
            own_ptr + (layer * heads + kv_head) * room, room, context, splits, GROUP, WIDTH, PIECE, PACK,
            PAD_SPLITS, BLOCK_SIZE,
        )  # fmt: skip
        tl.store(ended_ptr + here, 0)


@triton.jit(do_not_specialize=["layer", "heads", "entries"])
def renew_kernel(
    mass_ptr,  # [tiles, kv_heads, PACK, entries] float32: logs of the mass in GRAIN keys each
    rows_ptr,
    tiles_ptr,
    picks_ptr,
    evidence_ptr,
    layer,
    heads,
    entries,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PACK: tl.constexpr,
    GRAIN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Renew the evidence of one KV head of a slow row, by the mass that its keys have in this step."""
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.load(tiles_ptr + 2 * tile)
    own_ptr, room = evidence_of(evidence_ptr, row)
    chosen = tl.load(picks_ptr + 4 * row + 3)
    padding = tl.load(tiles_ptr + 2 * tile + 1) >= tl.load(rows_ptr + 4 * row + 2)
    if padding | (chosen > 0) | (room == 0):
        return
    length = tl.load(rows_ptr + 4 * row + 1) + 1
    member = tl.arange(0, PACK)
    live = (member < GROUP)[:, None]
    masses_at = mass_ptr + ((tile * KV_HEADS + kv_head).to(tl.int64) * PACK + member[:, None]) * entries
    peak = tl.full([PACK], float("-inf"), tl.float32)
    total = tl.zeros([PACK], tl.float32)
    for start in range(0, length, PIECE * GRAIN):
        entry = start // GRAIN + tl.arange(0, PIECE)
        mask = live & (entry * GRAIN < length)[None, :]
        log = tl.load(masses_at + entry[None, :], mask=mask, other=float("-inf"))
        higher = tl.maximum(peak, tl.max(log, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(peak - base) + tl.sum(tl.exp2(log - base[:, None]), 1)
        peak = higher
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.where(total == 0.0, 1.0, total)
    RATIO: tl.constexpr = BLOCK_SIZE // GRAIN
    own_ptr += (layer * heads + kv_head) * room
    for start in range(0, length, PIECE * GRAIN):
        entry = start // GRAIN + tl.arange(0, PIECE)
        mask = live & (entry * GRAIN < length)[None, :]
        log = tl.load(masses_at + entry[None, :], mask=mask, other=float("-inf"))
        share = tl.sum(tl.exp2(log - peak[:, None]) / total[:, None], 0) / GROUP
        share = tl.sum(tl.reshape(share, [PIECE // RATIO, RATIO]), 1)
        block = start // BLOCK_SIZE + tl.arange(0, PIECE // RATIO)
        full = (block < length // BLOCK_SIZE) & (block < room)
        tl.store(own_ptr + block, share, mask=full)
