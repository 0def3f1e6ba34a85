"""The size of a model's weights in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skim.models.quantized.module import Coded


@dataclass(frozen=True)
class WeightStats:
    """Bytes of all weights, and the bits that a value takes on average. Tied weights count once."""

    bytes: int
    bits: float


def weights_of(module: Any) -> WeightStats:
    """Measure a module."""
    tensors = {one.data_ptr(): one for one in (*module.parameters(), *module.buffers())}
    size = sum(int(one.nbytes) for one in tensors.values())
    coded = {part.low.data_ptr(): part.values for part in module.modules() if isinstance(part, Coded)}
    plain = {one.data_ptr(): one.numel() for one in module.parameters()}
    values = sum(coded.values()) + sum(plain.values())
    return WeightStats(size, 8 * size / max(values, 1))
