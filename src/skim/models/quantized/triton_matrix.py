"""The product of a coded weight and few tokens, on tensor cores.

A program restores values of some rows in registers, and multiplies each part of the words by its inputs. With
few rows, programs share the columns of a row (`triton_shares.py`).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from skim.models.quantized.format import RUN, CodedWeight
from skim.models.quantized.triton_codes import (
    affine,
    aligned,
    field,
    kind_of,
    part,
    planes_of,
    raised_by,
    read_words,
    tiny_factor,
    words_with_nan,
)
from skim.models.quantized.triton_shares import add_shares, room_for, splits_for


@triton.jit
def four_inputs(ptr, place, H: tl.constexpr, mask):
    """The inputs of parts (0, H) to (3, H) of the words at these places, in their own type."""
    dtype: tl.constexpr = ptr.dtype.element_ty
    if dtype.primitive_bitwidth == 16:
        word = tl.load(
            ptr.to(tl.pointer_type(tl.int64)) + place // 4 * 8 + place % 4 + 4 * H, mask=mask, other=0
        )
        a = word.to(tl.int16).to(dtype, bitcast=True)
        b = (word >> 16).to(tl.int16).to(dtype, bitcast=True)
        c = (word >> 32).to(tl.int16).to(dtype, bitcast=True)
        d = (word >> 48).to(tl.int16).to(dtype, bitcast=True)
    else:
        ptr += place // 4 * 32 + place % 4 * 4 + 16 * H
        a = tl.load(ptr, mask=mask, other=0.0)
        b = tl.load(ptr + 1, mask=mask, other=0.0)
        c = tl.load(ptr + 2, mask=mask, other=0.0)
        d = tl.load(ptr + 3, mask=mask, other=0.0)
    return a, b, c, d


@triton.jit
def add_part(
    total, first, second, high, scale, offset, given, B: tl.constexpr, H: tl.constexpr, BITS: tl.constexpr,
    FLOAT8: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """Add the product of part (B, H) of the words and its inputs."""
    if TINY:
        by = scale * tiny_factor(B, H, BITS, FLOAT8)
        value = tl.fma(field(first, second, high, B, H, BITS, FLOAT8), by, offset)
    else:
        value = tl.fma(part(first, second, high, B, H, BITS, FLOAT8), scale, offset)
    return tl.dot(value.to(given.dtype), tl.trans(given), total, input_precision="ieee")


@triton.jit(do_not_specialize=["tokens", "steps"])
def matrix_kernel(
    out_ptr,  # [tokens, rows]
    given_ptr,  # [tokens, columns]
    low_ptr,
    high_ptr,
    scale_ptr,
    offset_ptr,
    factor_ptr,
    bias_ptr,  # [rows]
    sums_ptr,  # of `add_shares`
    counts_ptr,
    tokens,
    rows,
    runs,
    steps,  # times PLACES words that a program reads
    HAS_BIAS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    FLOAT8: tl.constexpr,
    OFFSETS: tl.constexpr,
    FACTORS: tl.constexpr,
    ZERO: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,  # whether all programs read whole steps
):
    """Multiply ROWS rows by the tokens, over some of the columns."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    at = tl.minimum(row, rows - 1).to(tl.int64)[:, None]  # the last program reads its last row again
    token = tl.arange(0, TOKENS)
    live = token < tokens
    raised: tl.constexpr = raised_by(BITS, FLOAT8)
    TINY: tl.constexpr = GROUP >= PLACES * 8 and given_ptr.dtype.element_ty != tl.float16
    groups = runs * 32 // GROUP
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    given_ptr += token[:, None] * (runs * 32)
    begin = tl.program_id(1) * steps * PLACES
    for step in range(steps):
        start = begin + step * PLACES
        place = (start + tl.arange(0, PLACES))[None, :]
        inside = (place < runs * 4) | EVEN
        first, second, high = read_words(low_ptr, high_ptr, at, place, runs, inside, BITS)
        if GROUP >= PLACES * 8:
            group = start * 8 // GROUP + tl.zeros([1, 1], tl.int32)
            known = group < groups
        else:
            group = place // 4 * (32 // GROUP) if GROUP < 32 else place // (GROUP // 8)
            known = inside
        scale, offset = affine(
            scale_ptr, offset_ptr, factor_ptr, at, group, groups, known, GROUP, OFFSETS, FACTORS, ZERO
        )
        for H in tl.static_range(2):
            if H == 1 and GROUP == 16:
                scale, offset = affine(
                    scale_ptr, offset_ptr, factor_ptr, at, group + 1, groups, known, GROUP, OFFSETS, FACTORS,
                    ZERO,
                )  # fmt: skip
            if TINY:
                less = offset * 2.0**-64
                if FLOAT8:
                    less = tl.where(words_with_nan(second if H else first), float("nan"), less)
            else:
                less = offset - scale * raised
            a, b, c, d = four_inputs(given_ptr, place, H, live[:, None] & inside)
            total = add_part(total, first, second, high, scale, less, a, 0, H, BITS, FLOAT8, TINY)
            total = add_part(total, first, second, high, scale, less, b, 1, H, BITS, FLOAT8, TINY)
            total = add_part(total, first, second, high, scale, less, c, 2, H, BITS, FLOAT8, TINY)
            total = add_part(total, first, second, high, scale, less, d, 3, H, BITS, FLOAT8, TINY)
    if TINY:
        total *= 2.0**64
    last = True
    if SPLITS > 1:
        last, total = add_shares(total, sums_ptr, counts_ptr, SPLITS)
    if last:
        if HAS_BIAS:
            total += tl.load(bias_ptr + row, mask=exists, other=0.0).to(tl.float32)[:, None]
        out_at = out_ptr + token[None, :] * rows + row[:, None]
        tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=exists[:, None] & live[None, :])


class Launch(NamedTuple):
    """How the kernel is launched."""

    rows: int
    places: int
    """Words of a row in a step. 16 suits the layout in which tensor cores want them."""
    splits: int
    """Programs that share the columns of a row."""
    warps: int
    stages: int


def choose(weight: CodedWeight, tokens: int) -> Launch:
    """The launch for a weight of this shape. With more tokens, more rows share their inputs."""
    rows, warps = (64, 4) if tokens <= 8 else (128, 8)
    return Launch(rows, 16, splits_for(weight, rows), warps, 3)


def multiply_few(
    given: torch.Tensor,
    weight: CodedWeight,
    bias: torch.Tensor | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """`linear` for 1 to 64 tokens. `given` has its columns in the weight's order. [tokens, columns]"""
    launch = launch or choose(weight, len(given))
    splits, places = launch.splits, launch.places
    tokens, rows, runs = len(given), weight.rows, weight.columns // RUN
    tiles, width = triton.cdiv(rows, launch.rows), max(8, triton.next_power_of_2(tokens))
    given = aligned(given)
    out = given.new_empty(tokens, rows)
    steps = triton.cdiv(runs * 4, places * splits)
    matrix_kernel[(tiles, splits)](
        out,
        given,
        *planes_of(weight),
        given if bias is None else bias.contiguous(),
        *room_for(tiles, splits, launch.rows * width, given.device),
        tokens,
        rows,
        runs,
        steps,
        HAS_BIAS=bias is not None,
        **kind_of(weight),
        TOKENS=width,
        ROWS=launch.rows,
        PLACES=places,
        SPLITS=splits,
        EVEN=steps * splits * places == runs * 4,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return out
