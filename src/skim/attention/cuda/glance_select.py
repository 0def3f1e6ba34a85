"""Device functions that list the blocks of fast decode rows, given the scores of their summaries.

`attention/glance.py` is the plain twin. Scores are estimated logs of attention mass, to the base 2. A block
whose summary is not finite ranks before all others: its keys are then read, and the row's result shows it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

import triton
import triton.language as tl

from skim.attention.glance import WEIGHT

TRUST = tl.constexpr(WEIGHT)
BEYOND = tl.constexpr(0x7F800001)  # above the bits of every share
BROKEN = tl.constexpr(4.0)  # the share of a block whose score is not finite: more than all others have
COUNT_BITS = tl.constexpr(21)  # of a number of blocks
COUNT_MASK = tl.constexpr(2**21 - 1)


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
    at = score_ptr + member[:, None] * WIDTH + block[None, :]
    score = tl.load(at, mask=live, other=0.0, cache_modifier=".cg")
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


@triton.jit
def list_blocks(
    score_ptr,  # of the KV head: [GROUP + 1, WIDTH] float32; the last is room for shares
    part_ptr,  # of the KV head: [2, GROUP, splits] float32: peaks, and sums of 2 ** (score - peak)
    list_ptr,  # of the KV head: [WIDTH] int32, blocks of the pool
    mass_ptr,  # of the KV head
    table_ptr,  # of the row
    picks_ptr,  # of the row: blocks chosen by rank, first blocks, first of the last blocks, slots to read
    own_ptr,  # evidence of the KV head
    room,  # its blocks
    context,
    splits,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    PACK: tl.constexpr,
    PAD_SPLITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """List the blocks that one KV head of a fast row reads, ascending, and the mass that they hold."""
    wanted = tl.load(picks_ptr)
    sinks = tl.load(picks_ptr + 1)
    recent = tl.load(picks_ptr + 2)
    full = context // BLOCK_SIZE
    block = tl.arange(0, WIDTH)
    between = (block >= sinks) & (block < recent)
    known = tl.load(own_ptr + block, mask=between & (block < room), other=0.0)

    member = tl.arange(0, PACK)
    split = tl.arange(0, PAD_SPLITS)
    mask = (member < GROUP)[:, None] & (split < splits)[None, :]
    parts_at = part_ptr + member[:, None] * splits + split[None, :]
    peaks = tl.load(parts_at, mask=mask, other=float("-inf"), cache_modifier=".cg")
    sums = tl.load(parts_at + GROUP * splits, mask=mask, other=0.0, cache_modifier=".cg")
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
    kept = kept | (block < sinks) | ((block >= recent) & (block * BLOCK_SIZE <= context))
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    page = tl.load(table_ptr + block, mask=kept, other=0)
    tl.store(list_ptr + place, page, mask=kept)
    mass = tl.sum(tl.where(kept, share, 0.0), 0)
    broken = tl.max(share, 0) >= BROKEN
    tl.store(mass_ptr, tl.where(broken, float("nan"), mass))
