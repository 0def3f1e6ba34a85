"""Summaries of full blocks: the mean and the variance of their keys.

Slow-fast decode ranks blocks by them. A summary is in the basis of its store, computed from the keys as
stored. Slots of a block are written in order, so a block is full once its last slot is written, and its
summary is written then. Until then the summary holds nothing. Summaries follow from the keys: they are copied
with their block, and checkpoint files do not have them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from skim.memory.runs import Run
from skim.memory.store import LayerShape, LayerStore, Plane, Planes

MEAN, VARIANCE = "key_mean", "key_variance"


def summary_planes(shape: LayerShape, dtype: torch.dtype) -> tuple[Plane, Plane]:
    """The planes of a layer of a model that computes in `dtype`. A variance may exceed float16's range."""
    kept = torch.bfloat16 if dtype == torch.float16 else dtype
    sizes = (shape.kv_heads, shape.key_dim)
    mean, variance = (Plane(name, sizes, kept, per_block=True, derived=True) for name in (MEAN, VARIANCE))
    return mean, variance


def summary_of(key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of the keys of blocks, [blocks, block_size, kv_heads, key_dim], in float32.

    [blocks, kv_heads, key_dim] each
    """
    variance, mean = torch.var_mean(key.float(), dim=1, correction=0)
    return mean, variance


def summarize(store: LayerStore, planes: Planes, blocks: torch.Tensor) -> None:
    """Write the summaries of full blocks of one slab."""
    size = planes.block_size
    slots = (blocks[:, None] * size + torch.arange(size, device=blocks.device)).flatten()
    key = store.read(planes, slots)[0]
    key = key.view(len(blocks), size, *key.shape[1:])
    for name, new in zip((MEAN, VARIANCE), summary_of(key), strict=True):
        planes.blocks[name].index_copy_(0, blocks, new.to(planes.blocks[name].dtype))


def filled_in(runs: Iterable[Run], block_size: int) -> dict[int, list[int]]:
    """The blocks that writing these runs of slots fills, as indices in their slab, by slab."""
    found: dict[int, list[int]] = {}
    for run in runs:
        end = run.start + len(run.slots)
        if run.start // block_size < end // block_size:
            found.setdefault(run.slab, []).extend(range(run.start // block_size, end // block_size))
    return found
