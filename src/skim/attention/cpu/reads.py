"""Reads of a row's slots from the pool: long runs in place, short runs gathered.

A row is read in few pieces, however fragmented the pool is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skim.memory.runs import Run

IN_PLACE_SLOTS = 256  # shorter runs cost more in calls than a gather costs in copies


@dataclass(frozen=True)
class Read:
    """Slots of one slab that are read as one piece."""

    slab: int
    at: slice | torch.Tensor  # the slab's slots: a run of them, or an index to gather by
    slots: tuple[range, ...]  # the sequence's slots, in the same order


def group_runs(runs: Sequence[Run], device: torch.device) -> list[Read]:
    """Read long runs and a single run in place; gather the others, one read per slab."""
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
