"""Products of coded weights with many tokens on a CPU, by one of two kernels.

Where the CPU has tile registers (AMX), `native/coded_tiles.c` restores rows and multiplies sums of bfloat16
numbers, for any codes. Where it multiplies 8-bit integers (AVX-512 VNNI), `native/coded_many.c` turns
activations into digits of 8 bits, for codes of 4 bits. An activation has three parts (numbers or digits), and
products are about as precise as float32. In forwards that only rank tokens it has one part, which is faster.
The plain twin is `multiply_tiles`.
"""

from __future__ import annotations

from ctypes import addressof, c_int, c_int64, c_uint, c_void_p
from functools import cache

import torch
from torch.nn import functional as F

from skim.models.quantized.cpu import drawn_weight, planes_of
from skim.models.quantized.format import BITS, GROUPS, RUN, CodedWeight
from skim.native import build
from skim.native.build import NativeUnavailable

VECTORS, TILES = (build.SOURCES / name for name in ("coded_many.c", "coded_tiles.c"))
PARTS = 3  # of an activation
TOLERANCES = {3: 1e-5, 1: 2e-2}
"""Of `check`, by parts, relative to the largest result: above rounding errors."""


class ManyTokens:
    """Compiled C. Tensors are float32 and contiguous, and `given` has its columns in the weight's order."""

    def __init__(self, tiles: bool) -> None:
        self.tiles = tiles
        self._team = build.team_launcher()
        library = build.load(TILES if tiles else VECTORS)
        if tiles and not library.skim_tiles_permitted():
            raise NativeUnavailable("the operating system does not permit tile registers")
        self._product = library.skim_coded_tiles if tiles else library.skim_coded_many
        self._product.argtypes = [*[c_void_p] * 4, c_int64, c_int, c_void_p, c_uint]
        self._product.restype = c_int

    def takes(self, weight: CodedWeight) -> bool:
        """True if it can multiply these codes."""
        return self.tiles or (weight.bits == 4 and weight.group >= RUN)

    def product(
        self, given: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None, parts: int = PARTS
    ) -> torch.Tensor | None:
        """[tokens, columns] -> [tokens, rows]; None if inputs are not finite or too large.

        parts: of an activation, 3 or 1
        """
        tokens = given.shape[0]
        out = given.new_empty(tokens, weight.rows)
        done = self._product(
            addressof(planes_of(weight)),
            given.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            tokens,
            parts,
            self._team,
            torch.get_num_threads(),
        )
        return out if done else None


def many_tokens_for(weight: CodedWeight, dtype: torch.dtype) -> ManyTokens | None:
    """The kernel, if it can compute with this weight and activations of this dtype."""
    if dtype != torch.float32 or weight.device.type != "cpu" or (native := many_tokens()) is None:
        return None
    return native if native.takes(weight) else None


@cache
def many_tokens() -> ManyTokens | None:
    """The best compiled kernel that is available and agrees with torch, else None."""
    if torch.cpu._is_amx_tile_supported():
        without = "coded weights are multiplied by vectors; tile registers are not available"
        if (native := build.available(lambda: ManyTokens(tiles=True), check, without)) is not None:
            return native
    without = "rows of coded weights are dequantized for many tokens"
    return build.available(lambda: ManyTokens(tiles=False), check, without)


def check(native: ManyTokens) -> None:
    """Compare with torch for every kind of codes, and verify that values which are not finite are refused."""
    draw = torch.Generator().manual_seed(0)
    weights = [drawn_weight(bits, group, draw) for bits in BITS for group in GROUPS]
    for weight in filter(native.takes, weights):
        given = torch.randn(19, weight.columns, generator=draw)
        theirs = F.linear(given, weight.restore_stored())
        for parts, tolerance in TOLERANCES.items():
            ours = native.product(given, weight, None, parts)
            if ours is None or not (ours - theirs).abs().max() <= tolerance * theirs.abs().max():
                kind = f"{weight.bits} bits in groups of {weight.group}"
                raise NativeUnavailable(f"its products differ from torch's for codes of {kind}")
        given[3, 5] = float("nan")
        if native.product(given, weight, None) is not None:
            raise NativeUnavailable("it loses a NaN")
