"""The rows of the largest possible step, over a pool that is hardly larger than their new tokens."""

from __future__ import annotations

from itertools import cycle, islice

from skim.attention.blocksparse.policy import Policy
from skim.attention.glance import Evidence, Glance
from skim.attention.step import Role, Row
from skim.attention.watch import WATCHED, Watch
from skim.engine.runner import RowInput, Targets
from skim.memory.pool import KVPool
from skim.models.head import has_head
from skim.models.load import LoadedModel
from skim.sampling.params import MAX_LOGPROBS


def worst_rows(tokens: int, sequences: int, window: int) -> list[tuple[int, int]]:
    """The largest step: (context, queries) of each row. It has the most tokens and rows allowed, all at the
    end of the context window: one chunk as long as possible, and decode rows."""
    rows = min(sequences, tokens)
    found = []
    for others in range(rows - 1, -1, -1):
        queries = min(window, tokens - others)
        tokens -= queries
        found.append((window - queries, queries))
    return found


def small_pool(
    model: LoadedModel, rows: list[tuple[int, int]], block_size: int, kv_format: str, summaries: bool
) -> KVPool:
    """A pool of zeros with room for the rows' new tokens only."""
    blocks = sum(_own_blocks(*row, block_size) for row in rows)
    pool = KVPool.of_blocks(
        model.layers,
        blocks,
        block_size=block_size,
        dtype=model.dtype,
        device=model.device,
        kv_format=kv_format,
        summaries=summaries,
    )
    every = pool.allocate(blocks)
    pool.zero()
    pool.release(every)
    return pool


def _own_blocks(context: int, queries: int, block_size: int) -> int:
    """Blocks that hold a row's new tokens."""
    return -(-(context + queries) // block_size) - context // block_size


def row_input(pool: KVPool, model: LoadedModel, context: int, queries: int) -> RowInput:
    """A row whose context repeats the same few blocks, so that a long context needs no memory.

    These blocks are not neighbours, so code that copies scattered prefixes runs too.
    """
    before = islice(cycle(range(pool.capacity - 1, -1, -1)), context // pool.block_size)
    blocks = [*before, *pool.allocate(_own_blocks(context, queries, pool.block_size))]
    role = Role.DECODE if queries == 1 else Role.PREFILL
    ids = [token % model.vocab_size for token in range(queries)]
    targets = Targets(0, ids, MAX_LOGPROBS) if role is Role.PREFILL and has_head(model.module) else None
    return RowInput(Row(role, blocks, context, queries), ids, wants_logits=True, targets=targets)


def with_evidence(one: RowInput, pool: KVPool) -> RowInput:
    """The same row with evidence of its own: a decode row renews it, and the end of a chunk adds to it."""
    evidence, length = Evidence.of(pool, one.row.length), one.row.length
    if one.row.role is Role.DECODE:
        return one._replace(row=one.row._replace(evidence=evidence))
    watch = Watch(range(max(0, length - WATCHED), length), evidence)
    return one._replace(row=one.row._replace(watch=watch))


def with_glance(one: RowInput) -> RowInput:
    """The same row as a fast one, if it is a decode row."""
    if one.row.role is not Role.DECODE:
        return one
    return one._replace(row=one.row._replace(fast=Glance(1)))


def with_policy(one: RowInput, policy: Policy) -> RowInput:
    """The same row with a policy, if it is a chunk."""
    if one.row.role is Role.DECODE:
        return one
    return one._replace(row=one.row._replace(policy=policy, prompt=one.row.length))
