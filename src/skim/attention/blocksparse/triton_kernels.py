"""Kernels that select the key blocks of each query block: block means, scores, lists."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["row", "blocks"])
def means_kernel(
    key_ptr,  # [slots, kv_heads, dim]
    means_ptr,  # [kv_heads, blocks, dim]
    rows_ptr,
    blocks_ptr,
    row,
    blocks,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """The mean key of one block and head, over its written slots."""
    head = tl.program_id(0)
    block = tl.program_id(1)
    length = tl.load(rows_ptr + 4 * row + 1) + tl.load(rows_ptr + 4 * row + 2)
    table_ptr = blocks_ptr + tl.load(rows_ptr + 4 * row + 3)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, PAD)
    page = tl.load(table_ptr + slot // BLOCK_SIZE, mask=slot < length, other=0).to(tl.int64)
    place = (page * BLOCK_SIZE + slot % BLOCK_SIZE) * KV_HEADS + head
    key = tl.load(
        key_ptr + place[:, None] * DIM + dim[None, :],
        mask=(slot < length)[:, None] & (dim < DIM)[None, :],
        other=0.0,
    ).to(tl.float32)
    mean = tl.sum(key, 0) / (tl.minimum(length - block * BLOCK, BLOCK)).to(tl.float32)
    at = means_ptr + (head * blocks + block) * DIM + dim
    tl.store(at, mean.to(means_ptr.dtype.element_ty), mask=dim < DIM)


@triton.jit
def _score(query, means_ptr, block, visible, slot, live, scale, DIM: tl.constexpr, PAD: tl.constexpr,
           BLOCK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Score queries against block means; a query sees a block if it sees its first slot. [queries, blocks]"""
    dim = tl.arange(0, PAD)
    mean = tl.load(
        means_ptr + block[:, None] * DIM + dim[None, :],
        mask=(block < visible)[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    score = tl.dot(query, tl.trans(mean), input_precision=PRECISION) * scale
    seen = (block[None, :] * BLOCK <= slot[:, None]) & (block < visible)[None, :] & live[:, None]
    return tl.where(seen, score, float("-inf"))


@triton.jit(do_not_specialize=["row", "blocks"])
def score_kernel(
    query_ptr,  # [tokens, heads, dim] by strides
    means_ptr,  # [kv_heads, blocks, dim]
    scores_ptr,  # [query_blocks, heads, blocks] float32
    rows_ptr,
    row,
    blocks,
    query_token,
    query_head,
    scale,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SAMPLE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Score every key block for one query block.

    Each query's scores are relative to its maximum over *all* blocks. A maximum per block would measure how
    flat a block is, not how much it matters.
    """
    head = tl.program_id(0)
    query_block = tl.num_programs(1) - 1 - tl.program_id(1)
    first_token = tl.load(rows_ptr + 4 * row)
    context = tl.load(rows_ptr + 4 * row + 1)
    queries = tl.load(rows_ptr + 4 * row + 2)
    local = query_block * BLOCK + tl.arange(0, BLOCK // SAMPLE) * SAMPLE
    live = local < queries
    slot = context + local
    dim = tl.arange(0, PAD)
    query = tl.load(
        query_ptr
        + (first_token + local).to(tl.int64)[:, None] * query_token
        + head * query_head
        + dim[None, :],
        mask=live[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    visible = (context + tl.minimum((query_block + 1) * BLOCK, queries) - 1) // BLOCK + 1
    means_ptr += (head // GROUP) * blocks * DIM
    peak = tl.full([BLOCK // SAMPLE], float("-inf"), tl.float32)
    for start in range(0, visible, TILE):
        block = start + tl.arange(0, TILE)
        score = _score(query, means_ptr, block, visible, slot, live, scale, DIM, PAD, BLOCK, PRECISION)
        peak = tl.maximum(peak, tl.max(score, 1))
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    scores_ptr += (query_block * tl.num_programs(0) + head).to(tl.int64) * blocks
    for start in range(0, visible, TILE):
        block = start + tl.arange(0, TILE)
        score = _score(query, means_ptr, block, visible, slot, live, scale, DIM, PAD, BLOCK, PRECISION)
        wanted = tl.sum(tl.exp2(score - peak[:, None]), 0)
        tl.store(scores_ptr + block, wanted, mask=block < visible)


@triton.jit(do_not_specialize=["row", "blocks", "dense_from"])
def choose_kernel(
    scores_ptr,  # [query_blocks, heads, blocks] float32
    list_ptr,  # [query_blocks, heads, blocks] int32
    count_ptr,  # [query_blocks, heads] int32
    rows_ptr,
    row,
    blocks,
    alpha,
    dense_from,  # this query block and later ones read everything
    SINKS: tl.constexpr,
    RECENT: tl.constexpr,
    BLOCK: tl.constexpr,
    PAD_BLOCKS: tl.constexpr,
):
    """One query block's list: blocks that score near the best, the first blocks, and the last ones."""
    head = tl.program_id(0)
    query_block = tl.program_id(1)
    context = tl.load(rows_ptr + 4 * row + 1)
    queries = tl.load(rows_ptr + 4 * row + 2)
    last = (context + tl.minimum((query_block + 1) * BLOCK, queries) - 1) // BLOCK
    here = query_block * tl.num_programs(0) + head
    at = here.to(tl.int64) * blocks
    block = tl.arange(0, PAD_BLOCKS)
    visible = block <= last
    score = tl.load(scores_ptr + at + block, mask=visible, other=0.0)
    low = score < alpha * tl.max(score, 0)  # NaN is not low
    kept = (low == 0) | (block < SINKS) | (block > last - RECENT) | (query_block >= dense_from)
    kept = (kept & visible).to(tl.int32)
    place = tl.cumsum(kept, 0) - 1
    tl.store(list_ptr + at + place, block, mask=kept != 0)
    tl.store(count_ptr + here, tl.sum(kept, 0))
