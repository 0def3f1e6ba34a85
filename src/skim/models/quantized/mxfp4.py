"""MXFP4 checkpoints of gpt-oss: experts in 4-bit floats, which are restored when they are read.

    NAME_blocks uint8 [experts, outputs, groups, 16]: two values in a byte, the first in its low bits
    NAME_scales uint8 [experts, outputs, groups]: a power of two for 32 inputs, plus 127

The plain model has NAME [experts, inputs, outputs]. All values are exact in bfloat16.
"""

from __future__ import annotations

import torch

from skim.models.quantized.format import CodedWeight
from skim.models.quantized.layout import Layout

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7; 8 to 15 are negative
BLOCKS, SCALES = "_blocks", "_scales"
LARGEST_SCALE = 127 + 124  # 6 * 2**124 is finite


class MXFP4Layout(Layout):
    """Restores experts. No weight stays coded."""

    format = "mxfp4"
    marks = ()
    endings = ()

    def restored(self) -> set[str]:
        """Names of weights that `restore` reads: there are no codes for them."""
        return {name.removesuffix(BLOCKS) for name in self.shards.names if name.endswith(BLOCKS)}

    def parts(self) -> set[str]:
        packed = {f"{name}{ending}" for name in self.restored() for ending in (BLOCKS, SCALES)}
        return super().parts() | packed

    def restore(self, name: str) -> torch.Tensor:
        """The values of a weight that is `restored`."""
        module, _, ending = name.rpartition(".")
        blocks = self.part(module, ending + BLOCKS, ("U8",), (None, None, None, 16))
        experts, outputs, groups, _ = blocks.shape
        scales = self.part(module, ending + SCALES, ("U8",), (experts, outputs, groups))
        if int(scales.max()) > LARGEST_SCALE:
            raise self.shards.wrong(name + SCALES, "it has scales so large that values are not finite")
        table = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.bfloat16)
        found = torch.empty(experts, groups * 32, outputs, dtype=torch.bfloat16)
        for expert in range(experts):
            codes = torch.stack((blocks[expert] & 15, blocks[expert] >> 4), dim=-1).flatten(-2)
            values = table[codes.int()].float() * torch.exp2(scales[expert].float() - 127)[:, :, None]
            found[expert] = values.flatten(1).t()
        return found

    def read(self, module: str) -> CodedWeight:
        raise AssertionError(module)
