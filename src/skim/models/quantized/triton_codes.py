"""Coded weights in Triton: how kernels read the planes that `format.py` describes.

Kernels read codes in *words* of 32 bits. A run of 32 columns has four places for words. The word at place w
of a run holds eight *parts*, which kernels take one at a time. Part (B, H) is this column of the run:

    4 w + B + 16 H      (B = 0, 1, 2, 3; H = 0, 1)

Codes of 8 bits have two words at each place, one for each H. So a kernel sees the same parts for all kinds of
codes, and moves no number from thread to thread.

Bit operations make float32 numbers of parts, without a conversion, in two ways:

    part    `raised + code`: 0x43000000 is 128, and its bits 16 to 22 count in ones.
    field   `code * 2 ** (bit - 149)`: the bits of a code, left where they are, are a tiny float. Inputs that
            are raised by `2 ** (64 - bit)` make up for it. One operation for each code.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from typing import Any

import torch
import triton
import triton.language as tl

from skim.models.quantized.format import CodedWeight

RAISE = 64  # the exponent by which inputs are raised where fields are multiplied


def kind_of(weight: CodedWeight) -> dict[str, Any]:
    """Constants of a kernel that reads this weight."""
    float8 = weight.low.dtype == torch.float8_e4m3fn
    if weight.offset is None:
        offsets = "none" if float8 or weight.zero == 0 else "constant"
    else:
        offsets = "added" if weight.offset.dtype.is_floating_point else "zeros"
    if weight.factor is not None and weight.offset is not None:
        offsets = "factored"
    return {
        "BITS": weight.bits,
        "GROUP": weight.group,
        "FLOAT8": float8,
        "OFFSETS": offsets,
        "FACTORS": 0 if weight.factor is None else weight.factor.shape[2],
        "ZERO": weight.zero,
    }


def planes_of(weight: CodedWeight) -> tuple[torch.Tensor, ...]:
    """Arguments of a kernel that reads this weight. `low` stands for missing planes."""
    low = weight.low.view(torch.int32)
    high = low if weight.high is None else weight.high.view(torch.int32)
    offset = low if weight.offset is None else weight.offset
    factor = low if weight.factor is None else weight.factor
    return low, high, weight.scale, offset, factor


@triton.constexpr_function
def raised_by(bits, float8):
    """How much `part` adds to a code."""
    if float8:
        return 0.0
    return 256.0 if bits == 8 else 128.0


@triton.jit
def read_words(low_ptr, high_ptr, row, place, runs, mask, BITS: tl.constexpr):
    """Words of codes: those with parts of H = 0 and of H = 1, and the matching bits of the high plane.

    row: int64. place: counts words of a row. All are of shapes that broadcast to each other.
    """
    if BITS == 8:
        at = low_ptr + row * (runs * 8) + (place // 4 * 8 + place % 4)
        first = tl.load(at, mask=mask, other=0, eviction_policy="evict_first")
        second = tl.load(at + 4, mask=mask, other=0, eviction_policy="evict_first")
    else:
        first = tl.load(low_ptr + row * (runs * 4) + place, mask=mask, other=0, eviction_policy="evict_first")
        second = first
    high = first
    if BITS == 5:  # bit B + 16 H belongs to part (B, H)
        high = tl.load(high_ptr + row * runs + place // 4, mask=mask, other=0)
        high = high >> (place % 4 * 4)
    elif BITS == 6:  # bits 8 B + 4 H and the next belong to part (B, H), like those of the low plane
        high = tl.load(high_ptr + row * (runs * 2) + (place // 4 * 2 + place % 2), mask=mask, other=0)
        high = high >> (place % 4 // 2 * 2)
    return first, second, high


@triton.jit
def shifted(word, LEFT: tl.constexpr):
    """Shift left; a negative number of bits is to the right."""
    return (word << LEFT) if LEFT > 0 else (word >> -LEFT)


@triton.jit
def part(first, second, high, B: tl.constexpr, H: tl.constexpr, BITS: tl.constexpr, FLOAT8: tl.constexpr):
    """Part (B, H) of words: `raised_by` plus its code, or the value of an e4m3 code. float32"""
    if FLOAT8:
        byte = shifted(second if H else first, -8 * B)
        bits = ((byte & 127) << 20) | ((byte & 128) << 24)
        value = (
            bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
        )  # 2 ** 120: the exponents' biases differ
        value = tl.where((byte & 127) == 127, float("nan"), value)
    else:
        if BITS == 8:
            bits = (shifted(second if H else first, 15 - 8 * B) & 0x007F8000) | 0x43800000
        else:
            bits = (shifted(first, 16 - 8 * B - 4 * H) & 0x000F0000) | 0x43000000
            if BITS == 5:
                bits |= shifted(high, 20 - B - 16 * H) & 0x00100000
            elif BITS == 6:
                bits |= shifted(high, 20 - 8 * B - 4 * H) & 0x00300000
        value = bits.to(tl.float32, bitcast=True)
    return value


@triton.constexpr_function
def field_bit(b, h, bits, float8):
    """The bit at which `field` leaves part (b, h)."""
    if float8:
        return 0
    if bits == 8:
        return 8 * (b % 2)
    bit = 8 * b + 4 * h
    return bit - 12 if bit > 16 else bit


@triton.constexpr_function
def input_factor(b, h, bits, float8):
    """What makes up for a field's size, together with `sum_factor`."""
    return 2.0 ** (RAISE - field_bit(b, h, bits, float8))


