"""The product of a coded weight and one token, as fast as the codes can be read."""

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
    four,
    input_factor,
    kind_of,
    planes_of,
    read_words,
    sum_factor,
    words_with_nan,
)


@triton.jit
def add_parts(
    total, first, second, high, a, b, c, d, H: tl.constexpr, BITS: tl.constexpr, FLOAT8: tl.constexpr
):  # fmt: skip
    """Add the parts (0, H) to (3, H), each times its input. The sum is smaller by `sum_factor`."""
    a *= input_factor(0, H, BITS, FLOAT8)
    b *= input_factor(1, H, BITS, FLOAT8)
    c *= input_factor(2, H, BITS, FLOAT8)
    d *= input_factor(3, H, BITS, FLOAT8)
    total = tl.fma(field(first, second, high, 0, H, BITS, FLOAT8), a[:, None], total)
    total = tl.fma(field(first, second, high, 1, H, BITS, FLOAT8), b[:, None], total)
    total = tl.fma(field(first, second, high, 2, H, BITS, FLOAT8), c[:, None], total)
    total = tl.fma(field(first, second, high, 3, H, BITS, FLOAT8), d[:, None], total)
    if FLOAT8:
        total = tl.where(words_with_nan(second if H else first), float("nan"), total)
    return total


@triton.jit
def begin_sum(
    inputs, ROWS: tl.constexpr, OFFSETS: tl.constexpr, ZERO: tl.constexpr, FLOAT8: tl.constexpr
):  # fmt: skip
    """What `add_parts` begins with: nothing, or what a constant zero point takes from each input."""
    PAIRS: tl.constexpr = inputs.shape[0]
    total = tl.zeros([PAIRS, ROWS, 2], tl.float32)
    if OFFSETS == "constant":
        total += (inputs * (-ZERO / sum_factor(FLOAT8)))[:, None]
    return total


@triton.jit
def vector_kernel(
    out_ptr,  # [rows]
    given_ptr,  # [columns]
    low_ptr,
    high_ptr,
    scale_ptr,
    offset_ptr,
    factor_ptr,
    bias_ptr,  # [rows]
    rows,
    runs,
    HAS_BIAS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    FLOAT8: tl.constexpr,
    OFFSETS: tl.constexpr,
    FACTORS: tl.constexpr,
    ZERO: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    EVEN: tl.constexpr,  # whether PAIRS divides a row's pairs of words
):
    """Multiply ROWS rows of the weight by the token, PAIRS pairs of words at a time.

    A thread reads pairs of words, because it can read the inputs of a pair at once.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    row = tl.minimum(row, rows - 1).to(tl.int64)  # the last program reads its last row again
    groups = runs * 32 // GROUP
    scaled = tl.zeros([PAIRS, ROWS], tl.float32)
    added = tl.zeros([PAIRS, ROWS], tl.float32)
    for begin in range(0, runs * 2, PAIRS):
        pair = begin + tl.arange(0, PAIRS)
        place = pair[:, None] * 2 + tl.arange(0, 2)[None, :]
        inside = (pair < runs * 2) | EVEN
        first, second, high = read_words(
            low_ptr, high_ptr, row[None, :, None], place[:, None], runs, inside[:, None, None], BITS
        )
        a, b, c, d = four(given_ptr, place, 0, inside[:, None])
        e, f, g, h = four(given_ptr, place, 1, inside[:, None])
        early = (a + b) + (c + d)
        late = (e + f) + (g + h)
        group = (pair // 2 * (32 // GROUP) if GROUP < 32 else pair // (GROUP // 16))[:, None]
        scale, offset = affine(
            scale_ptr, offset_ptr, factor_ptr, row[None, :], group, groups, inside[:, None],
            GROUP, OFFSETS, FACTORS, ZERO,
        )  # fmt: skip
        if GROUP == 16:
            total = begin_sum(early, ROWS, OFFSETS, ZERO, FLOAT8)
            total = add_parts(total, first, second, high, a, b, c, d, 0, BITS, FLOAT8)
            scaled = tl.fma(scale, tl.sum(total, axis=2), scaled)
            if OFFSETS != "constant":
                added = tl.fma(offset, tl.sum(early, axis=1)[:, None], added)
            scale, offset = affine(
                scale_ptr, offset_ptr, factor_ptr, row[None, :], group + 1, groups, inside[:, None],
                GROUP, OFFSETS, FACTORS, ZERO,
            )  # fmt: skip
            total = begin_sum(late, ROWS, OFFSETS, ZERO, FLOAT8)
        else:
            late += early
            total = begin_sum(late, ROWS, OFFSETS, ZERO, FLOAT8)
            total = add_parts(total, first, second, high, a, b, c, d, 0, BITS, FLOAT8)
        total = add_parts(total, first, second, high, e, f, g, h, 1, BITS, FLOAT8)
        scaled = tl.fma(scale, tl.sum(total, axis=2), scaled)
        if OFFSETS != "constant" and OFFSETS != "none":
            added = tl.fma(offset, tl.sum(late, axis=1)[:, None], added)
    product = tl.sum(scaled, axis=0) * sum_factor(FLOAT8) + tl.sum(added, axis=0)
    if HAS_BIAS:
        product += tl.load(bias_ptr + row).to(tl.float32)
    tl.store(out_ptr + row, product.to(out_ptr.dtype.element_ty), mask=exists)


MANY_ROWS = 8192  # that keep a GPU busy with few warps for each
LONG = 8192  # columns


class Launch(NamedTuple):
    """How the kernel is launched."""

    rows: int
    pairs: int
    """32 for each warp: a thread then has all of the rows, and reads its inputs once."""
    warps: int


def choose(weight: CodedWeight) -> Launch:
    """The launch for a weight of this shape. Long rows take more warps, many rows take fewer."""
    pairs = weight.columns // 16
    most = 2 if weight.rows >= MANY_ROWS else 4 if weight.columns <= LONG else 8
    fitting = [warps for warps in (8, 4, 2, 1) if warps <= most and pairs % (32 * warps) == 0]
    warps = fitting[0] if fitting else 4 if pairs > 512 else 1
    return Launch(4 if weight.bits == 8 else 8, 32 * warps, warps)


def multiply_one(
    given: torch.Tensor,
    weight: CodedWeight,
    bias: torch.Tensor | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """`linear` for one token, [1, columns] -> [1, rows]. `given` has its columns in the weight's order."""
    launch = launch or choose(weight)
    runs = weight.columns // RUN
    given = aligned(given)
    out = given.new_empty(1, weight.rows)
    vector_kernel[(triton.cdiv(weight.rows, launch.rows),)](
        out,
        given,
        *planes_of(weight),
        given if bias is None else bias.contiguous(),
        weight.rows,
        runs,
        HAS_BIAS=bias is not None,
        **kind_of(weight),
        ROWS=launch.rows,
        PAIRS=launch.pairs,
        EVEN=runs * 2 % launch.pairs == 0,
        num_warps=launch.warps,
    )
    return out
