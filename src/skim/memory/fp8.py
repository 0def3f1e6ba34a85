"""fp8: e4m3 numbers, two scales per token and head. As large as int8 and less precise, but read natively.

Codes are stored as bytes: torch indexes these on every device.
"""

from __future__ import annotations

import torch

from skim.memory.codec import ByteCodec

KIND = torch.float8_e4m3fn


class Fp8(ByteCodec):
    kind = torch.uint8
    most = 448.0

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numbers, scales = self.scale(x)
        return numbers.to(KIND).view(torch.uint8), scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.restore(codes.view(KIND), scales, dtype)
