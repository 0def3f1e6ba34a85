"""Checks of a coded weight that was read from a file."""

from __future__ import annotations

import torch

from skim.models.quantized.format import CodedWeight, why_invalid

LARGEST = torch.finfo(torch.float32).max
LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


def why_unusable(weight: CodedWeight) -> str | None:
    """Why no module can use the weight, or None: planes that do not fit, or values that are not finite."""
    if why := why_invalid(weight):
        return why
    if not weight.rows or not weight.columns:
        return "no values"
    for name, plane in weight.planes.items():
        if plane.dtype == torch.float8_e4m3fn:
            if bool((plane.view(torch.uint8) & 0x7F == 0x7F).any()):
                return f"{name} with values that are not finite"
        elif plane.dtype.is_floating_point and not bool(plane.isfinite().all()):
            return f"{name} with values that are not finite"
    if (zero := largest_zero(weight)) > 2**weight.bits:
        return f"the zero point {zero} for codes of {weight.bits} bits"
    if weight.factor is None and largest(weight) > LARGEST:
        return "scales so large that values are not finite"
    return None


def largest_zero(weight: CodedWeight) -> int:
    """The largest zero point. Kernels hold a code less its zero point in 16 bits."""
    if weight.offset is None:
        return weight.zero
    return int(weight.offset.max()) if weight.factor is None and weight.offset.dtype == torch.uint8 else 0


def largest(weight: CodedWeight) -> float:
    """A bound on the size of all values, and of the numbers they are computed from."""
    scale, offset = weight.affine()
    codes = LARGEST_FP8 if weight.low.dtype == torch.float8_e4m3fn else 2.0**weight.bits
    return codes * float(scale.abs().max()) + float(offset.abs().max())