@triton.constexpr_function
def sum_factor(float8):
    return 2.0 ** ((120 if float8 else 149) - RAISE)


@triton.constexpr_function
def tiny_factor(b, h, bits, float8):
    """What makes a code of a field, up to the factor 2 ** -RAISE."""
    return 2.0 ** ((120 if float8 else 149) - field_bit(b, h, bits, float8) - RAISE)


@triton.jit
def field(first, second, high, B: tl.constexpr, H: tl.constexpr, BITS: tl.constexpr, FLOAT8: tl.constexpr):
    """Part (B, H) of words as a tiny float32: times 2 ** (field_bit - 149), or e4m3 codes times 2 ** -120.

    An e4m3 code of NaN becomes 480; `words_with_nan` finds it.
    """
    bit: tl.constexpr = field_bit(B, H, BITS, FLOAT8)
    if FLOAT8:  # the sign stays at the top, the other bits go to 20 to 26
        bits = (shifted(second if H else first, 24 - 8 * B) >> 4) & -0x78100000
    elif BITS == 8:
        bits = shifted(second if H else first, bit - 8 * B) & (0xFF << bit)
    else:
        bits = shifted(first, bit - 8 * B - 4 * H) & (0xF << bit)
        if BITS == 5:
            bits |= shifted(high, bit + 4 - B - 16 * H) & (0x10 << bit)
        elif BITS == 6:
            bits |= shifted(high, bit + 4 - 8 * B - 4 * H) & (0x30 << bit)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def words_with_nan(word):
    """Whether a word has an e4m3 code of NaN: seven ones beside the sign."""
    return (((word & 0x7F7F7F7F) + 0x01010101) & -0x7F7F7F80) != 0


@triton.jit
def affine(
    scale_ptr, offset_ptr, factor_ptr, row, group, groups, mask,
    GROUP: tl.constexpr, OFFSETS: tl.constexpr, FACTORS: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Scale and offset of groups, computed like `CodedWeight.affine`. float32"""
    at = row * groups + group
    scale = tl.load(scale_ptr + at, mask=mask, other=0).to(tl.float32)
    if FACTORS > 0:
        PER: tl.constexpr = 256 // GROUP
        factor_at = factor_ptr + (row * (groups // PER) + group // PER) * FACTORS
        scale *= tl.load(factor_at, mask=mask, other=0.0).to(tl.float32)
    if OFFSETS == "none":
        offset = scale * 0.0
    elif OFFSETS == "constant":
        offset = scale * -ZERO
    else:
        offset = tl.load(offset_ptr + at, mask=mask, other=0).to(tl.float32)
        if OFFSETS == "factored":
            offset *= -tl.load(factor_at + 1, mask=mask, other=0.0).to(tl.float32)
        elif OFFSETS == "zeros":
            offset = scale * -offset
    return scale, offset


@triton.jit
def four(ptr, place, H: tl.constexpr, mask):
    """The inputs of parts (0, H) to (3, H) of the words at these places, as float32."""
    if ptr.dtype.element_ty.primitive_bitwidth == 16:
        all_ptr = ptr.to(tl.pointer_type(tl.int64)) + (place // 4 * 8 + place % 4)
        word = tl.load(all_ptr + 4 * H, mask=mask, other=0, eviction_policy="evict_last")
        early = word.to(tl.int32)
        late = (word >> 32).to(tl.int32)
        if ptr.dtype.element_ty == tl.bfloat16:
            a = (early << 16).to(tl.float32, bitcast=True)
            b = (early & -65536).to(tl.float32, bitcast=True)
            c = (late << 16).to(tl.float32, bitcast=True)
            d = (late & -65536).to(tl.float32, bitcast=True)
        else:
            a = early.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            b = (early >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            c = late.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            d = (late >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        ptr += place // 4 * 32 + place % 4 * 4 + 16 * H
        a = tl.load(ptr, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        b = tl.load(ptr + 1, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        c = tl.load(ptr + 2, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        d = tl.load(ptr + 3, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    return a, b, c, d
