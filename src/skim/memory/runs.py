"""Runs of neighbouring slots: a block table as the few stretches of memory that it covers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """Slots of a sequence that are neighbours in one slab."""

    slab: int
    start: int  # first slot within the slab
    slots: range  # the sequence's slots


def find_runs(blocks: Sequence[int], first: int, end: int, block_size: int, slab_blocks: int) -> list[Run]:
    """Group the slots `first : end` of a block table into runs of neighbouring slots."""
    runs: list[Run] = []
    slot = first
    while slot < end:
        index = slot // block_size
        last = index
        while (
            (last + 1) * block_size < end
            and blocks[last + 1] == blocks[last] + 1
            and blocks[last + 1] % slab_blocks != 0
        ):
            last += 1
        stop = min(end, (last + 1) * block_size)
        if blocks[index] < 0:
            raise AssertionError(f"slot {slot} was given back")
        slab, local = divmod(blocks[index], slab_blocks)
        runs.append(Run(slab, local * block_size + slot % block_size, range(slot, stop)))
        slot = stop
    return runs
