"""Coded weights on a CPU: compiled products for a few tokens, and compiled restoring of rows for more.

The kernels (`native/coded_product.c`) are as precise as float32. Without a compiler, or where they do not
apply, `product.py` restores rows in torch.
"""

from __future__ import annotations

from ctypes import Structure, addressof, c_int32, c_int64, c_uint, c_void_p, cast
from functools import cache

import torch
from torch.nn import functional as F

from skim.models.quantized.format import BITS, GROUPS, SUPER, CodedWeight, pack
from skim.native import build
from skim.native.build import NativeUnavailable

SOURCE = build.SOURCES / "coded_product.c"
FEW_TOKENS = 16  # most tokens of a product with codes
MOST_GROUPS = 4096  # of a row: the kernel converts their scales together
TOLERANCE = 1e-4  # of `check`: far above rounding errors, far below any mistake
TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.uint8: 3, torch.int8: 4}
NO_OFFSET = 5
EIGHT_BIT_FLOATS = 9  # in the place of a number of bits


class Planes(Structure):
    """A weight as the kernel reads it: `coded_t` in `coded.h`."""

    _fields_ = (
        ("low", c_void_p),
        ("high", c_void_p),
        ("scale", c_void_p),
        ("offset", c_void_p),
        ("factor", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("bits", c_int32),
        ("group", c_int32),
        ("zero", c_int32),
        ("scale_type", c_int32),
        ("offset_type", c_int32),
    )


class Kernels:
    """Compiled C. Tensors are float32 and contiguous, and `given` has its columns in the weight's order."""

    def __init__(self) -> None:
        self._team = build.team_launcher()
        library = build.load(SOURCE)
        at, count = c_void_p, c_int64
        self._product = library.skim_coded_product
        self._product.argtypes = [*[at] * 4, count, at, c_uint]
        self._rows = library.skim_coded_rows
        self._rows.argtypes = [at, count, count, at, at, c_uint]
        for function in (self._product, self._rows):
            function.restype = None
        self.product_address = cast(self._product, c_void_p).value
        """Of `skim_coded_product`, for other compiled code."""

    def product(self, given: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """The product with at most 16 tokens. [tokens, columns] -> [tokens, rows]"""
        tokens = given.shape[0]
        out = given.new_empty(tokens, weight.rows)
        self._product(
            addressof(planes_of(weight)),
            given.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            tokens,
            self._team,
            torch.get_num_threads(),
        )
        return out

    def restore_rows(self, weight: CodedWeight, first: int, end: int, out: torch.Tensor) -> torch.Tensor:
        """Rows `first` to `end`, as `restore_stored` has them. `out` is large enough. [rows, columns]"""
        rows = out.view(-1)[: (end - first) * weight.columns].view(end - first, weight.columns)
        planes = planes_of(weight)
        self._rows(addressof(planes), first, end, rows.data_ptr(), self._team, torch.get_num_threads())
        return rows


def planes_of(weight: CodedWeight) -> Planes:
    """The weight as C reads it. It is kept with the weight, because making it takes as long as a product."""
    kept: tuple[list[int], Planes] | None = vars(weight).get("_planes")
    pointers = [
        0 if plane is None else plane.data_ptr()
        for plane in (weight.low, weight.high, weight.scale, weight.offset, weight.factor)
    ]
    if kept is None or kept[0] != pointers:  # planes may be moved between steps
        made = Planes(
            *pointers,
            rows=weight.rows,
            columns=weight.columns,
            bits=weight.bits if weight.low.dtype == torch.uint8 else EIGHT_BIT_FLOATS,
            group=weight.group,
            zero=weight.zero,
            scale_type=TYPES[weight.scale.dtype],
            offset_type=NO_OFFSET if weight.offset is None else TYPES[weight.offset.dtype],
        )
        kept = vars(weight)["_planes"] = pointers, made
    return kept[1]


def kernels_for(weight: CodedWeight, dtype: torch.dtype) -> Kernels | None:
    """The kernels, if they can compute with this weight and activations of this dtype."""
    fits = weight.device.type == "cpu" and dtype == torch.float32 and weight.scale.shape[1] <= MOST_GROUPS
    return kernels() if fits else None


@cache
def kernels() -> Kernels | None:
    """Compiled kernels if they are available and agree with torch, else None."""
    return build.available(
        Kernels, check, "coded weights are dequantized in torch; native products are not available"
    )


def check(native: Kernels) -> None:
    """Compare with torch for every kind of codes, and verify that a NaN propagates."""
    draw = torch.Generator().manual_seed(0)
    for bits in BITS:
        for group in GROUPS:
            weight = drawn_weight(bits, group, draw)
            plain = weight.restore_stored()
            restored = native.restore_rows(weight, 1, weight.rows, torch.empty_like(plain))
            given = torch.randn(FEW_TOKENS, weight.columns, generator=draw)
            given[0, 0] = float("nan")
            expected = F.linear(given, plain)
            for tokens in (1, 3, FEW_TOKENS):
                ours = native.product(given[:tokens], weight, None)
                theirs = expected[:tokens]
                if not torch.allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
                    raise NativeUnavailable(f"its products differ from torch's for codes of {bits} bits")
            if not torch.allclose(restored, plain[1:], rtol=1e-6, atol=1e-6):
                raise NativeUnavailable(f"its rows differ from torch's for codes of {bits} bits")


def drawn_weight(bits: int, group: int, draw: torch.Generator) -> CodedWeight:
    """A small weight with random codes."""
    rows, columns = 21, 2 * SUPER
    codes = torch.randint(0, 2**bits, (rows, columns), generator=draw).to(torch.uint8)
    low, high = (codes, None) if bits == 8 else pack(codes, bits)
    scale, offset = torch.rand(2, rows, columns // group, generator=draw).half().div(2**bits).unbind()
    return CodedWeight(bits, group, low, scale.contiguous(), high, offset.contiguous())
