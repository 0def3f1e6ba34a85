"""The product of a weight with codes of 4 bits and one token in bfloat16, in pairs of float16 numbers.

A word holds eight codes. Two of them, taken at once with a mask, are a pair of tiny float16 numbers:
`code * 2 ** -24` or `code * 2 ** -20`. One instruction multiplies a pair by its inputs and adds. That takes
half of the instructions of `triton_vector.py`.

float16 holds few exponents. So the 32 inputs of a run are multiplied by a power of two, and their sizes then
add up to 2 ** 14 to 2 ** 15. Up to 16 products are added in float16, and all else in float32. The error is
7e-4 to 1.1e-3 of the result, less than that of rounding it to bfloat16, and more than float16 would lose.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return, assignment"

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from skim.models.quantized.format import RUN, CodedWeight
from skim.models.quantized.triton_codes import aligned, kind_of, planes_of

# exponents, as float32 stores them, of these sums
SMALLEST, LARGEST = tl.constexpr(15), tl.constexpr(244)


@triton.constexpr_function
def run_assembly():
    """PTX for `multiply_run`: 4 words are $1 to $4, 16 pairs of inputs are $5 to $20."""
    lines = [".reg .b32 word, some, sum0, sum1;", ".reg .b16 low, high;", ".reg .f32 first, second;"]
    for word in range(4):
        total = f"sum{word // 2}"
        for pair in range(4):
            if pair == 2:
                lines.append(f"shr.u32 word, ${word + 1}, 8;")
            taken = f"${word + 1}" if pair < 2 else "word"
            lines.append(f"and.b32 some, {taken}, {0x00F000F0 if pair % 2 else 0x000F000F};")
            given = f"${5 + 4 * word + pair}"
            if word % 2 == pair == 0:
                lines.append(f"mul.rn.f16x2 {total}, some, {given};")
            else:
                lines.append(f"fma.rn.f16x2 {total}, some, {given}, {total};")
    lines += ["add.rn.f16x2 sum0, sum0, sum1;", "mov.b32 {low, high}, sum0;"]
    lines += ["cvt.f32.f16 first, low;", "cvt.f32.f16 second, high;", "add.f32 $0, first, second;"]
    return "{" + " ".join(lines) + "}"


@triton.jit
def half_of(pair, AT: tl.constexpr):
    return (pair >> (16 * AT)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def multiply_words(words, pairs, FIRST: tl.constexpr, AT: tl.constexpr):
    """What `run_assembly` adds up in one half of its sums, for two words."""
    total = (words[0] & 0).to(tl.float16)
    for word in tl.static_range(FIRST, FIRST + 2):
        for pair in tl.static_range(4):
            some = (words[word] >> (8 * (pair // 2))) & (0x00F000F0 if pair % 2 else 0x000F000F)
            total += half_of(some, AT) * half_of(pairs[4 * word + pair], AT)
    return total


@triton.jit
def multiply_run(words, pairs, ASSEMBLY: tl.constexpr):
    """The products of the codes in four words and their inputs, added up. float32, times 2 ** -24"""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            run_assembly(), "=f," + "r," * 19 + "r", words + pairs, dtype=tl.float32, is_pure=True, pack=1
        )
    low = multiply_words(words, pairs, 0, 0) + multiply_words(words, pairs, 2, 0)
    high = multiply_words(words, pairs, 0, 1) + multiply_words(words, pairs, 2, 1)
    return low.to(tl.float32) + high.to(tl.float32)


@triton.jit
def split_four(values):
    """The last dimension, [..., 4], as four tensors."""
    shape: tl.constexpr = values.shape
    even, odd = tl.split(tl.reshape(values, shape[:-1] + [2, 2]))  # noqa: RUF005 (Triton knows no stars)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def as_floats(word):
    """The two inputs in a word, as float32."""
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def pack_halves(a, b, ASSEMBLY: tl.constexpr):
    """A word of two float16 numbers."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    a = a.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    b = b.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return (a & 0xFFFF) | (b << 16)


