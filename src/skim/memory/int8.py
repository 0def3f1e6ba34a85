"""int8: symmetric codes in -127 : 127, two scales per token and head.

The second scale takes a quarter of the divergence from full precision away (SmolLM2-135M).
"""

from __future__ import annotations

import torch

from skim.memory.codec import ByteCodec


class Int8(ByteCodec):
    kind = torch.int8
    most = 127

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numbers, scales = self.scale(x)
        return numbers.round().nan_to_num(0).to(torch.int8), scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.restore(codes, scales, dtype)
