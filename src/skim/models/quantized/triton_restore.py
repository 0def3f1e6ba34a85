"""Restore rows of a coded weight on a GPU: for products with many tokens, and for embeddings."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl

from skim.models.quantized.format import RUN, CodedWeight
from skim.models.quantized.triton_codes import affine, kind_of, part, planes_of, raised_by, read_words

PLACES, WARPS = 512, 4  # words of a row that a program restores


@triton.jit
def store_four(out_ptr, place, H: tl.constexpr, a, b, c, d, mask):
    """Write parts (0, H) to (3, H) of the words at these places."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if dtype.primitive_bitwidth == 16:  # together
        a = a.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        b = b.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16
        c = c.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        d = d.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16
        word = (a | b).to(tl.int64) & 0xFFFFFFFF | (c | d).to(tl.int64) << 32
        tl.store(out_ptr.to(tl.pointer_type(tl.int64)) + place // 4 * 8 + place % 4 + 4 * H, word, mask=mask)
    else:
        out_ptr += place // 4 * 32 + place % 4 * 4 + 16 * H
        tl.store(out_ptr, a, mask=mask)
        tl.store(out_ptr + 1, b, mask=mask)
        tl.store(out_ptr + 2, c, mask=mask)
        tl.store(out_ptr + 3, d, mask=mask)


@triton.jit
def restore_kernel(
    out_ptr,  # [chosen, columns]
    chosen_ptr,  # [chosen] int64, with CHOSEN
    low_ptr,
    high_ptr,
    scale_ptr,
    offset_ptr,
    factor_ptr,
    runs,
    CHOSEN: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    FLOAT8: tl.constexpr,
    OFFSETS: tl.constexpr,
    FACTORS: tl.constexpr,
    ZERO: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Restore PLACES words of one row: `scale * code + offset`, rounded like `CodedWeight.restore`."""
    target = tl.program_id(0).to(tl.int64)
    row = tl.load(chosen_ptr + target) if CHOSEN else target
    out_ptr += target * (runs * 32)
    place = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    mask = place < runs * 4
    raised: tl.constexpr = raised_by(BITS, FLOAT8)
    groups = runs * 32 // GROUP
    first, second, high = read_words(low_ptr, high_ptr, row, place, runs, mask, BITS)
    group = place // 4 * (32 // GROUP) if GROUP < 32 else place // (GROUP // 8)
    scale, offset = affine(
        scale_ptr, offset_ptr, factor_ptr, row, group, groups, mask, GROUP, OFFSETS, FACTORS, ZERO
    )
    for H in tl.static_range(2):
        if H == 1 and GROUP == 16:
            scale, offset = affine(
                scale_ptr, offset_ptr, factor_ptr, row, group + 1, groups, mask, GROUP, OFFSETS, FACTORS, ZERO
            )
        a = tl.fma(part(first, second, high, 0, H, BITS, FLOAT8) - raised, scale, offset)
        b = tl.fma(part(first, second, high, 1, H, BITS, FLOAT8) - raised, scale, offset)
        c = tl.fma(part(first, second, high, 2, H, BITS, FLOAT8) - raised, scale, offset)
        d = tl.fma(part(first, second, high, 3, H, BITS, FLOAT8) - raised, scale, offset)
        store_four(out_ptr, place, H, a, b, c, d, mask)


def restore_stored(
    weight: CodedWeight, dtype: torch.dtype, chosen: torch.Tensor | None = None
) -> torch.Tensor:
    """`CodedWeight.restore_stored`, of all rows or of the chosen ones. chosen: int64 [n]"""
    runs = weight.columns // RUN
    count = weight.rows if chosen is None else len(chosen)
    out = torch.empty(count, weight.columns, dtype=dtype, device=weight.device)
    if count:
        restore_kernel[(count, triton.cdiv(runs * 4, PLACES))](
            out,
            out if chosen is None else chosen.contiguous(),
            *planes_of(weight),
            runs,
            CHOSEN=chosen is not None,
            **kind_of(weight),
            PLACES=PLACES,
            num_warps=WARPS,
        )
    return out
