"""Kernels that choose the blocks of fast decode rows: scores of block summaries, then lists of blocks.

`attention/glance.py` is the plain twin. Scores are estimated logs of attention mass, to the base 2. A block
whose summary is not finite ranks before all others: its keys are then read, and the row's result shows it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

import triton
import triton.language as tl

from skim.attention.glance import KEPT, WEIGHT
from skim.attention.triton_overlap import await_inputs

TRUST = tl.constexpr(WEIGHT)
STAYS = tl.constexpr(KEPT)
LOG2E = tl.constexpr(1.4426950408889634)
BEYOND = tl.constexpr(0x7F800001)  # above the bits of every share
BROKEN = tl.constexpr(2 * (1 + WEIGHT))  # of a block whose score is not finite: above all other ranks
COUNT_BITS = tl.constexpr(21)  # of a number of blocks
COUNT_MASK = tl.constexpr(2**21 - 1)


@triton.jit(do_not_specialize=["splits"])
def score_kernel(
    query_ptr,  # [tokens, heads, key_dim] by strides, in the store's basis
    mean_ptr,  # [blocks, kv_heads, key_dim]
    variance_ptr,
    score_ptr,  # [tiles, kv_heads, GROUP + 1, WIDTH] float32; the last of each KV head is for `select_kernel`
    part_ptr,  # [tiles, kv_heads, 2, GROUP, splits] float32: peaks, and sums of 2 ** (score - peak)
    rows_ptr,  # [rows, 4]: first token, context, queries, first entry of `blocks_ptr`
    tiles_ptr,  # [tiles, 2]: row, first query
    blocks_ptr,  # concatenated block tables
    picks_ptr,  # [rows, 4]: blocks chosen by rank, first blocks, first of the last blocks, slots to read
    query_token,
    query_head,
    splits,
    scale,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PAD_KEY: tl.constexpr,
    PACK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Score every `splits`-th tile of full blocks for the query heads of one KV head of one row."""
    kv_head = tl.program_id(0)  # concurrent programs read neighbouring memory
    tile = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(tiles_ptr + 2 * tile)
    slots = tl.load(picks_ptr + 4 * row + 3)
    padding = tl.load(tiles_ptr + 2 * tile + 1) >= tl.load(rows_ptr + 4 * row + 2)
    token = tl.load(rows_ptr + 4 * row).to(tl.int64)
    full = (tl.load(rows_ptr + 4 * row + 1) + 1) // BLOCK_SIZE
    table_ptr = blocks_ptr + tl.load(rows_ptr + 4 * row + 3)
    await_inputs(OVERLAP)
    if (slots == 0) | padding:
        return

    member = tl.arange(0, PACK)
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
    scores_at = score_ptr + here * ((GROUP + 1) * WIDTH) + member[:, None] * WIDTH
    peak = tl.full([PACK], float("-inf"), tl.float32)
    total = tl.zeros([PACK], tl.float32)
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
        tl.store(scores_at + block[None, :], score, mask=live[:, None] & known[None, :])
        finite = (score - score == 0.0) & known[None, :]
        score = tl.where(finite, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(peak - base) + tl.sum(tl.exp2(score - base[:, None]), 1)
        peak = higher
    parts_at = part_ptr + here * (2 * GROUP * splits) + member * splits + split
    tl.store(parts_at, peak, mask=live)
    tl.store(parts_at + GROUP * splits, total, mask=live)


@triton.jit
def evidence_of(evidence_ptr, row):
    """A row's evidence, and its blocks: 0 if the row has none."""
    low = tl.load(evidence_ptr + 4 * row).to(tl.int64) & 0xFFFFFFFF
    address = low | (tl.load(evidence_ptr + 4 * row + 1).to(tl.int64) << 32)
    return address.to(tl.pointer_type(tl.float32)), tl.load(evidence_ptr + 4 * row + 2)


@triton.jit
def _shares(
    score_ptr,
    start,
    full,
    peak,  # [PACK] of each query head, over all blocks
    total,  # [PACK]
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    PACK: tl.constexpr,
):
    """The shares of some blocks: mean over the query heads, zeros after the last full block. [PIECE]"""
    block = start + tl.arange(0, PIECE)
    member = tl.arange(0, PACK)
    live = (member < GROUP)[:, None]
    mask = live & (block < full)[None, :]
    # Entries after the last full block are undefined. They are loaded nevertheless, for wide loads.
    score = tl.load(score_ptr + member[:, None] * WIDTH + block[None, :], mask=live, other=0.0)
    share = tl.exp2(score - peak[:, None]) / total[:, None]
    share = tl.where(score - score == 0.0, share, BROKEN * GROUP)
    return tl.sum(tl.where(mask, share, 0.0), 0) / GROUP


@triton.jit
def _threshold(bits, wanted, others):
    """Find the `wanted` highest of some numbers by their bits, of which `others` are not negative.

    Returns a number with two counts: of the bits that reach it, and of those above it. The first is `wanted`
    unless several bits are equal to the number. Each turn tests three numbers, in one sum of packed counts.
    """
    low = tl.where(wanted == 0, BEYOND, 0)
    high = BEYOND + wanted * 0
    reached = tl.where(wanted == 0, 0, others)
    above = wanted * 0
    while (reached != wanted) & (high - low > 1):
        step = tl.maximum((high - low) // 4, 1)
        first = low + step
        second = first + step
        third = second + step
        packed = (
            (bits >= first).to(tl.int64)
            + ((bits >= second).to(tl.int64) << COUNT_BITS)
            + ((bits >= third).to(tl.int64) << (2 * COUNT_BITS))
        )
        counts = tl.sum(packed, 0)
        of_first = (counts & COUNT_MASK).to(tl.int32)
        of_second = ((counts >> COUNT_BITS) & COUNT_MASK).to(tl.int32)
        of_third = (counts >> (2 * COUNT_BITS)).to(tl.int32)
        one, two, three = of_first >= wanted, of_second >= wanted, of_third >= wanted
        above = tl.where(three, above, tl.where(two, of_third, tl.where(one, of_second, of_first)))
        reached = tl.where(three, of_third, tl.where(two, of_second, tl.where(one, of_first, reached)))
        next_high = tl.where(three, high, tl.where(two, third, tl.where(one, second, first)))
        low = tl.where(three, third, tl.where(two, second, tl.where(one, first, low)))
        high = tl.minimum(high, next_high)
    return low, reached, above


@triton.jit(do_not_specialize=["layer", "heads", "splits", "columns", "column"])
def select_kernel(
    score_ptr,  # [tiles, kv_heads, GROUP + 1, WIDTH] float32
    part_ptr,  # [tiles, kv_heads, 2, GROUP, splits] float32
    list_ptr,  # [tiles, kv_heads, WIDTH] int32: blocks of the pool
    mass_ptr,  # [rows, columns] float32
    rows_ptr,
    tiles_ptr,
    blocks_ptr,
    picks_ptr,
    evidence_ptr,  # [rows, 4]: address (two entries) and blocks of the row's evidence, 0 for none
    layer,  # of those with summaries
    heads,  # of the evidence
    splits,
    columns,
    column,  # of the first KV head
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    PACK: tl.constexpr,
    PAD_SPLITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NEAR: tl.constexpr,  # blocks on either side whose evidence counts for a block
    OVERLAP: tl.constexpr,
):
    """List the blocks that one KV head of one row reads, ascending, and the mass that they hold."""
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.load(tiles_ptr + 2 * tile)
    slots = tl.load(picks_ptr + 4 * row + 3)
    padding = tl.load(tiles_ptr + 2 * tile + 1) >= tl.load(rows_ptr + 4 * row + 2)
    wanted = tl.load(picks_ptr + 4 * row)
    sinks = tl.load(picks_ptr + 4 * row + 1)
    recent = tl.load(picks_ptr + 4 * row + 2)
    length = tl.load(rows_ptr + 4 * row + 1) + 1
    full = length // BLOCK_SIZE
    table_ptr = blocks_ptr + tl.load(rows_ptr + 4 * row + 3)
    block = tl.arange(0, WIDTH)
    between = (block >= sinks) & (block < recent)
    own_ptr, room = evidence_of(evidence_ptr, row)
    own_ptr += (layer * heads + kv_head) * room
    known_blocks = tl.minimum(full, room)
    known = tl.load(own_ptr + block, mask=between & (block < known_blocks), other=0.0)
    for away in tl.static_range(1, NEAR + 1):
        before = tl.load(
            own_ptr + block - away, mask=between & (block >= away) & (block - away < room), other=0.0
        )
        after = tl.load(own_ptr + block + away, mask=between & (block + away < known_blocks), other=0.0)
        known = tl.maximum(known, tl.maximum(before, after))
    pages = tl.load(table_ptr + block, mask=block * BLOCK_SIZE < length, other=0)
    await_inputs(OVERLAP)
    if padding:
        return
    mass_ptr += row * columns + column + kv_head
    if slots == 0:
        tl.store(mass_ptr, 1.0)
        return
    here = (tile * KV_HEADS + kv_head).to(tl.int64)
    score_ptr += here * ((GROUP + 1) * WIDTH)

    member = tl.arange(0, PACK)
    split = tl.arange(0, PAD_SPLITS)
    mask = (member < GROUP)[:, None] & (split < splits)[None, :]
    parts_at = part_ptr + here * (2 * GROUP * splits) + member[:, None] * splits + split[None, :]
    peaks = tl.load(parts_at, mask=mask, other=float("-inf"))
    sums = tl.load(parts_at + GROUP * splits, mask=mask, other=0.0)
    peak = tl.max(peaks, 1)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(sums * tl.exp2(peaks - peak[:, None]), 1)
    total = tl.where(total == 0.0, 1.0, total)

    if PIECE == WIDTH:
        share = _shares(score_ptr, 0, full, peak, total, GROUP, WIDTH, PIECE, PACK)
    else:
        shares_ptr = score_ptr + GROUP * WIDTH
        for start in range(0, full, PIECE):
            piece = _shares(score_ptr, start, full, peak, total, GROUP, WIDTH, PIECE, PACK)
            tl.store(shares_ptr + start + tl.arange(0, PIECE), piece)
        tl.debug_barrier()
        share = tl.load(shares_ptr + block, mask=block < full, other=0.0)
    rank = share + TRUST * known
    rank = tl.where(rank - rank == 0.0, rank, BROKEN)
    bits = tl.where(between, rank.to(tl.int32, bitcast=True), -1)
    least, reached, above = _threshold(bits, wanted, recent - sinks)
    kept = bits >= least
    if reached != wanted:  # of equal shares the first count
        equal = bits == least
        kept = (bits > least) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= wanted - above))
    kept = kept & between
    kept = kept | (block < sinks) | ((block >= recent) & (block * BLOCK_SIZE < length))
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(list_ptr + here * WIDTH + place, pages, mask=kept)
    mass = tl.sum(tl.where(kept, share, 0.0), 0)
    broken = tl.max(share, 0) >= BROKEN
    tl.store(mass_ptr, tl.where(broken, float("nan"), mass))


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
    OVERLAP: tl.constexpr,
):
    """Renew the evidence of one KV head of a slow row, by the mass that its keys have in this step."""
    await_inputs(OVERLAP)
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
        known = tl.load(own_ptr + block, mask=full, other=0.0)
        tl.store(own_ptr + block, tl.maximum(STAYS * known, share), mask=full)
