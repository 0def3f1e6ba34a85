"""A layer's matrix products in 8 bits, for forwards that rank tokens and generate none.

On a CPU that multiplies 8-bit integers they are about four times as fast as in float32. Every token is
rounded to 255 steps of its own largest value, and so is every row of a weight. A few columns of the inputs
have far larger values than the others, which would all be rounded to nothing beside them. So the columns with
the largest values of a forward stay in float32 (as in LLM.int8, Dettmers et al. 2022): of the error of the
question's attention, that removes more than half. Rounded weights are made on first use and kept; those of
coded weights are made in tiles for each product, and take no memory.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from skim.models.forwards.few_tokens import PLAIN, Ops, TorchOps, Weight
from skim.models.quantized.format import CodedWeight
from skim.models.quantized.product import restored_tiles

STEPS = 127.0  # on either side of 0
EXACT_COLUMNS = 16  # stay in float32


class EightBitOps(TorchOps):
    """Torch's operations, but products are of 8-bit integers."""

    def __init__(self) -> None:
        self._rounded = WeakTensorKeyDictionary()  # by weight

    def product(self, given: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        if isinstance(weight, CodedWeight) and weight.order is not None:
            given = given.index_select(1, weight.order)
        exact = given.abs().amax(dim=0).topk(min(EXACT_COLUMNS, given.shape[1])).indices
        left = _Side(*rounded(given.index_fill(1, exact, 0.0)), given[:, exact])
        if isinstance(weight, CodedWeight):
            product = given.new_empty(given.shape[0], weight.rows)
            for first, end, tile in restored_tiles(weight, given.dtype):
                product[:, first:end] = _product(left, _Side(*rounded(tile), tile[:, exact]))
        else:
            if weight not in self._rounded:
                self._rounded[weight] = rounded(weight)
            rows, scale = self._rounded[weight]
            product = _product(left, _Side(rows, scale, weight[:, exact]))
        return product if bias is None else product.add_(bias)


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
    scale = rows.abs().amax(dim=1, keepdim=True).div_(STEPS)
    divisor = scale.clamp(min=torch.finfo(rows.dtype).tiny)
    return rows.div(divisor).round_().to(torch.int8), scale


@cache
def for_ranking() -> Ops:
    """Products in 8 bits if the CPU has instructions for them (VNNI). Without these they are not faster."""
    return EightBitOps() if torch.cpu._is_vnni_supported() else PLAIN
