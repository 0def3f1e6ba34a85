"""What the sparse kernels compute, written out in torch: their oracles. Knows nothing of Triton."""

from __future__ import annotations

import torch

from skim.attention.step import AttentionCall


def attend_listed(
    query: torch.Tensor,  # [queries, heads, key_dim]
    key: torch.Tensor,  # [keys, kv_heads, key_dim]
    value: torch.Tensor,  # [keys, kv_heads, value_dim]
    call: AttentionCall,
    seen: torch.Tensor,  # [heads, queries, keys], True where a query may read a key
) -> torch.Tensor:
    """One softmax for every query and head, over what it sees; zeros where it sees nothing."""
    group = query.shape[1] // key.shape[1]
    keys, values = (t.double().repeat_interleave(group, dim=1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.double()[:, None, None].expand(*scores.shape[:2], 1)
        scores = torch.cat([scores, sinks], dim=2)
    weights = torch.softmax(scores, dim=2).nan_to_num(0.0) if call.sinks is None else torch.softmax(scores, 2)
    return torch.einsum("hqk,khd->qhd", weights[..., : key.shape[0]], values)


def expand_list(
    blocks: torch.Tensor,  # [tiles, programs, most]
    counts: torch.Tensor,  # [tiles, programs]
    block_size: int,
    keys: int,
) -> torch.Tensor:
    """Which keys a list names. [tiles, programs, keys]"""
    tiles, programs, most = blocks.shape
    listed = torch.zeros(tiles, programs, -(-keys // block_size), dtype=torch.bool, device=blocks.device)
    valid = torch.arange(most, device=blocks.device) < counts[..., None]
    for tile in range(tiles):
        for program in range(programs):
            listed[tile, program, blocks[tile, program][valid[tile, program]].long()] = True
    return listed.repeat_interleave(block_size, dim=2)[..., :keys]


def block_means(key: torch.Tensor, block: int) -> torch.Tensor:
    """[keys, kv_heads, dim] -> [kv_heads, blocks, dim]"""
    return torch.stack([part.double().mean(dim=0) for part in torch.split(key, block)], dim=1)


def block_scores(
    query: torch.Tensor,  # [queries, heads, dim]
    means: torch.Tensor,  # [kv_heads, blocks, dim]
    context: int,
    scale: float,
    block: int,
    sample: int = 1,
) -> torch.Tensor:
    """Sum over a block's queries of exp(score - the query's highest score). [query_blocks, heads, blocks]"""
    queries, heads, _ = query.shape
    group = heads // means.shape[0]
    scores = torch.einsum("qhd,hbd->qhb", query.double(), means.repeat_interleave(group, dim=0)) * scale
    slots = torch.arange(context, context + queries, device=query.device)
    first = torch.arange(means.shape[1], device=query.device) * block
    scores = scores.masked_fill((first[None, :] > slots[:, None])[:, None], float("-inf"))
    wanted = torch.exp(scores - scores.amax(dim=2, keepdim=True))
    return torch.stack([part[::sample].sum(dim=0) for part in torch.split(wanted, block)])


def choose(
    scores: torch.Tensor,  # [query_blocks, heads, blocks]
    context: int,
    queries: int,
    block: int,
    *,
    alpha: float,
    sinks: int,
    window: int,
    dense: int,
) -> torch.Tensor:
    """Which blocks are read. [query_blocks, heads, blocks]"""
    query_blocks, _, blocks = scores.shape
    index = torch.arange(blocks, device=scores.device)
    kept = []
    for at in range(query_blocks):
        last = (context + min((at + 1) * block, queries) - 1) // block
        visible = index <= last
        own = torch.where(visible, scores[at], 0.0)
        best = own.amax(dim=1, keepdim=True)
        always = (index < sinks) | (index > last - window)
        if at >= query_blocks - dense:
            always = torch.ones_like(visible)
        kept.append(((own >= alpha * best) | always) & visible)
    return torch.stack(kept)
