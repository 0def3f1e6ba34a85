"""Describe sequences to the scheduler: tokens left to compute, blocks held, cached prefix.

A prompt with block-sparse attention is cut at multiples of a key block: both its cached prefix and its
chunks end there. So the keys it reads, and its output, do not depend on the other rows of a step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from skim.attention.blocksparse.policy import BLOCK
from skim.engine.scheduler import Candidate, place_in_line
from skim.engine.sequence import Sequence
from skim.memory.manager import MemoryManager
from skim.memory.prefix import Match

LOOKAHEAD = 16  # waiting sequences considered in one step: the first in line, and as many of the shortest


def candidates_of(sequences: Iterable[Sequence], memory: MemoryManager) -> list[Candidate]:
    """Candidates for all running sequences, and for waiting ones: the first in line, and the shortest.

    Updates `Sequence.match` of those that wait: the cached prefix they would start on.
    """
    found: list[Sequence] = []
    waiting: list[Sequence] = []
    for sequence in sequences:
        (waiting if sequence.table is None else found).append(sequence)
    if len(waiting) > LOOKAHEAD:
        waiting.sort(key=_place)
        shortest = heapq.nsmallest(LOOKAHEAD, waiting[LOOKAHEAD:], key=lambda s: len(s.tokens))
        waiting = waiting[:LOOKAHEAD] + shortest
    return [_candidate(sequence, memory) for sequence in found + waiting]


def _place(sequence: Sequence) -> tuple[float, int]:
    state = sequence.parent
    return place_in_line(state.arrived_at, state.request.params.priority, sequence.order)


def _candidate(sequence: Sequence, memory: MemoryManager) -> Candidate:
    table, state = sequence.table, sequence.parent
    slots = 1 + len(sequence.followers)
    grain = grain_of(sequence)
    if table is None:
        match = _match(sequence, memory)
        return Candidate(
            order=sequence.order,
            running=False,
            decoding=False,
            pending=len(sequence.tokens) - match.length,
            length=match.length,
            blocks=len(match.blocks),
            copies_tail=match.length % memory.pool.block_size > 0,
            revives=sum(1 for block in match.blocks if memory.pool.refcount(block) == 0),
            waited=sequence.waited,
            slots=slots,
            grain=grain,
            priority=state.request.params.priority,
            arrived=state.arrived_at,
        )
    return Candidate(
        order=sequence.order,
        running=True,
        decoding=sequence.decoding,
        pending=len(sequence.tokens) - table.length,
        length=table.length,
        blocks=len(table.blocks),
        copies_tail=memory.must_copy_tail(table),
        restoring=sequence.restoring,
        waited=sequence.waited,
        slots=slots,
        grain=grain,
        priority=state.request.params.priority,
        arrived=state.arrived_at,
    )


def grain_of(sequence: Sequence) -> int:
    return 1 if sequence.parent.request.policy is None else BLOCK


def _match(sequence: Sequence, memory: MemoryManager) -> Match:
    """The cached prefix a waiting sequence would start on; looked up again only if the tree has changed."""
    request = sequence.parent.request
    if request.use_prefix_cache and sequence.match_version != memory.tree.version:
        size, grain = memory.pool.block_size, grain_of(sequence)
        longest = sequence.slots.prompt + sequence.parent.max_tokens
        if -(-longest // size) >= memory.pool.capacity:
            # A copy needs source and target at once, and this sequence may need every block of the pool.
            grain = math.lcm(grain, size)
        match = memory.match(sequence.slots.keys, request.namespace)
        length = min(match.length, sequence.cacheable)
        length -= length % grain
        sequence.match = Match(match.blocks[: -(-length // size)], length)
        sequence.match_version = memory.tree.version
    return sequence.match
