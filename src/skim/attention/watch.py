"""Evidence of the end of a prompt: the blocks that its last tokens, mostly the question, attend to.

Slow-fast decode ranks blocks by it. The chunks that compute these tokens find it, with any backend, in plain
torch. It does not depend on where the prompt is cut into chunks, apart from rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from skim.attention.glance import Evidence

WATCHED = 32  # last tokens of a prompt whose attention is evidence
MOST_SCORES = 2**24  # that exist at a time, as far as one query of one KV head allows


class Watch(NamedTuple):
    """The slots of a prompt whose queries add to the evidence of their sequence."""

    slots: range
    evidence: Evidence

    def within(self, context: int, length: int) -> range:
        """The watched slots among those that a chunk computes."""
        return range(max(context, self.slots.start), min(length, self.slots.stop))

    def add(self, layer: int, shares: torch.Tensor, block_size: int) -> None:
        """Merge what some queries found, [kv_heads, blocks], in the blocks that the prompt fills; `layer`
        counts those with summaries."""
        kv_heads, blocks = shares.shape
        full = min(blocks, self.slots.stop // block_size)
        known = self.evidence.shares[layer, :kv_heads, :full]
        known.copy_(torch.maximum(known, shares[:, :full]))


def highest_shares(
    query: torch.Tensor,  # [queries, heads, key_dim] of successive slots
    first: int,  # slot of the first query
    key: torch.Tensor,  # [slots, kv_heads, key_dim] of all slots up to the last query's
    block_size: int,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """The highest share of attention mass that a block has for any query, for each KV head.

    A KV head takes the mean over its query heads. Sinks without keys do not count. [kv_heads, blocks]
    """
    queries, heads, dim = query.shape
    slots, kv_heads, _ = key.shape
    group, blocks = heads // kv_heads, -(-slots // block_size)
    heads_at_once = min(kv_heads, max(1, MOST_SCORES // (queries * group * slots)))
    queries_at_once = max(1, MOST_SCORES // (heads_at_once * group * slots))
    grouped = (query.float() * scale).view(queries, kv_heads, group, dim).transpose(0, 1)
    slot = torch.arange(slots, device=key.device)
    found = torch.zeros(kv_heads, blocks, device=key.device)
    for head in range(0, kv_heads, heads_at_once):
        some = slice(head, head + heads_at_once)
        keys = key[:, some].float().permute(1, 2, 0)  # [kv_heads, key_dim, slots]
        for start in range(0, queries, queries_at_once):
            part = grouped[some, start : start + queries_at_once]
            scores = torch.matmul(part.flatten(1, 2), keys).view(*part.shape[:3], slots)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            own = first + start + torch.arange(part.shape[1], device=key.device)
            scores.masked_fill_(slot > own[:, None, None], float("-inf"))
            weights = torch.softmax(scores, dim=3).mean(dim=2)  # [kv_heads, queries, slots]
            weights = F.pad(weights, (0, blocks * block_size - slots))
            shares = weights.view(*part.shape[:2], blocks, block_size).sum(dim=3).amax(dim=1)
            found[some] = torch.maximum(found[some], shares)
    return found
