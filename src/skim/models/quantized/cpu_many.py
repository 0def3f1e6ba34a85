"""Products of 4-bit codes with many tokens on a CPU that multiplies 8-bit integers.

`native/coded_many.c` turns activations into digits of 8 bits. With three it is about as precise as float32,
and 1.4 times as fast as `multiply_tiles`, its plain twin. With one it is 3.4 times as fast, for forwards that
only rank tokens.
"""

from __future__ import annotations

from ctypes import addressof, c_int, c_int64, c_uint, c_void_p
from functools import cache

import torch
from torch.nn import functional as F

from skim.models.quantized.cpu import planes_of
from skim.models.quantized.format import RUN, CodedWeight, pack
from skim.native import build
from skim.native.build import NativeUnavailable

SOURCE = build.SOURCES / "coded_many.c"
MOST_GROUPS = 256  # of a row: the kernel holds the scales of 16 rows
DIGITS = 3  # of an activation
TOLERANCES = {
    3: 1e-5,
    1: 2e-2,
}  # of `check`, by digits, relative to the largest result: above rounding errors


class ManyTokens:
    """Compiled C. Tensors are float32 and contiguous, and `given` has its columns in the weight's order."""

    def __init__(self) -> None:
        self._team = build.team_launcher()
        self._product = build.load(SOURCE).skim_coded_many
        self._product.argtypes = [*[c_void_p] * 4, c_int64, c_int, c_void_p, c_uint]
        self._product.restype = c_int

    def product(
        self, given: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None, digits: int = DIGITS
    ) -> torch.Tensor | None:
        """[tokens, columns] -> [tokens, rows]; None if inputs are not finite, or too large. digits: 1 or 3"""
        tokens = given.shape[0]
        out = given.new_empty(tokens, weight.rows)
        done = self._product(
            addressof(planes_of(weight)),
            given.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            tokens,
            digits,
            self._team,
            torch.get_num_threads(),
        )
        return out if done else None


def many_tokens_for(weight: CodedWeight, dtype: torch.dtype) -> ManyTokens | None:
    """The kernel, if it can compute with this weight and activations of this dtype."""
    fits = weight.bits == 4 and weight.group >= RUN and weight.scale.shape[1] <= MOST_GROUPS
    return many_tokens() if fits and dtype == torch.float32 and weight.device.type == "cpu" else None


@cache
def many_tokens() -> ManyTokens | None:
    """The compiled kernel if it is available and agrees with torch, else None."""
    return build.available(ManyTokens, check, "rows of coded weights are restored for many tokens")


def check(native: ManyTokens) -> None:
    """Compare with torch, and verify that values which are not finite are refused."""
    draw = torch.Generator().manual_seed(0)
    for group in (32, 128):
        rows, columns, tokens = 21, 256, 19
        low, _ = pack(torch.randint(0, 16, (rows, columns), generator=draw).to(torch.uint8), 4)
        scale, offset = torch.randn(2, rows, columns // group, generator=draw).unbind()
        weight = CodedWeight(4, group, low, scale, offset=offset)
        given = torch.randn(tokens, columns, generator=draw)
        theirs = F.linear(given, weight.restore_stored())
        for digits, tolerance in TOLERANCES.items():
            ours = native.product(given, weight, None, digits)
            if ours is None or float((ours - theirs).abs().max()) > tolerance * float(theirs.abs().max()):
                raise NativeUnavailable(f"its products differ from torch's for groups of {group}")
        given[3, 5] = float("nan")
        if native.product(given, weight, None) is not None:
            raise NativeUnavailable("it loses a NaN")
