"""A layer's matrix products in 8 bits, for forwards that rank tokens and generate none.

On a CPU that multiplies 8-bit integers they are about four times as fast as in float32. Every token is
rounded to 255 steps of its own largest value, and so is every row of a weight. A few columns of the inputs
have far larger values than the others, which would all be rounded to nothing beside them. So the columns with
the largest values of a forward stay in float32 (as in LLM.int8, Dettmers et al. 2022): of the error of the
question's attention, that removes more than half. Rounded weights are made on first use and kept. Codes of 4
bits are multiplied as they are, with tokens rounded in runs of 32 columns: faster, and nearer to float32.
Other codes are restored and rounded in tiles for each product, and take no memory. With tile registers (AMX),
all codes are multiplied by tokens rounded to bfloat16 instead (`models/quantized/cpu_many.py`).
"""

from __future__ import annotations

from collections.abc import Container
from ctypes import c_int64, c_uint, c_void_p
from functools import cache
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from skim.models.forwards.few_tokens import PLAIN, Ops, Weight
from skim.models.forwards.many_tokens import for_many_tokens
from skim.models.quantized.cpu_many import many_tokens_for
from skim.models.quantized.format import CodedWeight
from skim.models.quantized.product import dequantized_tiles
from skim.native import build
from skim.native.build import NativeUnavailable

SOURCE = build.SOURCES / "eight_bits.c"

STEPS = 127.0  # on either side of 0
EXACT_COLUMNS = 16  # stay in float32


class EightBitOps:
    """The operations for many tokens, but products are of 8-bit integers."""

    def __init__(self) -> None:
        others = for_many_tokens()
        self.norm, self.add_norm, self.norm_heads = others.norm, others.add_norm, others.norm_heads
        self.rotate, self.gate = others.rotate, others.gate
        self._rounded = WeakTensorKeyDictionary()  # by weight

    def product(self, given: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        if isinstance(weight, CodedWeight):
            if weight.order is not None:
                given = given.index_select(1, weight.order)
            many = many_tokens_for(weight, given.dtype)
            product = None if many is None else many.product(given.contiguous(), weight, bias, parts=1)
            if product is not None:
                return product
        exact = given.abs().amax(dim=0).topk(min(EXACT_COLUMNS, given.shape[1])).indices
        left = _Side(*rounded(given.index_fill(1, exact, 0.0)), given[:, exact])
        if isinstance(weight, CodedWeight):
            product = self._with_codes(left, weight, exact)
        else:
            if weight not in self._rounded:
                self._rounded[weight] = rounded(weight)
            rows, scale = self._rounded[weight]
            product = _product(left, _Side(rows, scale, weight[:, exact]))
        return product if bias is None else product.add_(bias)

    def forget(self, storages: Container[int]) -> None:
        """Free the rounded weights of these storages, given by identity. They are made again on first use."""
        for weight in list(self._rounded):
            if weight.untyped_storage()._cdata in storages:
                del self._rounded[weight]

    @staticmethod
    def _with_codes(left: _Side, weight: CodedWeight, exact: torch.Tensor) -> torch.Tensor:
        product = left.exact.new_empty(left.exact.shape[0], weight.rows)
        for first, end, tile in dequantized_tiles(weight, left.exact.dtype):
            part = _product(left, _Side(*rounded(tile), tile[:, exact]))
            if end - first == weight.rows:
                return part
            product[:, first:end] = part
        return product


class _Side(NamedTuple):
    """One side of a product."""

    rows: torch.Tensor  # 8-bit integers
    scale: torch.Tensor  # of each row
    exact: torch.Tensor  # the columns that stay in float32


def _product(left: _Side, right: _Side) -> torch.Tensor:
    product = torch._int_mm(left.rows, right.rows.t()).float().mul_(left.scale).mul_(right.scale.view(-1))
    return product.addmm_(left.exact, right.exact.t())


def rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit integers, and the scale of each row. The scale of a row that is not finite is not finite."""
    native = rounding()
    if native is None or rows.dtype != torch.float32 or not rows.is_contiguous():
        return rounded_plainly(rows)
    return native(rows)


def rounded_plainly(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`rounded` in torch."""
    scale = rows.abs().amax(dim=1, keepdim=True).div_(STEPS)
    divisor = scale.clamp(min=torch.finfo(rows.dtype).tiny)
    return rows.div(divisor).round_().to(torch.int8), scale


class Rounding:
    """`rounded` in C, which reads the rows once. Rows are contiguous."""

    def __init__(self) -> None:
        self._team = build.team_launcher()
        self._round = build.load(SOURCE).skim_round_rows
        self._round.argtypes = [*[c_void_p] * 3, c_int64, c_int64, c_void_p, c_uint]
        self._round.restype = None

    def __call__(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, scale = torch.empty_like(rows, dtype=torch.int8), rows.new_empty(rows.shape[0], 1)
        pointers = rows.data_ptr(), out.data_ptr(), scale.data_ptr()
        self._round(*pointers, *rows.shape, self._team, torch.get_num_threads())
        return out, scale


@cache
def rounding() -> Rounding | None:
    """Compiled rounding if it is available and agrees with torch, else None."""
    without = "rows are rounded in torch; native rounding is not available"
    return build.available(Rounding, check, without)


def check(native: Rounding) -> None:
    """Compare with torch."""
    rows = torch.randn(21, 75, generator=torch.Generator().manual_seed(0), device="cpu")
    if not all(torch.equal(a, b) for a, b in zip(native(rows), rounded_plainly(rows), strict=True)):
        raise NativeUnavailable("its results differ from torch's")


@cache
def for_ranking() -> Ops:
    """Products in 8 bits if the CPU has instructions for them (VNNI). Without these they are not faster."""
    return EightBitOps() if torch.cpu._is_vnni_supported() else PLAIN
