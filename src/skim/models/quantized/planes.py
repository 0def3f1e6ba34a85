"""Skim's own checkpoints: the planes of coded weights as they are in memory.

A weight NAME is stored as the tensors `NAME.low`, `NAME.scale` and so on. Its bits, its group and its zero
point stand in config.json:

    "quantization_config": {"quant_method": "skim", "weights": {NAME: {"bits": 4, "group": 32, "zero": 8}}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skim.models.quantized.format import CodedWeight
from skim.models.quantized.layout import Layout
from skim.models.quantized.module import PLANES
from skim.models.quantized.shards import Shards

METHOD = "skim"


def describe(weights: Mapping[str, CodedWeight]) -> dict[str, Any]:
    """The `quantization_config` for these weights, by their modules' names."""
    found = {
        name: {"bits": weight.bits, "group": weight.group, "zero": weight.zero}
        for name, weight in weights.items()
    }
    return {"quant_method": METHOD, "weights": found}


class PlaneLayout(Layout):
    """Reads the planes."""

    format = METHOD
    marks = ("low",)
    endings = tuple(name for name in PLANES if name != "low")

    def __init__(self, shards: Shards, settings: Mapping[str, Any]) -> None:
        super().__init__(shards, settings)
        self._weights = self.setting("weights", {}, dict)
        if lost := sorted(set(self._weights) ^ self.modules):
            raise shards.broken("config.json", f"its quantization_config and the tensors differ on {lost[0]}")

    def read(self, module: str) -> CodedWeight:
        one = self._weights[module]
        if not isinstance(one, dict):
            raise self.refused(f"weights without bits, such as {module}")
        bits, group, zero = (self.setting(key, 0, int, of=one) for key in ("bits", "group", "zero"))
        if not 0 <= zero < 256:
            raise self.refused(f"the zero point {zero} of {module}")
        planes = {
            plane: self.shards.tensor(f"{module}.{plane}") for plane in PLANES if self.has(module, plane)
        }
        if "scale" not in planes:
            raise self.shards.wrong(f"{module}.low", f"there is no tensor {module}.scale beside it")
        return CodedWeight(bits, group, zero=zero, **planes)