@triton.jit
def read_inputs(given_ptr, run, inside, ASSEMBLY: tl.constexpr):
    """What `multiply_run` needs of the inputs of a run: pairs; what they were raised by; and their sum."""
    at = given_ptr.to(tl.pointer_type(tl.int32)) + run[:, None] * 16 + tl.arange(0, 4)[None, :]
    words = ()
    for chunk in tl.static_range(4):
        read = tl.load(at + chunk * 4, mask=inside[:, None], other=0, eviction_policy="evict_last")
        words = words + split_four(read)
    size = tl.zeros_like(run).to(tl.float32)
    total = size
    for word in tl.static_range(0, 16, 2):
        a, b = as_floats(words[word])
        c, d = as_floats(words[word + 1])
        size += (tl.abs(a) + tl.abs(b)) + (tl.abs(c) + tl.abs(d))
        total += (a + b) + (c + d)
    exponent = (size.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent, SMALLEST), LARGEST)
    raised = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    pairs = ()
    for word in tl.static_range(4):
        a, b = as_floats(words[2 * word])
        c, d = as_floats(words[2 * word + 1])
        e, f = as_floats(words[2 * word + 8])
        g, h = as_floats(words[2 * word + 9])
        lower = raised * 0.0625
        pairs += (
            pack_halves(a * raised, c * raised, ASSEMBLY)[:, None],
            pack_halves(e * lower, g * lower, ASSEMBLY)[:, None],
            pack_halves(b * raised, d * raised, ASSEMBLY)[:, None],
            pack_halves(f * lower, h * lower, ASSEMBLY)[:, None],
        )  # fmt: skip
    back = ((exponent + 10) << 23).to(tl.float32, bitcast=True)
    return pairs, back, total


