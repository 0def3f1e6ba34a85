"""Attention of a fast decode row over its selected blocks, in plain torch: the twin of faster kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skim.attention.glance import (
    Picks,
    compare_keys,
    estimate_logs,
    highest_shares,
    largest_between,
    mass_of,
    ranks_of,
    renew,
    select,
    shares_of,
    true_shares,
)
from skim.attention.plain import attend_plain, merge
from skim.attention.reading import Reading, reading
from skim.attention.step import AttentionCall, Row
from skim.memory.pool import KVPool
from skim.memory.summary import MEAN, VARIANCE


def attend_glance(
    pool: KVPool,
    layer: int,
    row: Row,
    picks: Picks,
    query: torch.Tensor,  # [heads, key_dim], in the store's basis unless keys are dequantized
    call: AttentionCall,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in the basis of `query`, [heads, value_dim], and the mass that the blocks hold, []."""
    store, table = pool.stores[layer], row.table(pool.group_of[layer])
    dequantizes = reading(store, call) is Reading.DEQUANTIZED
    get = pool.gather if dequantizes else pool.read
    ranking = store.turn_query(query[None])[0] if dequantizes else query
    mean, variance = summaries(pool, layer, table[: picks.full])
    logs = estimate_logs(ranking, mean, variance, call.scale, picks.spread)
    shares = ranks = shares_of(logs)
    kv_heads = store.shape.kv_heads
    if row.evidence is not None:
        place = pool.summarized.index(layer)
        known = row.evidence.shares[place, :kv_heads, : picks.full]
        ranks = ranks_of(shares, known, pool.block_size)
    if picks.compares:
        ordered = largest_between(ranks, picks, picks.sure + picks.compares)
        sure, candidates = ordered[:, : picks.sure], ordered[:, picks.sure :]
        for head, blocks in enumerate(candidates.tolist()):
            runs = pool.runs([table[block] for block in blocks], 0, len(blocks) * pool.block_size)
            own = get(layer, runs)[0][:, head].reshape(len(blocks), pool.block_size, -1)
            queries = query.reshape(kv_heads, -1, query.shape[1])[head]
            logs[head][:, blocks] = compare_keys(queries, own, call.scale, call.softcap)
        shares = shares_of(logs)
        ranks = torch.full_like(shares, -1).scatter(1, candidates, highest_shares(logs).gather(1, candidates))
        ranks.scatter_(1, sure, torch.inf)
    selected = select(ranks, picks)
    group = query.shape[0] // kv_heads
    slots = row.length - (picks.blocks - picks.reads) * pool.block_size  # the last block is among them
    outs = []
    for head, chosen in enumerate(selected.tolist()):
        keys, values = get(layer, pool.runs([table[block] for block in chosen], 0, slots))
        heads = slice(head * group, (head + 1) * group)
        one = slice(head, head + 1)
        part = attend_plain(
            query[heads, None], keys[:, one].transpose(0, 1), values[:, one].transpose(0, 1), call
        )
        outs.append(merge([part], None if call.sinks is None else call.sinks[heads])[:, 0])
    return torch.cat(outs), mass_of(shares, selected, picks)


def renew_evidence(pool: KVPool, layer: int, row: Row, query: torch.Tensor, call: AttentionCall) -> None:
    """Renew the evidence of a slow row. `query`, its first, is as for `attend_glance`.

    Of several queries the others may be drafts that will be rejected.
    """
    assert row.evidence is not None
    dequantizes = reading(pool.stores[layer], call) is Reading.DEQUANTIZED
    table = row.table(pool.group_of[layer])
    key, _ = (pool.gather if dequantizes else pool.read)(layer, pool.runs(table, 0, row.context + 1))
    shares = true_shares(query, key, pool.block_size, call.scale, call.softcap)
    renew(row.evidence, pool.summarized.index(layer), shares)


def summaries(pool: KVPool, layer: int, blocks: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The summaries of full blocks, in the order of the table. [blocks, kv_heads, key_dim] each"""
    at = torch.tensor(blocks, device=pool.device)
    planes = [slab.layers[layer].blocks for slab in pool.slabs]
    if len(planes) == 1:
        return planes[0][MEAN][at], planes[0][VARIANCE][at]
    slabs = [block // pool.slab_blocks for block in blocks]
    places = (at % pool.slab_blocks).tolist()
    mean, variance = (
        torch.stack([planes[slab][name][place] for slab, place in zip(slabs, places, strict=True)])
        for name in (MEAN, VARIANCE)
    )
    return mean, variance
