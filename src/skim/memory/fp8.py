"""fp8: e4m3 numbers, one scale per token and head. As large as int8 and less precise, but read natively.

Codes are stored as bytes: torch indexes these on every device.
"""

from __future__ import annotations

import torch

from skim.memory.codec import SCALES, Codec, plain_scales, restored, scaled
from skim.memory.store import Plane

KIND = torch.float8_e4m3fn
MOST = 448.0


class Fp8(Codec):
    """One byte a value, and two bytes a head."""

    def planes(self) -> tuple[Plane, Plane]:
        return Plane("", (self.kv_heads, self.dim), torch.uint8), Plane("", (self.kv_heads,), SCALES)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = plain_scales(x, MOST)
        return scaled(x, scales).clamp(-MOST, MOST).to(KIND).view(torch.uint8), scales[..., 0]

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return restored(codes.view(KIND), scales[..., None], dtype)
