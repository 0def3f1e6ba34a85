"""fp8 checkpoints: weights of type float8_e4m3fn with a scale for each block, each output, or all.

The scale is named weight_scale_inv or weight_scale; both are multiplied. [outputs / 128, inputs / 128],
rounded up, or one number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from skim.errors import shown
from skim.models.quantized.format import CodedWeight
from skim.models.quantized.layout import FLOAT_TYPES, Layout
from skim.models.quantized.packed import spread
from skim.models.quantized.shards import Shards

BLOCK = [128, 128]  # rows and columns
NAMES = ("weight_scale_inv", "weight_scale")


class FP8Layout(Layout):
    """Reads weights as they are."""

    format = "fp8"
    marks = ("weight",)
    endings = NAMES

    def __init__(self, shards: Shards, settings: Mapping[str, Any]) -> None:
        super().__init__(shards, settings)
        if (kind := settings.get("fmt", "e4m3")) != "e4m3":
            raise self.refused(f"fmt {shown(kind)}")
        self._blocks = [settings.get("weight_block_size") or BLOCK]

    def marked(self, module: str, ending: str) -> bool:
        return self.shards.dtype(f"{module}.{ending}") in ("F8_E4M3", "F8_E5M2")

    def read(self, module: str) -> CodedWeight:
        name = next((name for name in NAMES if self.has(module, name)), NAMES[0])
        return read_fp8(self, module, name, self._blocks)


def read_fp8(layout: Layout, module: str, name: str, blocks: Sequence[object]) -> CodedWeight:
    """A weight of float8_e4m3fn and its scale. blocks: sizes that a scale of blocks may have"""
    low = layout.part(module, "weight", ("F8_E4M3",), (None, None))
    rows, columns = low.shape
    tensor = f"{module}.{name}"
    shape = layout.shards.shape(tensor) if layout.has(module, name) else ()
    scale = layout.part(module, name, (*FLOAT_TYPES, "F8_E8M0"), (None,) * len(shape))
    if scale.itemsize == 1:  # powers of two
        scale = scale.to(torch.bfloat16)
    height, width = rows, columns  # of a block with one scale
    if shape == (rows,):
        height, scale = 1, scale[:, None]
    elif scale.numel() == 1:
        scale = scale.reshape(1, 1)
    elif len(shape) == 2 and shape[0] == rows and not columns % shape[1]:
        height, width = 1, columns // shape[1]
    else:
        height, width = _block(layout, tensor, (rows, columns), shape, blocks)
    group = layout.group(module, columns, width)
    scale = spread(scale, width, group, columns)
    if height > 1:
        scale = scale[torch.arange(rows) // height]
    return CodedWeight(8, group, low, scale)


def _block(
    layout: Layout, tensor: str, size: tuple[int, int], shape: tuple[int, ...], blocks: Sequence[object]
) -> tuple[int, int]:
    """Rows and columns of the blocks that give the scale its shape."""
    for block in blocks:
        match block:
            case [int(height), int(width)] if height > 0 and width > 0:
                if shape == (-(-size[0] // height), -(-size[1] // width)):
                    return height, width
    raise layout.shards.wrong(
        tensor,
        f"its shape is {list(shape)}, which does not fit a weight of {list(size)} and blocks of "
        f"{shown(blocks[0])}",
    )
