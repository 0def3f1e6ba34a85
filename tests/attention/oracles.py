"""Reference attention over listed keys, to test kernels against. Does not use Triton.

The reference for choosing blocks is `skim.attention.blocksparse.plain`, the CPU's implementation.
"""

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
    """One softmax per query and head over the keys it sees. Zeros if it sees none."""
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
    """Mask of the keys in the listed blocks. [tiles, programs, keys]"""
    tiles, programs, most = blocks.shape
    listed = torch.zeros(tiles, programs, -(-keys // block_size), dtype=torch.bool, device=blocks.device)
    valid = torch.arange(most, device=blocks.device) < counts[..., None]
    for tile in range(tiles):
        for program in range(programs):
            listed[tile, program, blocks[tile, program][valid[tile, program]].long()] = True
    return listed.repeat_interleave(block_size, dim=2)[..., :keys]
