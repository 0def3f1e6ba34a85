"""Which slots of the pool a row reads, and how: long runs of neighbouring blocks in place, the rest gathered.

However fragmented the pool is, a row is read in few pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

IN_PLACE_SLOTS = 256  # shorter runs cost more in calls than a gather costs in copies


@dataclass(frozen=True)
class Run:
    """Slots of a sequence that lie side by side in one slab."""

    slab: int
    start: int  # first slot within the slab
    slots: range  # the sequence's slots


@dataclass(frozen=True)
class Read:
    """Slots of one slab to be read as one piece."""

    slab: int
    at: slice | torch.Tensor  # which slots of the slab: a run of them, or an index to gather by
    slots: tuple[range, ...]  # the sequence's slots they are, in this order


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
        slab, local = divmod(blocks[index], slab_blocks)
        runs.append(Run(slab, local * block_size + slot % block_size, range(slot, stop)))
        slot = stop
    return runs


def plan_reads(runs: Sequence[Run], device: torch.device) -> list[Read]:
    """Long runs, and a run that is alone, are read in place; the others are gathered, slab by slab."""
    reads: list[Read] = []
    short: dict[int, list[Run]] = {}
    for run in runs:
        count = len(run.slots)
        if count >= IN_PLACE_SLOTS or len(runs) == 1:
            reads.append(Read(run.slab, slice(run.start, run.start + count), (run.slots,)))
        else:
            short.setdefault(run.slab, []).append(run)
    for slab, group in short.items():
        index = torch.cat([torch.arange(run.start, run.start + len(run.slots)) for run in group])
        reads.append(Read(slab, index.to(device), tuple(run.slots for run in group)))
    return reads
