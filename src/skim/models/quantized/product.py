"""Products with coded weights.

For few tokens a kernel multiplies codes, and reads them at the memory's speed. For more, rows are dequantized
in tiles, each for the fastest product of the device. Some CPUs multiply codes of 4 bits directly.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from skim.models.quantized.cpu import FEW_TOKENS, kernels_for
from skim.models.quantized.cpu_many import many_tokens_for
from skim.models.quantized.format import CodedWeight

DEVICE_FEW_TOKENS = 64  # the same for a GPU's tensor cores
TILE_BYTES = 2**23  # of dequantized rows on a CPU: they should stay in its cache
DEVICE_TILE_BYTES = 2**28  # on a GPU: a product should fill it


def multiply(given: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`linear` with a coded weight. [tokens, columns] -> [tokens, rows]"""
    if not given.is_cuda and given.dtype != torch.float32:  # a CPU's kernels compute in float32
        own = None if bias is None else bias.float()
        return multiply(given.float(), weight, own).to(given.dtype)
    if weight.order is not None:
        given = given.index_select(1, weight.order)
    if given.is_cuda and has_kernels():
        from skim.models.quantized.triton_product import multiply_few_tokens

        if 1 <= len(given) <= (FEW_TOKENS if given.dtype == torch.float32 else DEVICE_FEW_TOKENS):
            return multiply_few_tokens(given, weight, bias)
    if 0 < given.shape[0] <= FEW_TOKENS:
        native = kernels_for(weight, given.dtype)
        if native is not None:
            return native.product(given.contiguous(), weight, bias)
    many = many_tokens_for(weight, given.dtype) if given.shape[0] > FEW_TOKENS else None
    product = None if many is None else many.product(given.contiguous(), weight, bias)
    return product if product is not None else multiply_tiles(given, weight, bias)


def multiply_tiles(
    given: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The product with rows dequantized in tiles. `given` has its columns in the weight's order."""
    if given.is_cuda and weight.rows * weight.columns * given.element_size() <= DEVICE_TILE_BYTES:
        return F.linear(given, restore_stored(weight, given.dtype), bias)
    out = given.new_empty(given.shape[0], weight.rows)
    for first, end, tile in dequantized_tiles(weight, given.dtype):
        if end - first == weight.rows:
            return F.linear(given, tile, bias)
        torch.mm(given, tile.t(), out=out[:, first:end])
    return out if bias is None else out.add_(bias)


def dequantized_tiles(weight: CodedWeight, dtype: torch.dtype) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Rows `first` to `end`, dequantized. A tile is valid until the next one is asked for."""
    native = kernels_for(weight, dtype)
    most = DEVICE_TILE_BYTES if weight.device.type == "cuda" else TILE_BYTES
    tiles = -(-weight.rows * weight.columns * dtype.itemsize // most)
    step = -(-weight.rows // tiles)  # tiles of equal size
    space = None if native is None else torch.empty(step, weight.columns, dtype=dtype)
    for first in range(0, weight.rows, step):
        end = min(first + step, weight.rows)
        if native is None or space is None:
            yield first, end, restore_stored(weight.some_rows(first, end), dtype)
        else:
            yield first, end, native.restore_rows(weight, first, end, space)


def look_up(weight: CodedWeight, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Restore the rows with these ids. [n] -> [n, columns]"""
    native = kernels_for(weight, dtype)
    if native is not None and len(ids) <= FEW_TOKENS:  # one call of C costs less than ten of torch
        values = torch.empty(len(ids), weight.columns)
        for at, row in enumerate(ids.tolist()):
            if not 0 <= row < weight.rows:
                raise IndexError(f"row {row} of a table with {weight.rows} rows")
            native.restore_rows(weight, row, row + 1, values[at])
    else:
        values = restore_stored(weight, dtype, ids)
    if weight.order is None:
        return values
    return torch.empty_like(values).index_copy_(1, weight.order, values)


def restore_stored(
    weight: CodedWeight, dtype: torch.dtype, chosen: torch.Tensor | None = None
) -> torch.Tensor:
    """`CodedWeight.restore_stored` of all or the chosen rows; one kernel on a GPU. chosen: int64 [n]"""
    if weight.low.is_cuda and has_kernels():
        from skim.models.quantized import triton_restore

        return triton_restore.restore_stored(weight, dtype, chosen)
    return (weight if chosen is None else weight.chosen_rows(chosen)).restore_stored(dtype)


@functools.cache
def has_kernels() -> bool:
    """Whether Triton is there, for kernels on a GPU."""
    return importlib.util.find_spec("triton") is not None


@torch.library.custom_op("skim::multiply_coded", mutates_args=())
def multiply_coded(
    given: torch.Tensor,
    low: torch.Tensor,
    scale: torch.Tensor,
    high: torch.Tensor | None,
    offset: torch.Tensor | None,
    factor: torch.Tensor | None,
    order: torch.Tensor | None,
    bias: torch.Tensor | None,
    bits: int,
    group: int,
    zero: int,
) -> torch.Tensor:
    """`multiply` as one operator, which compiled layers do not look into. [..., columns] -> [..., rows]"""
    weight = CodedWeight(bits, group, low, scale, high, offset, zero, factor, order)
    product = multiply(given.reshape(-1, given.shape[-1]), weight, bias)
    return product.view(*given.shape[:-1], weight.rows)


@multiply_coded.register_fake
def _(given: torch.Tensor, low: torch.Tensor, *_: Any) -> torch.Tensor:
    return given.new_empty(*given.shape[:-1], low.shape[0])