@triton.jit
def read_weight(
    low_ptr, scale_ptr, offset_ptr, first, rows, run, inside, RUNS: tl.constexpr, GROUP: tl.constexpr,
    OFFSETS: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Words, scales and offsets of ROWS rows."""
    GROUPS: tl.constexpr = RUNS * 32 // GROUP
    row = tl.arange(0, ROWS)
    if not EVEN:
        row = tl.minimum(row, rows - 1 - first)  # the last program reads its last row again
    low_ptr += first.to(tl.int64) * (RUNS * 4)
    at = (low_ptr + run[:, None] * 4 + tl.arange(0, 4)[None, :])[:, None, :] + (row * (RUNS * 4))[
        None, :, None
    ]
    words = tl.load(at, mask=inside[:, None, None], other=0, eviction_policy="evict_first")
    group = run // (GROUP // 32)
    begin = first.to(tl.int64) * GROUPS
    scale = tl.load(
        (scale_ptr + begin + group)[:, None] + (row * GROUPS)[None, :], mask=inside[:, None], other=0
    )
    offset = scale
    if OFFSETS == "zeros" or OFFSETS == "added":
        offset = tl.load(
            (offset_ptr + begin + group)[:, None] + (row * GROUPS)[None, :], mask=inside[:, None], other=0
        )
    return words, scale, offset


@triton.jit
def issue_loads(ASSEMBLY: tl.constexpr):
    """Keep the compiler from moving loads below this line, next to their use."""
    if ASSEMBLY:
        tl.inline_asm_elementwise(
            "bar.warp.sync -1; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def add_runs(
    sums, words, scale, offset, pairs, back, total, OFFSETS: tl.constexpr, ZERO: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Add each run's part of the products. [runs, rows]"""
    dot = multiply_run(split_four(words), pairs, ASSEMBLY)
    scale = scale.to(tl.float32)
    if OFFSETS == "added":
        sums = tl.fma(offset.to(tl.float32), total[:, None], sums)
        dot *= back[:, None]
    elif OFFSETS == "zeros":
        dot = tl.fma(-offset.to(tl.int32).to(tl.float32), total[:, None], dot * back[:, None])
    else:
        dot = tl.fma(dot, back[:, None], (total * -ZERO)[:, None])
    return tl.fma(scale, dot, sums)


@triton.jit
def write_rows(
    out_ptr, bias_ptr, sums, first, rows, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    row = first + tl.arange(0, ROWS)
    product = tl.sum(sums, axis=0)
    if HAS_BIAS:
        product += tl.load(bias_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, product.to(out_ptr.dtype.element_ty), mask=row < rows)


@triton.jit
def halves_kernel(
    out_ptr,  # [rows]
    given_ptr,  # [columns]
    low_ptr,
    scale_ptr,
    offset_ptr,
    bias_ptr,  # [rows]
    rows,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSETS: tl.constexpr,
    ZERO: tl.constexpr,
    RUNS: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,  # runs that are read at once: one for each thread
    EVEN: tl.constexpr,  # whether ROWS divides the rows
    ASSEMBLY: tl.constexpr,
):
    """Multiply ROWS rows of the weight by the token, SPAN runs at a time."""
    run = tl.arange(0, SPAN)
    first = tl.program_id(0) * ROWS
    sums = tl.zeros([SPAN, ROWS], tl.float32)
    for begin in range(0, RUNS, SPAN):
        inside = (begin + run < RUNS) | (RUNS % SPAN == 0)
        words, scale, offset = read_weight(
            low_ptr, scale_ptr, offset_ptr, first, rows, begin + run, inside, RUNS, GROUP, OFFSETS,
            ROWS, EVEN,
        )  # fmt: skip
        issue_loads(ASSEMBLY)
        pairs, back, total = read_inputs(given_ptr, begin + run, inside, ASSEMBLY)
        sums = add_runs(sums, words, scale, offset, pairs, back, total, OFFSETS, ZERO, ASSEMBLY)
    write_rows(out_ptr, bias_ptr, sums, first, rows, HAS_BIAS, ROWS)


class Launch(NamedTuple):
    """How the kernel is launched."""

    rows: int
    warps: int


MANY_ROWS, MANY_COLUMNS = 8192, 4096


def can_multiply(weight: CodedWeight, dtype: torch.dtype) -> bool:
    """Whether this kernel is made for such a product."""
    return weight.bits == 4 and weight.factor is None and weight.group >= RUN and dtype == torch.bfloat16


def choose(weight: CodedWeight) -> Launch:
    """The launch for a weight of this shape. Many rows keep a GPU busy with few warps for each."""
    return Launch(8, 2 if weight.rows >= MANY_ROWS and weight.columns <= MANY_COLUMNS else 4)


def multiply_halves(
    given: torch.Tensor,
    weight: CodedWeight,
    bias: torch.Tensor | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """`linear` for one token, [1, columns] -> [1, rows]. `given` has its columns in the weight's order."""
    launch = launch or choose(weight)
    rows = weight.rows
    given = aligned(given)
    out = given.new_empty(1, rows)
    low, _, scale, offset, _ = planes_of(weight)
    halves_kernel[(triton.cdiv(rows, launch.rows),)](
        out,
        given,
        low,
        scale,
        offset,
        given if bias is None else bias.contiguous(),
        rows,
        HAS_BIAS=bias is not None,
        GROUP=weight.group,
        OFFSETS=kind_of(weight)["OFFSETS"],
        ZERO=weight.zero,
        RUNS=weight.columns // RUN,
        ROWS=launch.rows,
        SPAN=32 * launch.warps,
        EVEN=rows % launch.rows == 0,
        ASSEMBLY=has_assembly(given.device),
        num_warps=launch.warps,
    )
    return out


@functools.cache
def has_assembly(device: torch.device) -> bool:
    """True on an NVIDIA GPU that multiplies pairs of float16 numbers."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
