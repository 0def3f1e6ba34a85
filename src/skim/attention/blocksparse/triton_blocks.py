"""Block-sparse prefill on CUDA: each query block reads the key blocks whose mean keys score high.

Works on one row of a step whose keys are all in the pool: a whole prompt, or a chunk after a prefix. Tokens
must be in order. `blocksparse/plain.py` is the same in plain torch.
"""

from __future__ import annotations

import torch
import triton

from skim.attention.blocksparse.policy import BLOCK, Policy
from skim.attention.blocksparse.triton_kernels import choose_kernel, means_kernel, score_kernel
from skim.attention.cuda.launch import LOG2E, BlockList, Config, attend_tiles
from skim.attention.cuda.layout import Source
from skim.attention.cuda.metadata import CudaMetadata
from skim.attention.step import AttentionCall
from skim.memory.store import LayerShape


def choose(
    metadata: CudaMetadata,
    source: Source,
    index: int,
    query: torch.Tensor,  # [tokens, heads, dim]
    scale: float,
    policy: Policy,
    *,
    prompt: int,
) -> BlockList:
    """The blocks that row `index` reads, for every query head; `prompt` is the whole prompt's slots."""
    row = metadata.rows[index]
    means = block_means(metadata, source, index)
    scores = block_scores(metadata, index, query, means, scale, policy.sample)
    query_blocks, heads, blocks = scores.shape
    lists = torch.empty(scores.shape, dtype=torch.int32, device=scores.device)
    counts = lists.new_empty(query_blocks, heads)
    choose_kernel[(heads, query_blocks)](
        scores,
        lists,
        counts,
        metadata.tables.groups[0].rows,
        index,
        blocks,
        policy.alpha,
        policy.dense_from(row.context, row.queries, prompt),
        SINKS=policy.sinks,
        RECENT=policy.recent,
        BLOCK=BLOCK,
        PAD_BLOCKS=triton.next_power_of_2(blocks),
    )
    return BlockList(lists, counts, BLOCK)


def block_means(metadata: CudaMetadata, source: Source, index: int) -> torch.Tensor:
    """The mean key of each block of a row. [kv_heads, blocks, dim]"""
    _, heads, dim = source.keys.shape
    blocks = -(-metadata.rows[index].length // BLOCK)
    means = source.keys.new_empty(heads, blocks, dim)
    means_kernel[(heads, blocks)](
        source.keys,
        means,
        metadata.tables.groups[source.group].rows,
        source.blocks,
        index,
        blocks,
        KV_HEADS=heads,
        DIM=dim,
        PAD=triton.next_power_of_2(dim),
        BLOCK=BLOCK,
        BLOCK_SIZE=source.block_size,
    )
    return means


def block_scores(
    metadata: CudaMetadata,
    index: int,
    query: torch.Tensor,
    means: torch.Tensor,
    scale: float,
    sample: int = 1,
) -> torch.Tensor:
    """Score every key block for every query block; scores of later blocks are undefined.

    [query_blocks, heads, blocks] float32
    """
    heads, dim = query.shape[1:]
    kv_heads, blocks, _ = means.shape
    query_blocks = -(-metadata.rows[index].queries // BLOCK)
    if query.stride(2) != 1:
        query = query.contiguous()
    scores = torch.empty(query_blocks, heads, blocks, dtype=torch.float32, device=query.device)
    full = query.dtype == torch.float32
    score_kernel[(heads, query_blocks)](
        query,
        means,
        scores,
        metadata.tables.groups[0].rows,
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
    """True if the device's copy engine can fetch tiles of keys: Hopper and later, no padded heads."""
    whole = all(dim >= 16 and dim & (dim - 1) == 0 for dim in (shape.key_dim, shape.value_dim))
    return whole and (device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0))


def sparse_config(shape: LayerShape, dtype: torch.dtype, in_one_piece: bool) -> Config:
    wide = max(shape.key_dim, shape.value_dim) > 128
    if dtype == torch.float32:
        return Config(BLOCK, 16 if wide else 32, 8, 1)
    return Config(BLOCK, 64 if wide else 128, 8, 2 if wide or in_one_piece else 3)


def attend_sparse(
    out: torch.Tensor,  # [tokens, heads, value_dim]; the tokens of row `index` are written
    query: torch.Tensor,  # [tokens, heads, key_dim]
    metadata: CudaMetadata,
    source: Source,
    index: int,
    call: AttentionCall,
    chosen: BlockList,  # [query_blocks, heads, ...]
) -> None:
    """Attend one row's query blocks over the key blocks chosen for each query block and query head.

    If tiles can be fetched whole, scattered blocks are first copied together: the copy takes 1% of the time
    and saves 10%.
    """
    shape = source.shape
    in_one_piece = fetches_tiles(shape, query.device)
    if in_one_piece:
        keys, values = metadata.prefix(source, index, metadata.rows[index].length)
        source = Source(keys, values, source.blocks, source.block_size)
    attend_tiles(
        out,
        query,
        source,
        call,
        metadata.tables.groups[source.group],
        metadata.tiles([index], BLOCK),
        sparse_config(shape, query.dtype, in_one_piece),
        pack=1,
        listed=chosen,
        in_one_piece=in_one_piece,
    )
