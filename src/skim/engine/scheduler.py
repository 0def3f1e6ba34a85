"""The scheduler: one pure function over plain data that decides the rows of the next step.

Decode rows come first, then prefill chunks in order of arrival, all within one token budget. A sequence that
has been passed over `aging_steps` times is aged, and room is reserved for it. So decode rows cannot starve
prefill, and small requests cannot starve a large one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from skim.memory.manager import blocks_to_allocate


class Candidate(NamedTuple):
    """An unfinished sequence, as the scheduler sees it."""

    order: int  # lower arrived earlier
    running: bool  # has blocks; otherwise it waits for admission
    decoding: bool  # exactly one token to compute, a generated one
    pending: int  # tokens still to be computed
    length: int  # computed tokens (of a waiting sequence: those of the cached prefix it would start on)
    blocks: int  # blocks it has, or would start on
    copies_tail: bool  # its next write first copies a shared block
    revives: int = 0  # evictable blocks that its admission makes unevictable
    waited: int = 0  # steps in which it was passed over
    slots: int = 1  # sequences it stands for: n for a prompt with n outputs
    grain: int = 1  # all chunks but the last end at multiples of this many tokens


@dataclass(frozen=True)
class Limits:
    """Limits of one step."""

    tokens: int  # most tokens in one forward
    sequences: int  # most sequences in progress
    block_size: int
    aging_steps: int


@dataclass(frozen=True)
class Tick:
    """One decision: the rows of the next step, or a sequence to preempt before deciding again."""

    rows: tuple[tuple[int, int], ...] = ()  # (order, tokens); waiting sequences among them are admitted
    preempt: int | None = None  # order


def blocks_needed(candidate: Candidate, tokens: int, block_size: int) -> int:
    """Number of blocks to allocate before `candidate` can compute its next `tokens` tokens."""
    return blocks_to_allocate(candidate.length + tokens, candidate.blocks, candidate.copies_tail, block_size)


def tokens_that_fit(candidate: Candidate, available: int, block_size: int) -> int:
    """The most tokens that can be computed with `available` more blocks."""
    if available < candidate.copies_tail:
        return 0
    room = (candidate.blocks + available - candidate.copies_tail) * block_size - candidate.length
    return max(0, min(candidate.pending, room))


def chunk(candidate: Candidate, most: int, limits: Limits) -> int:
    """Length of the next prefill chunk: at most `most` tokens, ending at a multiple of `grain`.

    Prefill is guaranteed only half of the token budget. If that is less than a grain, chunks end anywhere.
    """
    tokens = min(candidate.pending, most)
    if tokens == candidate.pending or limits.tokens // 2 < candidate.grain:
        return tokens
    return max(0, tokens - (candidate.length + tokens) % candidate.grain)


def decide_tick(candidates: Sequence[Candidate], available: int, limits: Limits) -> Tick:
    """Return the rows of the next step, or a sequence to preempt first.

    Only the newest running sequence is preempted, and the oldest can always run. So every sequence that fits
    the pool alone is finished in the end.
    """
    running = sorted((c for c in candidates if c.running), key=lambda c: c.order)
    decodes = sorted((c for c in running if c.decoding), key=lambda c: (-c.waited, c.order))
    prefills = [c for c in running if not c.decoding]
    waiting = sorted((c for c in candidates if not c.running), key=lambda c: c.order)

    budget = limits.tokens
    aged = any(c.waited >= limits.aging_steps for c in (*prefills, *waiting))
    for_decodes = budget - max(1, budget // 2) if aged else budget

    rows: list[tuple[int, int]] = []
    for candidate in decodes[:for_decodes]:
        needed = blocks_needed(candidate, 1, limits.block_size)
        if needed > available:
            return Tick(preempt=running[-1].order)
        available -= needed
        budget -= 1
        rows.append((candidate.order, 1))

    promised = 0  # blocks that admitted prompts will still need
    for candidate in prefills:
        tokens = chunk(
            candidate, min(tokens_that_fit(candidate, available, limits.block_size), budget), limits
        )
        if tokens > 0:
            available -= blocks_needed(candidate, tokens, limits.block_size)
            budget -= tokens
            rows.append((candidate.order, tokens))
        whole = blocks_needed(candidate, candidate.pending, limits.block_size)
        promised += whole - (blocks_needed(candidate, tokens, limits.block_size) if tokens else 0)

    spare = available - promised - len(decodes)  # one block per decode row, so that it need not preempt
    slots = limits.sequences - sum(c.slots for c in running)
    for candidate in waiting:
        if budget <= 0 or slots <= 0:
            break
        whole = blocks_needed(candidate, candidate.pending, limits.block_size) + candidate.revives
        tokens = chunk(candidate, budget, limits)
        if whole > spare or candidate.slots > slots or tokens == 0:
            if candidate.waited >= limits.aging_steps:
                break  # no later sequence may overtake an aged one
            continue
        rows.append((candidate.order, tokens))
        spare -= whole
        budget -= tokens
        slots -= candidate.slots

    for candidate in decodes[for_decodes:]:  # room reserved for prefill that was not used
        needed = blocks_needed(candidate, 1, limits.block_size)
        if budget > 0 and needed <= max(spare, 0):
            rows.append((candidate.order, 1))
            spare -= needed
            budget -= 1
    if running and not rows:  # the room is reserved for prefill, which cannot use it
        if not decodes or blocks_needed(decodes[0], 1, limits.block_size) > available:
            return Tick(preempt=running[-1].order)
        rows.append((decodes[0].order, 1))
    return Tick(rows=tuple(rows))
