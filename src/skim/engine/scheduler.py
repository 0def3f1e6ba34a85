"""What runs next: one pure function over plain data, called by the engine and by its tests alike.

Decode rows come first, then prefill chunks in arrival order, all within one token budget. Waiting is
counted in steps: once a sequence has been passed over `aging_steps` times, room is kept for it, so that
decode rows cannot starve prefill, nor small requests a large one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from skim.memory.manager import blocks_to_allocate


class Candidate(NamedTuple):
    """One unfinished sequence as the scheduler sees it."""

    order: int  # lower arrived earlier
    running: bool  # has blocks; otherwise it waits to be admitted
    decoding: bool  # one generated token to compute, nothing else
    pending: int  # tokens without keys and values yet
    length: int  # tokens with them (for a waiting sequence: the prefix it would start on)
    blocks: int  # blocks it has (or would start on)
    copies_tail: bool  # its next write must first copy a shared block
    revives: int = 0  # blocks of the prefix it would start on that admission makes unreclaimable
    waited: int = 0  # steps it was passed over
    slots: int = 1  # sequences it stands for: a prompt with n > 1 outputs stands for n
    grain: int = 1  # its chunks end at multiples of so many tokens, but for the last one


@dataclass(frozen=True)
class Limits:
    """What a step may use."""

    tokens: int  # most tokens in one forward
    sequences: int  # most sequences in progress
    block_size: int
    aging_steps: int


@dataclass(frozen=True)
class Tick:
    """One decision: either whom to preempt before deciding again, or which rows run with how many tokens."""

    rows: tuple[tuple[int, int], ...] = ()  # (order, tokens); a waiting sequence among them is admitted
    preempt: int | None = None


def blocks_needed(candidate: Candidate, tokens: int, block_size: int) -> int:
    """Blocks to allocate before `candidate` can compute its next `tokens` tokens."""
    return blocks_to_allocate(candidate.length + tokens, candidate.blocks, candidate.copies_tail, block_size)


def tokens_that_fit(candidate: Candidate, available: int, block_size: int) -> int:
    """The most tokens whose blocks can be had from `available`."""
    if available < candidate.copies_tail:
        return 0
    room = (candidate.blocks + available - candidate.copies_tail) * block_size - candidate.length
    return max(0, min(candidate.pending, room))


def chunk(candidate: Candidate, most: int, limits: Limits) -> int:
    """How many of at most `most` tokens its next chunk has, so that it ends where a chunk may.

    A budget so small that half of it may hold no grain, which is what prefill is sure of, cuts anywhere.
    """
    tokens = min(candidate.pending, most)
    if tokens == candidate.pending or limits.tokens // 2 < candidate.grain:
        return tokens
    return max(0, tokens - (candidate.length + tokens) % candidate.grain)


def decide_tick(candidates: Sequence[Candidate], available: int, limits: Limits) -> Tick:
    """The rows of the next forward, or a sequence to preempt first.

    Only the newest running sequence is ever preempted, and the oldest always can run, so every sequence
    that fits the pool alone is finished in the end.
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

    promised = 0  # blocks that admitted prompts will still ask for
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

    spare = available - promised - len(decodes)  # one block for each decode row, so that it need not preempt
    slots = limits.sequences - sum(c.slots for c in running)
    for candidate in waiting:
        if budget <= 0 or slots <= 0:
            break
        whole = blocks_needed(candidate, candidate.pending, limits.block_size) + candidate.revives
        tokens = chunk(candidate, budget, limits)
        if whole > spare or candidate.slots > slots or tokens == 0:
            if candidate.waited >= limits.aging_steps:
                break  # from now on nobody overtakes it
            continue
        rows.append((candidate.order, tokens))
        spare -= whole
        budget -= tokens
        slots -= candidate.slots

    for candidate in decodes[for_decodes:]:  # room kept for prefill that nobody took
        needed = blocks_needed(candidate, 1, limits.block_size)
        if budget > 0 and needed <= max(spare, 0):
            rows.append((candidate.order, 1))
            spare -= needed
            budget -= 1
    if running and not rows:  # prefill was to have what there is, and cannot use it
        if not decodes or blocks_needed(decodes[0], 1, limits.block_size) > available:
            return Tick(preempt=running[-1].order)
        rows.append((decodes[0].order, 1))
    return Tick(rows=tuple(rows))
