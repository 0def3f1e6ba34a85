"""Fast rows, and slow rows that renew their evidence, as the kernels read them. Does not import Triton."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from skim.attention.cuda.layout import needs_positions
from skim.attention.step import Step

WIDTHS = (0, 512, 2048, 4096, 8192, 16384)  # numbers of blocks that graphs distinguish


@dataclass(frozen=True)
class FastRows:
    """The fast rows of a step, as the kernels that choose their blocks read them."""

    picks: torch.Tensor  # [rows, 4] int32: best, sinks, recent as in `Picks`; slots to read, 0 if slow
    evidence: torch.Tensor  # [rows, 4] int32: address (two entries), blocks, 0; zeros for none
    width: int  # at least the blocks of every fast row, a power of two
    mass: torch.Tensor  # [rows, KV heads of all layers with summaries] float32


@dataclass(frozen=True)
class RenewingRows:
    """The slow rows of a step that renew their evidence."""

    picks: torch.Tensor  # of `FastRows`
    evidence: torch.Tensor
    width: int  # at least the blocks of every such row, a power of two


def width_of(blocks: int) -> int:
    """The width of tensors with an entry for each block of a fast row; 0 for no blocks."""
    if blocks <= WIDTHS[-1]:
        return next(width for width in WIDTHS if width >= blocks)
    return 1 << (blocks - 1).bit_length()


def fill_glances(
    step: Step, picks: np.ndarray, evidence: np.ndarray, single: list[int]
) -> tuple[list[int], tuple[int, int]]:
    """Fill the tables of `FastRows` for the rows with one query, `single`; the others have zeros.

    Returns the slots that each of these rows reads, and the widths of fast and of renewing rows.
    """
    size = step.pool.block_size
    picks[:] = 0
    evidence[:] = 0
    lengths = [step.rows[index].length for index in single]
    reads, fast, renewing = list(lengths), 0, 0
    for place, index in enumerate(single):
        chosen, known = step.picks[index], step.rows[index].evidence
        if chosen is not None:
            reads[place] -= (chosen.blocks - chosen.reads) * size
            picks[index] = chosen.best, chosen.sinks, chosen.recent, reads[place]
            fast = max(fast, chosen.blocks)
        elif known is not None:
            renewing = max(renewing, -(-lengths[place] // size))
        if known is not None:
            evidence[index, :2].view(np.int64)[0] = known.shares.data_ptr()
            evidence[index, 2] = known.shares.shape[2]
    if step.pool.windowed and any(needs_positions(row, windowed=True) for row in step.rows):
        reads = lengths  # such rows are read whole in layers with a sliding window
    return reads, (width_of(fast), width_of(renewing))
