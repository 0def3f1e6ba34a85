"""Codes in Triton: how kernels read and make what `skim.memory`'s codecs store.

Kernels read codes in *units* of 16 bits, so that tensor cores get them straight from shared memory: a unit
becomes one element of each of its *parts*. Part p of unit j is this value of the head:

    int8, fp8:  2 j + p           (p = 0, 1)
    int4:       2 j + p           (p = 0, 1: low bits of two bytes, the first half of the head)
                dim / 2 + 2 j + p - 2   (p = 2, 3: their high bits)

A kernel returns at one place: Triton compiles what follows a return, too.

With `FAST`, two units at a time become bfloat16 by bit operations: 0x4300 is 128 in bfloat16, and its last
seven bits count in ones.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

import torch
import triton
import triton.language as tl

from skim.memory.codec import Codec
from skim.memory.fp8 import Fp8
from skim.memory.int4 import Int4, groups
from skim.memory.int8 import Int8

KINDS: dict[type[Codec], str] = {Int8: "int8", Int4: "int4", Fp8: "fp8"}
"""Codecs that the kernels know, by the name that they call it."""

RAISED = tl.constexpr(136.0)  # what the zero of an int4 code has become: 128 + 8
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2 ** 23: adding it rounds to whole numbers, half to even


def kind_of(codec: Codec) -> str:
    return KINDS[type(codec)]


def group_count(codec: Codec) -> int:
    """Scales of a head."""
    return groups(codec.dim) if isinstance(codec, Int4) else 2


def units_of(codec: Codec) -> int:
    """Units of a head."""
    return codec.dim // (4 if isinstance(codec, Int4) else 2)


def as_units(codes: torch.Tensor) -> torch.Tensor:
    """[slots, kv_heads, units] int16"""
    return codes.view(torch.int16)


def as_words(scales: torch.Tensor) -> torch.Tensor:
    """The scales of a head as one word of 32 or 64 bits, which a GPU can copy ahead. [slots, kv_heads]"""
    flat = scales.flatten(2)
    return flat.view(torch.int64 if flat.shape[2] == 4 else torch.int32)[..., 0]


@triton.jit
def _shifted_nibble(units, SHIFT: tl.constexpr):
    """128 + code in bfloat16."""
    if SHIFT == 0:
        out = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x000F000F, 0x43004300, 0xEA;", "=r,r", [units], tl.bfloat16, True, 2
        )
    elif SHIFT == 4:
        out = tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.b32 t, $1, 4; lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA; }",
            "=r,r", [units], tl.bfloat16, True, 2,
        )  # fmt: skip
    elif SHIFT == 8:
        out = tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.b32 t, $1, 8; lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA; }",
            "=r,r", [units], tl.bfloat16, True, 2,
        )  # fmt: skip
    else:
        out = tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.b32 t, $1, 12; lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA; }",
            "=r,r", [units], tl.bfloat16, True, 2,
        )  # fmt: skip
    return out


@triton.jit
def _signed_byte(units, PART: tl.constexpr):
    """An int8 code in bfloat16: 128 plus its low seven bits, less 128, or less 256 if it is negative."""
    if PART == 0:
        out = tl.inline_asm_elementwise(
            "{ .reg .b32 low, top, less; mov.b32 less, 0xBF80BF80; "
            "lop3.b32 low, $1, 0x007F007F, 0x43004300, 0xEA; "
            "lop3.b32 top, $1, 0x00800080, 0x43004300, 0xEA; fma.rn.bf16x2 $0, top, less, low; }",
            "=r,r", [units], tl.bfloat16, True, 2,
        )  # fmt: skip
    else:
        out = tl.inline_asm_elementwise(
            "{ .reg .b32 t, low, top, less; mov.b32 less, 0xBF80BF80; shr.b32 t, $1, 8; "
            "lop3.b32 low, t, 0x007F007F, 0x43004300, 0xEA; "
            "lop3.b32 top, t, 0x00800080, 0x43004300, 0xEA; fma.rn.bf16x2 $0, top, less, low; }",
            "=r,r", [units], tl.bfloat16, True, 2,
        )  # fmt: skip
    return out


@triton.jit
def _float_byte(units, PART: tl.constexpr):
    """An e4m3 code in bfloat16: its bits in place, times 2 ** 120 for the other bias of the exponent."""
    if PART == 0:
        out = tl.inline_asm_elementwise(
            "{ .reg .b32 s, t, by, none; mov.b32 by, 0x7B807B80; mov.b32 none, 0x80008000; "
            "shl.b32 s, $1, 8; and.b32 t, s, 0x7F007F00; shr.b32 t, t, 4; "
            "lop3.b32 t, s, 0x80008000, t, 0xEA; fma.rn.bf16x2 $0, t, by, none; }",
            "=r,r", [units], tl.bfloat16, True, 2,
        )  # fmt: skip
    else:
        out = tl.inline_asm_elementwise(
            "{ .reg .b32 t, by, none; mov.b32 by, 0x7B807B80; mov.b32 none, 0x80008000; "
            "and.b32 t, $1, 0x7F007F00; shr.b32 t, t, 4; "
            "lop3.b32 t, $1, 0x80008000, t, 0xEA; fma.rn.bf16x2 $0, t, by, none; }",
            "=r,r", [units], tl.bfloat16, True, 2,
        )  # fmt: skip
    return out


@triton.jit
def read_e4m3(byte):
    """Numbers of bytes 0 : 255, float32. NaN is read as 480: a head that has one has no finite scale."""
    bits = ((byte & 127) << 20) | ((byte & 128) << 24)
    return bits.to(tl.int32).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120


@triton.jit
def unpack(units, KIND: tl.constexpr, PART: tl.constexpr, dtype: tl.constexpr, FAST: tl.constexpr):
    """One part of each unit, without scales. int4 codes c become 128 + c."""
    if KIND == "int4":
        shift: tl.constexpr = (PART % 2) * 8 + (PART // 2) * 4
        out = _shifted_nibble(units, shift) if FAST else (((units >> shift) & 15) + 128).to(dtype)
    elif FAST:
        out = _signed_byte(units, PART) if KIND == "int8" else _float_byte(units, PART)
    elif KIND == "int8":
        out = ((units >> 8) if PART else ((units << 8) >> 8)).to(dtype)
    else:
        out = read_e4m3((units.to(tl.int32) >> (8 * PART)) & 255).to(dtype)
    return out


@triton.jit
def _halves(word):
    """Two bfloat16 numbers in 32 bits, as float32."""
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def split_scales(word, KIND: tl.constexpr, GROUPS: tl.constexpr):
    """Scale and middle of the head's first group of values, then of its second. float32

    Groups are the halves of the head for int4, and the even and odd values for bytes, which have no middles.
    """
    if KIND == "int4":
        scale, middle = _halves(word.to(tl.int32))
        if GROUPS == 2:
            second, second_middle = _halves((word >> 32).to(tl.int32))
        else:
            second, second_middle = scale, middle
    else:
        scale, second = _halves(word)
        if KIND == "fp8":
            scale += scale - scale  # infinity becomes NaN
            second += second - second
        middle, second_middle = scale, second
    return scale, middle, second, second_middle


@triton.jit
def rounded_scale(x):
    """Round float32 to bfloat16's values, half to even; a twin of torch's conversion."""
    bits = x.to(tl.int32, bitcast=True)
    near = (bits + 32767 + ((bits >> 16) & 1)) & -65536
    return tl.where(x == x, near.to(tl.float32, bitcast=True), x)


@triton.jit
def scaled(x, scale):
    """x by its scales; zeros where a scale is 0. Both have the same shape, or the scales are broadcast."""
    none = scale == 0.0
    return tl.where(none, 0.0, tl.div_rn(x, tl.where(none, 1.0, scale)))


@triton.jit
def whole(x, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Round, half to even, within bounds; 0 for NaN."""
    near = (x + ROUNDER) - ROUNDER
    return tl.minimum(tl.maximum(tl.where(near == near, near, 0.0), LEAST), MOST).to(tl.int32)


@triton.jit
def make_e4m3(x):
    """The bytes of numbers in -448 : 448, rounded half to even. int32"""
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 524287 + ((bits >> 20) & 1)) >> 20) - 960  # other bias of the exponent: 120 * 8
    small = ((size * 512.0 + ROUNDER) - ROUNDER).to(tl.int32)  # multiples of 2 ** -9
    code = tl.where(size < 0.015625, small, normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 128
    return tl.where(x == x, code | sign, 127)
