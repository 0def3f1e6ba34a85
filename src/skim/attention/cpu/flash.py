"""torch's tiled CPU attention, over keys that every query sees, or causally over the queries' own keys."""

from __future__ import annotations

import torch

from skim.attention.plain import Partial
from skim.attention.step import AttentionCall

SPLIT_KEYS = 512  # keys of a single query are split into pieces of about this size, one per thread


def flash_fits(key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> bool:
    return key.is_cpu and call.softcap is None and key.shape[2] == value.shape[2]


def attend_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, causal: bool
) -> list[Partial]:
    """Attend over all keys, or causally: each query sees the keys up to its own index.

    Query heads that share a key head are grouped, so that keys are not repeated in memory.
    """
    heads, queries, dim = query.shape
    kv_heads, keys, _ = key.shape
    group = heads // kv_heads
    if causal:
        grouped = query.reshape(kv_heads, group, queries, dim)
        shared = (kv_heads, group, keys, dim)
        part = _flash(grouped, key[:, None].expand(shared), value[:, None].expand(shared), scale, causal=True)
        return [Partial(part.out.reshape(1, heads, queries, dim), part.lse.reshape(1, heads, queries))]
    grouped = query.reshape(1, kv_heads, group * queries, dim)
    splits = max(1, -(-keys // SPLIT_KEYS)) if queries == 1 else 1
    each = keys // splits
    cut = splits * each
    key_splits, value_splits = (
        t[:, :cut].view(kv_heads, splits, each, dim).transpose(0, 1) for t in (key, value)
    )  # [splits, kv_heads, each, dim]
    parts = [_flash(grouped.expand(splits, -1, -1, -1), key_splits, value_splits, scale)]
    if cut < keys:
        parts.append(_flash(grouped, key[None, :, cut:], value[None, :, cut:], scale))
    return [Partial(p.out.reshape(-1, heads, queries, dim), p.lse.reshape(-1, heads, queries)) for p in parts]


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, causal: bool = False
) -> Partial:
    return Partial(
        *torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, is_causal=causal, scale=scale
        )
    )
