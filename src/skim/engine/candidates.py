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
    tokens = len(sequence.tokens)
    if table is None:
        match = _match(sequence, memory)
        present = match.present()
        return Candidate(
            order=sequence.order,
            running=False,
            decoding=False,
            pending=tokens - match.length,
            length=match.length,
            blocks=match.blocks,
            copies_tail=match.length % memory.pool.block_size > 0,
            revives=sum(1 for block in present if memory.pool.refcount(block) == 0),
            ends=_ends(sequence, memory, match.blocks, len(present)),
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
        pending=tokens - table.length,
        length=table.length,
        blocks=len(table.blocks),
        copies_tail=memory.must_copy_tail(table),
        ends=_ends(sequence, memory, len(table.blocks), table.held) if not sequence.decoding else 0,
        restoring=sequence.restoring,
        waited=sequence.waited,
        slots=slots,
        grain=grain,
        priority=state.request.params.priority,
        arrived=state.arrived_at,
    )


def _ends(sequence: Sequence, memory: MemoryManager, blocks: int, held: int) -> int:
    """Blocks that the rest of the prompt takes and gives back, if `held` blocks are held now."""
    geometry = memory.pool.geometry
    if not geometry.ends or sequence.slots.is_late:
        return 0
    taken = len(geometry.windows) * max(0, -(-len(sequence.tokens) // geometry.block_size) - blocks)
    return taken - min(taken, max(0, geometry.blocks_of(len(sequence.tokens)) - held))


def grain_of(sequence: Sequence) -> int:
    return 1 if sequence.parent.request.policy is None else BLOCK


def _match(sequence: Sequence, memory: MemoryManager) -> Match:
    """The cached prefix a waiting sequence would start on; looked up again only if the tree has changed."""
    request = sequence.parent.request
    if request.use_prefix_cache and sequence.match_version != memory.tree.version:
        pool, grain, whole = memory.pool, grain_of(sequence), sequence.slots.is_late
        longest = sequence.slots.prompt + sequence.parent.max_tokens
        if pool.geometry.blocks_of(longest, whole=whole) + len(pool.groups) > pool.capacity:
            # A copy needs source and target at once, and this sequence may need every block of the pool.
            grain = math.lcm(grain, pool.block_size)
        keys = sequence.slots.keys
        if sequence.cacheable < len(keys):
            keys = keys[: sequence.cacheable + 1]  # a match leaves the last one out
        sequence.match = memory.match(keys, request.namespace, grain, whole=whole)
        sequence.match_version = memory.tree.version
    return sequence.match
