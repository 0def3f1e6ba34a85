"""Block-sparse prefill: each block of queries reads the blocks of keys that its block means speak for.

Works on one row of a step, whose keys are all in the pool already: a whole prompt, or a chunk after a prefix.
Tokens must be in order. `blocksparse` has the same in plain torch.
"""

from __future__ import annotations

import torch
import triton

from skim.attention.blocksparse.policy import BLOCK, Policy
from skim.attention.blocksparse.triton_kernels import choose_kernel, means_kernel, score_kernel
from skim.attention.cuda.launch import LOG2E, BlockList, Config, attend_tiles
from skim.attention.cuda.metadata import Plan
from skim.attention.step import AttentionCall
from skim.memory.pool import LayerShape


def choose(
    plan: Plan,
    layer: int,
    index: int,
    query: torch.Tensor,  # [tokens, heads, dim]
    scale: float,
    policy: Policy,
    *,
    prompt: int,
) -> BlockList:
    """The blocks that row `index` reads, for every query head; `prompt` counts the whole prompt's slots."""
    row = plan.step.rows[index]
    means = block_means(plan, layer, index)
    scores = block_scores(plan, index, query, means, scale, policy.sample)
    query_blocks, heads, blocks = scores.shape
    lists = torch.empty(scores.shape, dtype=torch.int32, device=scores.device)
    counts = lists.new_empty(query_blocks, heads)
    choose_kernel[(heads, query_blocks)](
        scores,
        lists,
        counts,
        plan.tables.rows,
        index,
        blocks,
        policy.alpha,
        policy.dense_from(row.context, row.queries, prompt),
        SINKS=policy.sinks,
        WINDOW=policy.window,
        BLOCK=BLOCK,
        PAD_BLOCKS=triton.next_power_of_2(blocks),
    )
    return BlockList(lists, counts, BLOCK)


def block_means(plan: Plan, layer: int, index: int) -> torch.Tensor:
    """The mean key of each block of a row. [kv_heads, blocks, dim]"""
    key_slots = plan.step.pool.slabs[0].key_slots[layer]
    _, heads, dim = key_slots.shape
    blocks = -(-plan.step.rows[index].length // BLOCK)
    means = key_slots.new_empty(heads, blocks, dim)
    means_kernel[(heads, blocks)](
        key_slots,
        means,
        plan.tables.rows,
        plan.tables.blocks,
        index,
        blocks,
        KV_HEADS=heads,
        DIM=dim,
        PAD=triton.next_power_of_2(dim),
        BLOCK=BLOCK,
        BLOCK_SIZE=plan.step.pool.block_size,
    )
    return means


def block_scores(
    plan: Plan, index: int, query: torch.Tensor, means: torch.Tensor, scale: float, sample: int = 1
) -> torch.Tensor:
    """How much each block of queries wants each block of keys; what it cannot see has no meaning.

    [query_blocks, heads, blocks] float32
    """
    heads, dim = query.shape[1:]
    kv_heads, blocks, _ = means.shape
    query_blocks = -(-plan.step.rows[index].queries // BLOCK)
    if query.stride(2) != 1:
        query = query.contiguous()
    scores = torch.empty(query_blocks, heads, blocks, dtype=torch.float32, device=query.device)
    full = query.dtype == torch.float32
    score_kernel[(heads, query_blocks)](
        query,
        means,
        scores,
        plan.tables.rows,
        index,
        blocks,
        query.stride(0),
        query.stride(1),
        scale * LOG2E,
        GROUP=heads // kv_heads,
        DIM=dim,
        PAD=max(16, triton.next_power_of_2(dim)),
        BLOCK=BLOCK,
        SAMPLE=sample,
        TILE=32 if full else 64,
        PRECISION="ieee" if full else "tf32",
        num_warps=4 if sample > 1 or full else 8,
        num_stages=1 if full else 3,
    )
    return scores


def fetches_tiles(shape: LayerShape, device: torch.device) -> bool:
    """Whether the device's copy engine can fetch tiles of keys: Hopper and later, no padded heads."""
    whole = all(dim >= 16 and dim & (dim - 1) == 0 for dim in (shape.key_dim, shape.value_dim))
    return whole and (device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0))


def sparse_config(shape: LayerShape, dtype: torch.dtype, in_one_piece: bool) -> Config:
    wide = max(shape.key_dim, shape.value_dim) > 128
    if dtype == torch.float32:
        return Config(BLOCK, 16 if wide else 32, 8, 1)
    return Config(BLOCK, 64 if wide else 128, 8, 2 if wide or in_one_piece else 3)


def attend_sparse(
    out: torch.Tensor,  # [tokens, heads, value_dim], written where row `index` has its tokens
    query: torch.Tensor,  # [tokens, heads, key_dim]
    plan: Plan,
    layer: int,
    index: int,
    call: AttentionCall,
    chosen: BlockList,  # [query_blocks, heads, ...]
) -> None:
    """Attention of one row's query blocks over the blocks chosen for each of them and each query head.

    Where tiles can be fetched whole, a row whose blocks are scattered is copied together first: that takes a
    hundredth of the time, and saves a tenth.
    """
    pool = plan.step.pool
    shape = pool.layers[layer]
    in_one_piece = fetches_tiles(shape, query.device)
    if in_one_piece:
        keys, values = plan.prefix(layer, index, plan.step.rows[index].length)
    else:
        keys, values = pool.slabs[0].key_slots[layer], pool.slabs[0].value_slots[layer]
    attend_tiles(
        out,
        query,
        keys,
        values,
        call,
        plan.tables,
        plan.tiles([index], BLOCK),
        pool.block_size,
        sparse_config(shape, query.dtype, in_one_piece),
        pack=1,
        chosen=chosen,
        in_one_piece=in_one_piece,
    )
