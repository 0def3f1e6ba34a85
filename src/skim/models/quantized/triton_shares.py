"""Programs that share the columns of a product: the last of them to end adds up their sums.

No second kernel is launched for it. Sums are added in the order of the programs, not in the order in which
they end, so a product gives the same bits every time.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import functools

import torch
import triton
import triton.language as tl

from skim.models.quantized.format import CodedWeight

MOST_TILES = 8192  # tiles of rows that programs may share
PROGRAMS, LEAST = 256, 512  # programs that fill a GPU, and columns that are worth a program


def splits_for(weight: CodedWeight, rows: int) -> int:
    """Programs that should share the columns of a tile of so many rows: enough to fill a GPU."""
    tiles, splits = triton.cdiv(weight.rows, rows), 1
    while tiles * splits < PROGRAMS and weight.columns >= 2 * splits * LEAST:
        splits *= 2
    return splits


def room_for(tiles: int, splits: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The last arguments of `add_shares`, for tiles of `size` sums."""
    assert splits == 1 or tiles <= MOST_TILES
    count = tiles * splits * size if splits > 1 else 1
    return torch.empty(count, dtype=torch.float32, device=device), _counts(device)


@functools.cache
def _counts(device: torch.device) -> torch.Tensor:
    """Programs of each tile that have ended. A product leaves zeros; no two of a device run at once."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


@triton.jit
def add_shares(total, sums_ptr, counts_ptr, SPLITS: tl.constexpr):
    """Write this program's sums. Returns whether it is the last of its tile, and then the sums of all."""
    SIZE: tl.constexpr = total.shape[0] * total.shape[1]
    inner = tl.arange(0, total.shape[0])[:, None] * total.shape[1] + tl.arange(0, total.shape[1])[None, :]
    sums_ptr += tl.program_id(0).to(tl.int64) * (SPLITS * SIZE)
    counts_ptr += tl.program_id(0)
    tl.store(sums_ptr + tl.program_id(1) * SIZE + inner, total)
    tl.debug_barrier()  # all threads have written before one of them counts
    last = tl.atomic_add(counts_ptr, 1, sem="acq_rel") == SPLITS - 1
    if last:
        total = tl.load(sums_ptr + inner, cache_modifier=".cg")
        for split in tl.static_range(1, SPLITS):
            total += tl.load(sums_ptr + split * SIZE + inner, cache_modifier=".cg")
        tl.store(counts_ptr, 0)
    return last, total
