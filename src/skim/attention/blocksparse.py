"""Block-sparse prefill in plain torch: the path of the CPU, and the oracle of the Triton kernels.

Works on one chunk whose tokens are in order and whose keys are all written: a whole prompt, or a part after a
prefix. Computes in the precision of what it is given, half precision in float32.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from skim.attention.cpu_flash import attend_flash, flash_fits
from skim.attention.plain import Partial, attend_plain, merge
from skim.attention.policy import BLOCK, Policy, visible_blocks
from skim.attention.step import AttentionCall, Row, Step


def why_dense(row: Row, call: AttentionCall) -> str | None:
    """Why a chunk that has a policy reads every block it sees in this layer; None if blocks are chosen."""
    assert row.policy is not None
    if call.window is not None:
        return "window"  # the layer reads little as it is
    if row.policy.always_all(row.length):
        return "short"
    if row.policy.dense_from(row.context, row.queries, row.prompt) == 0:
        return "end"
    return None if row.sees_all_before else "order"


@dataclass
class BlockStats:
    """Blocks of keys that chunks with a policy saw and read, by query block, query head and layer."""

    visible: int = 0
    read: int = 0
    chunks: Counter[str] = field(default_factory=Counter)
    """Chunks times layers: those where blocks were chosen (`sparse`), the others by why all were read."""


class BlockCounter:
    """Counts what is read since start. Nothing here ever waits for the device.

    What was chosen is known on the device alone. It is added up there and copied to the host in the order of
    the stream, so what precedes a step's logits has been counted when they are read.
    """

    def __init__(self) -> None:
        self._visible = self._dense = 0
        self._chunks: Counter[str] = Counter()
        self._sparse: torch.Tensor | None = None  # on the device
        self._host: torch.Tensor | None = None  # its copy

    def choosing(self, step: Step, heads: int, call: AttentionCall) -> list[int]:
        """The rows that choose blocks in this layer. Other chunks that have a policy are counted as dense."""
        found = []
        for index in step.with_policy:
            reason = why_dense(step.rows[index], call)
            if reason is None:
                found.append(index)
            else:
                self._add_dense(step.rows[index], heads, reason)
        return found

    def _add_dense(self, row: Row, heads: int, reason: str) -> None:
        self._chunks[reason] += 1
        if reason != "window":
            blocks = heads * visible_blocks(row.context, row.queries)
            self._visible += blocks
            self._dense += blocks

    def add(self, row: Row, counts: torch.Tensor) -> None:
        """A row that has chosen `counts` blocks. [query_blocks, heads]"""
        self._chunks["sparse"] += 1
        self._visible += counts.shape[1] * visible_blocks(row.context, row.queries)
        if self._sparse is None or self._host is None:
            self._sparse = self._host = torch.zeros((), dtype=torch.long, device=counts.device)
            if counts.is_cuda:
                self._host = torch.zeros((), dtype=torch.long, device="cpu", pin_memory=True)
        self._sparse += counts.sum()
        if self._host is not self._sparse:
            self._host.copy_(self._sparse, non_blocking=True)

    def stats(self) -> BlockStats:
        chosen = int(self._host) if self._host is not None else 0
        return BlockStats(self._visible, self._dense + chosen, self._chunks.copy())


def attend_blocks(
    query: torch.Tensor,  # [queries, heads, key_dim]
    key: torch.Tensor,  # [context + queries, kv_heads, key_dim]
    value: torch.Tensor,  # [context + queries, kv_heads, value_dim]
    row: Row,
    call: AttentionCall,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A row by its policy: [queries, heads, value_dim], and which blocks it chose, as `choose` has them."""
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
    """How much each query block wants each block of keys. [query_blocks, heads, blocks]

    The sum over its queries of exp(score - the query's highest score over *all* blocks it sees). A maximum of
    each block apart would say how even a block is and not how much it matters.
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
    """Which blocks are read. [query_blocks, heads, blocks]"""
    query_blocks, _, blocks = scores.shape
    index = torch.arange(blocks, device=scores.device)
    at = torch.arange(1, query_blocks + 1, device=scores.device)
    last = (context + (at * BLOCK).clamp(max=queries) - 1)[:, None, None] // BLOCK
    visible = index <= last  # [query_blocks, 1, blocks]
    scores = scores.masked_fill(~visible, 0.0)
    low = scores < policy.alpha * scores.amax(dim=2, keepdim=True)  # what is not a number is not low
    kept = ~low | (index < policy.sinks) | (index > last - policy.window)
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
    """Attention of each query block and head over the blocks it keeps. [queries, heads, value_dim]

    A head's keys are gathered block by block; query heads that share a key head and its blocks go together.
    """
    queries, heads, _ = query.shape
    group = heads // key.shape[1]
    out = query.new_empty(queries, heads, value.shape[2])
    offsets = torch.arange(BLOCK, device=query.device)
    grouped = kept.view(kept.shape[0], -1, group, kept.shape[2])
    same = (grouped == grouped[:, :, :1]).all(dim=3).all(dim=2).tolist()  # heads of a key head read the same
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
    seen: torch.Tensor,  # [queries, keys]; keys in order, so that later queries see more of them
) -> list[Partial]:
    """The keys before the queries' own, which all of them see, go without a mask."""
    if not flash_fits(key, value, call):
        return [attend_plain(query, key, value, call, seen)]
    whole = max(0, key.shape[1] - query.shape[1])
    parts = [attend_plain(query, key[:, whole:], value[:, whole:], call, seen[:, whole:])]
    if whole:
        parts += attend_flash(query, key[:, :whole], value[:, :whole], call.scale, causal=False)
    return parts
