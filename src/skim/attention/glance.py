"""Fast decode rows: the blocks that a row reads, chosen anew in each layer, KV head and step.

A fast row always reads the first block, for its attention sinks, and the blocks of the latest slots. Of the
others it reads the best within its budget, in two stages:

1. Blocks are ranked by the sum of two shares of attention mass: an estimate by the row's query and the
   summaries of the blocks (`memory/summary.py`), and its evidence, the true shares that the end of the prompt
   (`attention/watch.py`) and slow steps have found.
2. Half of the blocks to choose are those that rank best. For the other half, the query is compared with the
   keys of more blocks. So the mass of these is exact, and those with the highest share for any query head are
   chosen. This stage may be left out.

The numbers of blocks are known before the step and are the same for all layers and heads. This file is the
plain twin of the kernels. Everything is in float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from skim.memory.pool import KVPool

SINKS = 16  # first slots that are always read
RECENT = 256  # least number of last slots that are always read
WEIGHT = 0.1
"""Of evidence in a rank. It finds a fact that the question asks for, whose keys a summary of many keys hides.
With 1 or more, it displaces blocks that later queries need."""
SPREAD = 0.5
"""Of the variance in an estimate, if keys are compared. All of it overrates blocks whose keys differ; but if
nothing is compared, it finds facts that would be lost."""
KEPT = 0.9  # of earlier evidence, at a slow step
NEAR = 16  # evidence counts for all blocks within this many slots: the rest of a sentence may be in the next


class Glance(NamedTuple):
    """How a fast row chooses its blocks."""

    budget: int  # slots to read, rounded up to blocks
    recent: int = RECENT  # last slots that are always read: at least those since the row's last slow step
    candidates: float = 1  # blocks that are taken or compared, for each that is chosen; 1 compares none


class Evidence(NamedTuple):
    """The attention mass that the end of the prompt and slow steps found in the blocks of a sequence. Fast
    steps read it."""

    shares: torch.Tensor
    """[summarized layers, kv_heads, blocks] float32, on the device: shares of each KV head, the mean over its
    query heads, the highest of several queries. 0 for blocks that were not full at the last slow step."""

    @classmethod
    def of(cls, pool: KVPool, slots: int) -> Evidence:
        """No evidence yet, for a sequence of up to this many slots."""
        heads = max(pool.layers[layer].kv_heads for layer in pool.summarized)
        blocks = -(-slots // pool.block_size)
        return cls(torch.zeros(len(pool.summarized), heads, blocks, device=pool.device))

    def copy(self) -> Evidence:
        return Evidence(self.shares.clone())


class Picks(NamedTuple):
    """The blocks of a row that are read: the first `sinks`, all from `recent` on, and the best between."""

    blocks: int  # of the row; the last one may be partly filled
    full: int  # of these, the full blocks: they have summaries
    sinks: int
    recent: int
    reads: int  # blocks that are read
    sure: int = 0  # blocks that are taken by rank, before others are compared
    compares: int = 0  # blocks whose keys are compared, or 0

    @property
    def best(self) -> int:
        """Blocks that are chosen among those between."""
        return self.reads - self.sinks - (self.blocks - self.recent)

    @property
    def spread(self) -> float:
        """The weight of the variance in an estimate."""
        return SPREAD if self.compares else 1.0


def picks_of(glance: Glance, length: int, block_size: int) -> Picks:
    """The picks of a row of `length` slots. All blocks are read if the budget covers the length.

    If the blocks that are always read exceed the budget, they are read nevertheless.
    """
    blocks = -(-length // block_size)
    recent = max(0, length - max(glance.recent, 1)) // block_size
    sinks = min(-(-SINKS // block_size), recent)
    always = sinks + blocks - recent
    reads = max(always, min(-(-glance.budget // block_size), blocks))
    picks = Picks(blocks, length // block_size, sinks, recent, reads)
    best, sure = picks.best, picks.best // 2
    candidates = min(int(glance.candidates * best), recent - sinks)
    return picks._replace(sure=sure, compares=candidates - sure) if candidates > best else picks


def estimate_logs(
    query: torch.Tensor,  # [heads, key_dim] of one token, in the store's basis
    mean: torch.Tensor,  # [full blocks, kv_heads, key_dim]
    variance: torch.Tensor,
    scale: float,
    spread: float = 1.0,
) -> torch.Tensor:
    """Estimate the log of the mean of exp(score) over the keys of each full block.

    With a `spread` of 1 the estimate is exact if the keys of a block are normal.

    [kv_heads, group, full blocks]
    """
    _, kv_heads, dim = mean.shape
    grouped = (query.float() * scale).view(kv_heads, -1, dim)  # [kv_heads, group, key_dim]
    logs = torch.einsum("kgd,bkd->kgb", grouped, mean.float())
    return logs + torch.einsum("kgd,bkd->kgb", grouped.square() * (spread / 2), variance.float())


def compare_keys(
    query: torch.Tensor,  # [group, key_dim] of one token and KV head
    key: torch.Tensor,  # [blocks, block_size, key_dim]
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """The log of the mean of exp(score) over the keys of each block. [group, blocks]"""
    scores = torch.einsum("gd,bsd->gbs", query.float() * scale, key.float())
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.logsumexp(scores, dim=2) - math.log(key.shape[1])


def shares_of(logs: torch.Tensor) -> torch.Tensor:
    """The share of attention mass that each full block holds, for each KV head, by its `logs`.

    For each query head the masses are divided by their sum over the full blocks; a KV head takes the mean
    over its query heads. [kv_heads, group, full blocks] -> [kv_heads, full blocks]
    """
    return torch.softmax(logs, dim=2).mean(dim=1)


def highest_shares(logs: torch.Tensor) -> torch.Tensor:
    """As `shares_of`, but a KV head takes the highest share of its query heads."""
    return torch.softmax(logs, dim=2).amax(dim=1)


def true_shares(
    query: torch.Tensor,  # [heads, key_dim] of one token
    key: torch.Tensor,  # [slots, kv_heads, key_dim] of all slots
    block_size: int,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """The share of attention mass that each full block holds, for each KV head. Sinks without keys do not
    count. [kv_heads, full blocks]"""
    slots, kv_heads, dim = key.shape
    scores = torch.einsum("kgd,skd->kgs", (query.float() * scale).view(kv_heads, -1, dim), key.float())
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores, dim=2).mean(dim=1)
    full = slots // block_size
    return weights[:, : full * block_size].view(kv_heads, full, block_size).sum(dim=2)


def renew(evidence: Evidence, layer: int, shares: torch.Tensor) -> None:
    """Merge what a slow step found in a layer, [kv_heads, full blocks]; `layer` counts summarized ones."""
    kv_heads, full = shares.shape
    known = evidence.shares[layer, :kv_heads, :full]
    known.copy_(torch.maximum(KEPT * known, shares))


def ranks_of(shares: torch.Tensor, evidence: torch.Tensor, block_size: int) -> torch.Tensor:
    """The ranks of full blocks, by estimated shares and evidence of them. All [kv_heads, full blocks]

    A block has the evidence of the best block that is at most `near_blocks` away.
    """
    near = near_blocks(block_size)
    return shares + WEIGHT * F.max_pool1d(evidence[None], 2 * near + 1, stride=1, padding=near)[0]


def near_blocks(block_size: int) -> int:
    """Blocks on either side whose evidence counts for a block."""
    return NEAR // block_size


def largest_between(ranks: torch.Tensor, picks: Picks, count: int) -> torch.Tensor:
    """The blocks between with the highest ranks, these first. Of equal ranks the first count.

    [kv_heads, count]
    """
    between = ranks[:, picks.sinks : picks.recent]
    return between.sort(dim=1, descending=True, stable=True).indices[:, :count] + picks.sinks


def select(ranks: torch.Tensor, picks: Picks) -> torch.Tensor:
    """The blocks that each KV head reads, ascending. [kv_heads, reads]"""
    kv_heads, device = ranks.shape[0], ranks.device
    always = torch.cat(
        [torch.arange(picks.sinks, device=device), torch.arange(picks.recent, picks.blocks, device=device)]
    )
    best = largest_between(ranks, picks, picks.best)
    return torch.cat([best, always.expand(kv_heads, -1)], dim=1).sort(dim=1).values


def mass_of(shares: torch.Tensor, selected: torch.Tensor, picks: Picks) -> torch.Tensor:
    """The share of attention mass in the selected full blocks, mean over KV heads. []

    A partly filled block has no summary; it is always read and does not count.
    """
    full = selected < picks.full
    return (shares.gather(1, selected.clamp(max=picks.full - 1)) * full).sum(dim=1).mean()
