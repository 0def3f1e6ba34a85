"""Sequences as the scheduler sees them: what they hold, what is left to compute, what is there already.

A prompt that is read by a policy is cut at multiples of the policy's blocks, where it begins on a prefix as
well as where its chunks end. What it reads, and so its text, then does not depend on who runs beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from skim.attention.blocksparse.policy import BLOCK
from skim.engine.scheduler import Candidate
from skim.engine.sequence import Sequence
from skim.memory.manager import MemoryManager
from skim.memory.prefix import Match

LOOKAHEAD = 16  # waiting sequences considered in one step


def candidates_of(sequences: Iterable[Sequence], memory: MemoryManager) -> list[Candidate]:
    """One for each sequence that runs, and for the first that wait; in their order.

    A sequence that waits remembers the prefix it would start on (`Sequence.match`).
    """
    found = []
    lookahead = LOOKAHEAD
    for sequence in sequences:
        if sequence.table is None:
            if lookahead == 0:
                continue
            lookahead -= 1
        found.append(_candidate(sequence, memory))
    return found


def _candidate(sequence: Sequence, memory: MemoryManager) -> Candidate:
    table = sequence.table
    slots = 1 + len(sequence.followers)
    grain = _grain(sequence)
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
        )
    return Candidate(
        order=sequence.order,
        running=True,
        decoding=sequence.decoding,
        pending=len(sequence.tokens) - table.length,
        length=table.length,
        blocks=len(table.blocks),
        copies_tail=memory.must_copy_tail(table),
        waited=sequence.waited,
        slots=slots,
        grain=grain,
    )


def _grain(sequence: Sequence) -> int:
    return 1 if sequence.request.policy is None else BLOCK


def _match(sequence: Sequence, memory: MemoryManager) -> Match:
    """The prefix a waiting sequence would start on; looked up again only when the tree has changed."""
    request = sequence.request
    if request.use_prefix_cache and sequence.match_version != memory.tree.version:
        size, grain = memory.pool.block_size, _grain(sequence)
        longest = sequence.slots.prompt + request.max_tokens
        if -(-longest // size) >= memory.pool.capacity:
            # Copying from a shared block needs both at once, and this one may need every block there is.
            grain = math.lcm(grain, size)
        match = memory.match(sequence.slots.keys, request.namespace)
        length = match.length - match.length % grain
        sequence.match = Match(match.blocks[: -(-length // size)], length)
        sequence.match_version = memory.tree.version
    return sequence.match
