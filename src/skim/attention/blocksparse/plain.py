"""Block-sparse prefill in plain torch: the CPU path, and the reference for the Triton kernels.

Works on one chunk whose tokens are in order and whose keys are all written: a whole prompt, or a chunk after
a prefix. Scores are computed in float32 or higher.
"""

from __future__ import annotations

import torch

from skim.attention.blocksparse.policy import BLOCK, Policy
from skim.attention.cpu.flash import attend_flash, flash_fits
from skim.attention.plain import Partial, attend_plain, merge
from skim.attention.step import AttentionCall, Row


def attend_blocks(
    query: torch.Tensor,  # [queries, heads, key_dim]
    key: torch.Tensor,  # [context + queries, kv_heads, key_dim]
    value: torch.Tensor,  # [context + queries, kv_heads, value_dim]
    row: Row,
    call: AttentionCall,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend a row by its policy. [queries, heads, value_dim], and the selected blocks (see `choose`)."""
    assert row.policy is not None
    scores = block_scores(query, block_means(key), row.context, call.scale, row.policy.sample)
    kept = choose(scores, row.context, row.queries, row.policy, row.prompt)
    return attend_kept(query, key, value, row.context, call, kept), kept


def block_means(key: torch.Tensor) -> torch.Tensor:
    """The mean key of each block. [keys, kv_heads, dim] -> [kv_heads, blocks, dim]"""
    keys, heads, dim = key.shape
    whole = keys // BLOCK * BLOCK
    kind = torch.promote_types(key.dtype, torch.float32)
    means = key[:whole].reshape(-1, BLOCK, heads, dim).mean(dim=1, dtype=kind)
    if whole < keys:
        means = torch.cat([means, key[whole:].mean(dim=0, keepdim=True, dtype=kind)])
    return means.transpose(0, 1)


def block_scores(
    query: torch.Tensor,  # [queries, heads, dim]
    means: torch.Tensor,  # [kv_heads, blocks, dim]
    context: int,
    scale: float,
    sample: int = 1,
) -> torch.Tensor:
    """Score every key block for every query block. [query_blocks, heads, blocks]

    The sum over its queries of exp(score - the query's maximum over *all* blocks it sees). A maximum per
    block would measure how flat a block is, not how much it matters.
    """
    kv_heads, blocks, dim = means.shape
    heads = query.shape[1]
    first = torch.arange(blocks, device=query.device) * BLOCK
    wanted = []
    for start in range(0, query.shape[0], BLOCK):
        part = query[start : start + BLOCK : sample].to(means.dtype)
        slots = context + start + sample * torch.arange(part.shape[0], device=query.device)
        grouped = part.permute(1, 0, 2).reshape(kv_heads, -1, dim) * scale
        scores = torch.matmul(grouped, means.transpose(1, 2)).view(heads, -1, blocks)
        scores = scores.masked_fill(first > slots[:, None], float("-inf"))
        wanted.append(torch.exp(scores - scores.amax(dim=2, keepdim=True)).sum(dim=1))
    return torch.stack(wanted)


def choose(
    scores: torch.Tensor,  # [query_blocks, heads, blocks]
    context: int,
    queries: int,
    policy: Policy,
    prompt: int,  # slots of the whole prompt
) -> torch.Tensor:
    """Select the blocks to read. [query_blocks, heads, blocks]"""
    query_blocks, _, blocks = scores.shape
    index = torch.arange(blocks, device=scores.device)
    at = torch.arange(1, query_blocks + 1, device=scores.device)
    last = (context + (at * BLOCK).clamp(max=queries) - 1)[:, None, None] // BLOCK
    visible = index <= last  # [query_blocks, 1, blocks]
    scores = scores.masked_fill(~visible, 0.0)
    low = scores < policy.alpha * scores.amax(dim=2, keepdim=True)  # NaN is not low
    kept = ~low | (index < policy.sinks) | (index > last - policy.recent)
    kept[policy.dense_from(context, queries, prompt) :] = True
    return kept & visible


def attend_kept(
    query: torch.Tensor,  # [queries, heads, key_dim]
    key: torch.Tensor,  # [context + queries, kv_heads, key_dim]
    value: torch.Tensor,  # [context + queries, kv_heads, value_dim]
    context: int,
    call: AttentionCall,
    kept: torch.Tensor,  # [query_blocks, heads, blocks]
) -> torch.Tensor:
    """Attend each query block and head over its selected blocks. [queries, heads, value_dim]

    A head's keys are gathered block by block; query heads that share a key head and its blocks are grouped.
    """
    queries, heads, _ = query.shape
    group = heads // key.shape[1]
    out = query.new_empty(queries, heads, value.shape[2])
    offsets = torch.arange(BLOCK, device=query.device)
    grouped = kept.view(kept.shape[0], -1, group, kept.shape[2])
    same = (grouped == grouped[:, :, :1]).all(dim=3).all(dim=2).tolist()  # within a key head
    for at, start in enumerate(range(0, queries, BLOCK)):
        end = min(start + BLOCK, queries)
        own = torch.arange(context + start, context + end, device=query.device)
        for first in range(0, heads, group):
            width = group if same[at][first // group] else 1
            for head in range(first, first + group, width):
                members = slice(head, head + width)
                slots = (kept[at, head].nonzero() * BLOCK + offsets).flatten()
                slots = slots[slots < context + end]
                keys, values = (t[:, first // group][slots][None] for t in (key, value))
                parts = _attend_part(
                    query[start:end, members].transpose(0, 1), keys, values, call, slots <= own[:, None]
                )
                sinks = None if call.sinks is None else call.sinks[members]
                out[start:end, members] = merge(parts, sinks).transpose(0, 1)
    return out


def _attend_part(
    query: torch.Tensor,  # [heads, queries, key_dim]
    key: torch.Tensor,  # [1, keys, key_dim]
    value: torch.Tensor,  # [1, keys, value_dim]
    call: AttentionCall,
    seen: torch.Tensor,  # [queries, keys]; keys are in order, so later queries see more of them
) -> list[Partial]:
    """Attend without a mask over the keys before the queries' own: every query sees them."""
    if not flash_fits(key, value, call):
        return [attend_plain(query, key, value, call, seen)]
    whole = max(0, key.shape[1] - query.shape[1])
    parts = [attend_plain(query, key[:, whole:], value[:, whole:], call, seen[:, whole:])]
    if whole:
        parts += attend_flash(query, key[:, :whole], value[:, :whole], call.scale, causal=False)
    return parts
