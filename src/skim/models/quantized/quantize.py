"""Turn floats into coded weights.

int4  a scale and a zero point for each group. The range of a group may be cut a little: that costs its
      largest values and makes the steps of all others smaller. The cut with the least squared error wins.
int8  a scale for each group
fp8   a scale for each row
"""

from __future__ import annotations

import torch

from skim.errors import ModelError
from skim.models.overflow import convert
from skim.models.quantized.checks import LARGEST_FP8, why_unusable
from skim.models.quantized.format import CodedWeight, pack
from skim.models.quantized.packed import fit_group, spread, with_zeros

CUTS = (1.0, 0.95, 0.9, 0.85)  # shares of a group's range; smaller ones do not lower the error any more
AT_ONCE = 2**20  # values that are rounded together on a CPU: they should stay in its cache
AT_ONCE_ON_DEVICE = 2**23  # on a GPU: copies in float32 add to the peak of loading
WIDEST = 128  # columns of a group


def can_quantize(shape: torch.Size | tuple[int, ...]) -> bool:
    """True if a tensor of this shape can be coded."""
    return len(shape) == 2 and shape[0] > 0 and fit_group(shape[1], WIDEST) is not None


def quantize(
    weight: torch.Tensor,
    how: str,
    name: str = "the weight",
    group: int | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> CodedWeight:
    """The coded weight nearest to a matrix that `can_quantize`.

    Tiles of the matrix are converted to the dtype and moved to the device one by one. So the device holds the
    codes and one tile, and never the matrix.
    group: columns of a group; by default the most that divide the columns, up to 128
    """
    rows, columns = weight.shape
    device, dtype = device or weight.device, dtype or weight.dtype
    given = fit_group(columns, group or WIDEST)
    assert given is not None
    step = max(1, (AT_ONCE_ON_DEVICE if device.type == "cuda" else AT_ONCE) // columns)
    planes: list[torch.Tensor] = []
    for first in range(0, rows, step):
        tile = convert(weight[first : first + step], device, dtype, name)
        if not bool(tile.isfinite().all()):
            raise ModelError(
                f"{name} has values that are not finite, so it cannot be quantized; use other weights, or "
                "--quantization none"
            )
        parts = _KINDS[how](tile, given)
        planes = planes or [part.new_empty(rows, part.shape[1]) for part in parts]
        for plane, part in zip(planes, parts, strict=True):
            plane[first : first + step] = part
    low, scale, zeros = planes
    if how == "fp8":
        coded = CodedWeight(8, given, low, spread(scale, columns, given, columns))
    else:
        coded = with_zeros(CodedWeight(4 if how == "int4" else 8, given, low, scale), zeros)
    if why := why_unusable(coded):
        raise ModelError(f"{name} cannot be quantized: it would have {why}; use --quantization none")
    return coded


_Planes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # the low plane, scales, zero points


def _int4(tile: torch.Tensor, group: int) -> _Planes:
    values = tile.float().reshape(-1, group)
    smallest = values.amin(1, keepdim=True).clamp(max=0)
    largest = values.amax(1, keepdim=True).clamp(min=0)
    best = scale = zeros = None
    for cut in CUTS:
        one = _stored(largest / 15 * cut - smallest / 15 * cut, tile.dtype)
        zero = (smallest * -cut / one).round_().clamp_(0, 15)
        error = (values / one).add_(zero).round_().clamp_(0, 15).sub_(zero).mul_(one).sub_(values)
        error = error.square_().sum(1, keepdim=True)
        if best is None or scale is None or zeros is None:
            best, scale, zeros = error, one, zero
        else:
            better = error < best
            best, scale = torch.where(better, error, best), torch.where(better, one, scale)
            zeros = torch.where(better, zero, zeros)
    assert scale is not None
    assert zeros is not None
    codes = (values / scale).add_(zeros).round_().clamp_(0, 15).to(torch.uint8)
    return pack(codes.view(tile.shape), 4)[0], *_shaped(tile, scale, zeros)


def _int8(tile: torch.Tensor, group: int) -> _Planes:
    values = tile.float().reshape(-1, group)
    scale = _stored(values.abs().amax(1, keepdim=True) / 127, tile.dtype)
    codes = (values / scale).round_().clamp_(-127, 127).add_(128).to(torch.uint8)
    return codes.view(tile.shape), *_shaped(tile, scale, torch.full_like(scale, 128))


def _fp8(tile: torch.Tensor, group: int) -> _Planes:
    values = tile.float()
    scale = _stored(values.abs().amax(1, keepdim=True) / LARGEST_FP8, tile.dtype)
    low = (values / scale).clamp_(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
    return low, *_shaped(tile, scale, torch.zeros_like(scale))


_KINDS = {"int4": _int4, "int8": _int8, "fp8": _fp8}


def _shaped(
    tile: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points by row, in their types."""
    rows = len(tile)
    return scale.view(rows, -1).to(scale_type(tile.dtype)), zeros.view(rows, -1).to(torch.uint8)


def scale_type(dtype: torch.dtype) -> torch.dtype:
    """A type that holds the scales of all weights of a type. More digits would not lower the error."""
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


def _stored(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale as it will be stored, and never 0."""
    smallest = 2.0**-24 if dtype == torch.float16 else 2.0**-126
    return scale.clamp(min=smallest).to(scale_type(dtype)).float()
