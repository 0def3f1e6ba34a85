"""The product of a weight with codes of 4 bits in large groups and a few tokens, on tensor cores.

Kernels of `triton_matrix.py` make a float32 number of each code, multiply it by its scale and round it: that
takes longer than reading the codes. Here a code stays a small whole number, which 16 bits hold exactly:

- A word holds eight codes. Bit operations move two of them into the mantissas of two 16-bit numbers,
  `raised + code`, and one instruction takes `raised + zero` off both: less than two instructions a code.
- Tensor cores add up the products of a group in float32. The scale multiplies that sum, not each code.
- A product adds up its columns in any order. They are taken so that a thread needs the whole words that it
  has read: no number goes to another thread.

With few rows, programs share the columns of a row (`triton_shares.py`).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from skim.models.quantized.format import RUN, CodedWeight
from skim.models.quantized.triton_codes import aligned, kind_of, planes_of
from skim.models.quantized.triton_halves import has_assembly
from skim.models.quantized.triton_shares import add_shares, room_for, splits_for

MOST_TOKENS = 32


@triton.constexpr_function
def raised_by(dtype):
    """The number whose last digits in this type count in ones."""
    return 1024 if dtype == tl.float16 else 128


@triton.constexpr_function
def unpack_assembly(dtype, less):
    """PTX for `unpack`: $8 is a word, `less` a pair of `-raised - zero`; the codes are $0 to $7."""
    raised, one, kind = ("0x6400", "0x3C00", "f16") if dtype == tl.float16 else ("0x4300", "0x3F80", "bf16")
    lines = [".reg .b32 early, late, pair, one, less;", f"mov.b32 one, {one}{one[2:]};"]
    lines.append(f"mov.b32 less, {less};")
    lines += ["prmt.b32 early, $8, 0, 0x4140;", "prmt.b32 late, $8, 0, 0x4342;"]  # bytes 0 and 1, 2 and 3
    for at in range(4):
        taken = ("early", "late")[at % 2]
        if at // 2:
            lines.append(f"shr.u32 pair, {taken}, 4;")
            taken = "pair"
        lines.append(f"lop3.b32 pair, {taken}, 0x000F000F, {raised}{raised[2:]}, 0xEA;")  # and, then or
        lines.append(f"fma.rn.{kind}x2 pair, pair, one, less;")
        lines.append(f"mov.b32 {{${2 * at}, ${2 * at + 1}}}, pair;")
    return "{" + " ".join(lines) + "}"


@triton.constexpr_function
def constant_pair(dtype, zero):
    """`less` for one zero point."""
    return str(
        ((0xE400 if dtype == tl.float16 else 0xC300) + zero) * 0x10001
    )  # its last digits count in ones


@triton.jit
def code_of(word, zero, B: tl.constexpr, H: tl.constexpr, dtype: tl.constexpr):
    """Part (B, H) of words, less the zero point."""
    return (((word >> (8 * B + 4 * H)) & 15).to(tl.float32) - zero).to(dtype)


@triton.jit
def unpack(words, offset_ptr, at, OFFSETS: tl.constexpr, ZERO: tl.constexpr, dtype: tl.constexpr,
           ASSEMBLY: tl.constexpr):  # fmt: skip
    """The codes of words less their zero points, with the columns of `inputs_of`.

    words: [rows, places]; at: where each row's zero point is -> [8 * places, rows]
    """
    shape: tl.constexpr = words.shape
    if OFFSETS == "zeros":
        zero = tl.load(offset_ptr + at).to(tl.float32)
    else:
        zero = tl.full([shape[0]], ZERO, tl.float32)
    if ASSEMBLY and OFFSETS == "zeros":
        less = (-zero - raised_by(dtype)).to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            unpack_assembly(dtype, "$9"), "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [words, tl.broadcast_to((less | (less << 16))[:, None], shape)],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True, pack=1,
        )  # fmt: skip
    elif ASSEMBLY:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            unpack_assembly(dtype, constant_pair(dtype, ZERO)), "=h,=h,=h,=h,=h,=h,=h,=h,r",
            [words], dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        zero = zero[:, None]
        a, b = code_of(words, zero, 0, 0, dtype), code_of(words, zero, 1, 0, dtype)
        c, d = code_of(words, zero, 2, 0, dtype), code_of(words, zero, 3, 0, dtype)
        e, f = code_of(words, zero, 0, 1, dtype), code_of(words, zero, 1, 1, dtype)
        g, h = code_of(words, zero, 2, 1, dtype), code_of(words, zero, 3, 1, dtype)
    early = tl.join(tl.join(a, b), tl.join(c, d))  # [rows, places, B % 2, B // 2]
    late = tl.join(tl.join(e, f), tl.join(g, h))
    codes = tl.permute(tl.join(early, late), (4, 3, 1, 2, 0))  # [H, B // 2, places, B % 2, rows]
    return tl.reshape(codes, [8 * shape[1], shape[0]]).to(dtype, bitcast=True)


@triton.jit
def inputs_of(given):
    """The inputs of a group in the order of columns that `unpack` has: H, B // 2, place, B % 2."""
    shape: tl.constexpr = given.shape
    split = tl.reshape(given, [shape[0], shape[1] // 32, 2, 4, 2, 2])  # [tokens, run, H, w, B // 2, B % 2]
    return tl.reshape(tl.permute(split, (0, 2, 4, 1, 3, 5)), shape)


@triton.jit(do_not_specialize=["tokens", "steps"])
def pairs_kernel(
    out_ptr,  # [tokens, rows]
    given_ptr,  # [tokens, columns]
    low_ptr,
    scale_ptr,
    offset_ptr,
    bias_ptr,  # [rows]
    sums_ptr,  # of `add_shares`
    counts_ptr,
    tokens,
    rows,
    runs,
    steps,  # groups of a row that a program reads
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSETS: tl.constexpr,
    ZERO: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Multiply ROWS rows by the tokens, over some of the groups, one group at a time."""
    PLACES: tl.constexpr = GROUP // 8
    dtype: tl.constexpr = given_ptr.dtype.element_ty
    groups = runs // (GROUP // 32)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.minimum(row, rows - 1).to(tl.int64)  # the last program reads its last row again
    token = tl.arange(0, TOKENS)
    live = token < tokens
    low_at = low_ptr + at[:, None] * (runs * 4) + tl.arange(0, PLACES)[None, :]
    given_at = given_ptr + token[:, None] * (runs * 32) + tl.arange(0, GROUP)[None, :]
    at *= groups
    begin = tl.program_id(1) * steps
    end = tl.minimum(begin + steps, groups)
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    for step in range(begin, end):
        words = tl.load(low_at + step * PLACES, eviction_policy="evict_first")
        given = tl.load(given_at + step * GROUP, mask=live[:, None], other=0.0)
        scale = tl.load(scale_ptr + at + step).to(tl.float32)
        codes = unpack(words, offset_ptr, at + step, OFFSETS, ZERO, dtype, ASSEMBLY)
        part = tl.dot(inputs_of(given), codes)
        total = tl.fma(part, tl.broadcast_to(scale[None, :], [TOKENS, ROWS]), total)
    last = True
    if SPLITS > 1:
        last, total = add_shares(total, sums_ptr, counts_ptr, SPLITS)
    if last:
        if HAS_BIAS:
            total += tl.load(bias_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
        out_at = out_ptr + token[:, None] * rows + row[None, :]
        tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=live[:, None] & (row < rows)[None, :])


class Launch(NamedTuple):
    """How the kernel is launched."""

    rows: int
    splits: int
    """Programs that share the columns of a row."""
    warps: int
    stages: int


def can_multiply(weight: CodedWeight, tokens: int, dtype: torch.dtype) -> bool:
    """Whether this kernel is made for such a product."""
    return (
        weight.bits == 4
        and weight.group >= 64
        and weight.factor is None
        and kind_of(weight)["OFFSETS"] != "added"
        and tokens <= MOST_TOKENS
        and dtype in (torch.bfloat16, torch.float16)
    )


def choose(weight: CodedWeight) -> Launch:
    """The launch for a weight of this shape."""
    return Launch(128, splits_for(weight, 128), 4, 4)


def multiply_pairs(
    given: torch.Tensor,
    weight: CodedWeight,
    bias: torch.Tensor | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """`linear` for up to 32 tokens. `given` has its columns in the weight's order. [tokens, columns]"""
    launch = launch or choose(weight)
    given = aligned(given)
    tokens, rows, device = len(given), weight.rows, given.device
    tiles, width = triton.cdiv(rows, launch.rows), max(16, triton.next_power_of_2(tokens))
    low, _, scale, offset, _ = planes_of(weight)
    out = given.new_empty(tokens, rows)
    pairs_kernel[(tiles, launch.splits)](
        out,
        given,
        low,
        scale,
        offset,
        given if bias is None else bias.contiguous(),
        *room_for(tiles, launch.splits, width * launch.rows, device),
        tokens,
        rows,
        weight.columns // RUN,
        triton.cdiv(weight.columns, weight.group * launch.splits),
        HAS_BIAS=bias is not None,
        GROUP=weight.group,
        OFFSETS=kind_of(weight)["OFFSETS"],
        ZERO=weight.zero,
        TOKENS=width,
        ROWS=launch.rows,
        SPLITS=launch.splits,
        ASSEMBLY=has_assembly(device),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return out
