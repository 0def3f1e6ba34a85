"""The size of a model's weights in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from skim.models.quantized.module import Coded


@dataclass(frozen=True)
class WeightStats:
    """Bytes of all weights, and the bits that a value takes on average. Tied weights count once."""

    bytes: int
    bits: float


def weights_of(module: Any) -> WeightStats:
    """Measure a module."""
    tensors = {place_of(one): one for one in (*module.parameters(), *module.buffers())}
    size = sum(int(one.nbytes) for one in tensors.values())
    coded = {place_of(part.low): part.values for part in module.modules() if isinstance(part, Coded)}
    plain = {place_of(one): one.numel() for one in module.parameters()}
    values = sum(coded.values()) + sum(plain.values())
    return WeightStats(size, 8 * size / max(values, 1))


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Identifies the memory of a tensor, even while it is freed."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())
