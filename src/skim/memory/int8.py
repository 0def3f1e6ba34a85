"""int8: symmetric codes in -127 : 127, one scale per token and head."""

from __future__ import annotations

import torch

from skim.memory.codec import SCALES, Codec, plain_scales, restored, scaled
from skim.memory.store import Plane

MOST = 127


class Int8(Codec):
    """One byte a value, and two bytes a head."""

    def planes(self) -> tuple[Plane, Plane]:
        return Plane("", (self.kv_heads, self.dim), torch.int8), Plane("", (self.kv_heads,), SCALES)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = plain_scales(x, MOST)
        codes = scaled(x, scales).round().clamp(-MOST, MOST).nan_to_num(0).to(torch.int8)
        return codes, scales[..., 0]

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return restored(codes, scales[..., None], dtype)
