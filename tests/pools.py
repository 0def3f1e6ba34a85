"""KV pools of one layer for tests of attention."""

from __future__ import annotations

import torch

from skim.memory.pool import KVPool
from skim.memory.store import LayerShape

CPU = torch.device("cpu")


def make_pool(
    shape: LayerShape,
    block_size: int,
    blocks: int,
    slab_blocks: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    kv_format: str = "auto",
    summaries: bool = False,
) -> KVPool:
    """All blocks are allocated; slots that a test does not write hold NaN and must never be read."""
    pool = KVPool.of_blocks(
        [shape],
        blocks,
        block_size=block_size,
        dtype=dtype,
        device=device,
        slab_blocks=slab_blocks,
        kv_format=kv_format,
        summaries=summaries,
    )
    pool.allocate(blocks)
    for slab in pool.slabs:
        for tensor in slab.layers[0].blocks.values():
            tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 0)  # codes have NaN as a scale
    return pool


def random_tokens(pool: KVPool, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys and values of the pool's layer. [tokens, kv_heads, dim]"""
    [shape] = pool.layers
    sizes = ((tokens, shape.kv_heads, dim) for dim in (shape.key_dim, shape.value_dim))
    key, value = (torch.randn(size, device=pool.device).to(pool.dtype) for size in sizes)
    return key, value


def write_random(pool: KVPool, blocks: list[int] | range, slots: int) -> None:
    """Random keys and values in the first slots of a block table."""
    pool.write(0, pool.runs(blocks, 0, slots), *random_tokens(pool, slots))
