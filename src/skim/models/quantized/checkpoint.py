"""A model directory's weights, plain and coded, whatever its files look like."""

from __future__ import annotations

from pathlib import Path

import torch

from skim.errors import ModelError, shown
from skim.models.quantized.awq import AWQLayout
from skim.models.quantized.checks import why_unusable
from skim.models.quantized.compressed import CompressedLayout
from skim.models.quantized.format import CodedWeight
from skim.models.quantized.fp8 import FP8Layout
from skim.models.quantized.gptq import GPTQLayout
from skim.models.quantized.layout import Layout
from skim.models.quantized.mxfp4 import MXFP4Layout
from skim.models.quantized.planes import PlaneLayout
from skim.models.quantized.shards import Shards, read_json

LAYOUTS: dict[str, type[Layout]] = {
    layout.format: layout
    for layout in (PlaneLayout, AWQLayout, GPTQLayout, CompressedLayout, FP8Layout, MXFP4Layout)
}


class Checkpoint:
    """The weights in a directory with config.json and safetensors files, by their names in the plain model.

    They are read when asked for, one at a time. Anything that cannot be read raises a ModelError.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._shards = Shards(path, name)
        self._layout = self._find_layout()
        coded = self._layout.modules if self._layout is not None else set()
        self._coded = {f"{module}.weight": module for module in coded}
        parts = self._layout.parts() if self._layout is not None else set()
        self._restored = self._layout.restored() if isinstance(self._layout, MXFP4Layout) else set()
        self._plain = self._shards.names - parts | self._restored
        if both := sorted(self._plain & set(self._coded)):
            raise self._shards.wrong(both[0], "the weight is there twice, plain and coded")

    @property
    def format(self) -> str | None:
        """How weights are packed: "skim", "awq", ...; None if all are plain."""
        packed = self._coded or self._restored
        return self._layout.format if self._layout is not None and packed else None

    def names(self) -> set[str]:
        return self._plain | set(self._coded)

    def is_coded(self, name: str) -> bool:
        return name in self._coded

    def coded(self, name: str) -> CodedWeight:
        """A coded weight, in memory of its own."""
        assert self._layout is not None
        module = self._coded[name]
        weight = self._layout.read(module)
        if why := why_unusable(weight):
            raise self._shards.wrong(f"{module}.{self._layout.mark(module)}", f"the weight has {why}")
        return weight

    def restored(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """All weights as plain tensors, in memory together."""
        return {
            name: self.coded(name).restore(dtype) if self.is_coded(name) else self.plain(name)
            for name in sorted(self.names())
        }

    def plain(self, name: str) -> torch.Tensor:
        """A weight that is not coded, in the type of the file and in memory of its own."""
        if name in self._restored and isinstance(self._layout, MXFP4Layout):
            return self._layout.restore(name)
        return self._shards.tensor(name)

    def kind(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and shape of a weight; those of its restored values if it is packed."""
        if name in self._coded:
            weight = self.coded(name)
            return torch.float32, (weight.rows, weight.columns)
        if name in self._restored:
            value = self.plain(name)
            return value.dtype, tuple(value.shape)
        return self._shards.torch_dtype(name), self._shards.shape(name)

    def _find_layout(self) -> Layout | None:
        config = read_json(self._shards, "config.json")
        settings = config.get("quantization_config")
        if settings is None:
            if packed := sorted(name for name in self._shards.names if name.endswith(".qweight")):
                raise self._shards.wrong(
                    packed[0], "its config.json has no quantization_config that says how it is packed"
                )
            return None
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        layout = LAYOUTS.get(method) if isinstance(method, str) else None
        if layout is None:
            raise ModelError(
                f"{self._shards.name}: its config.json has the quantization method {shown(method)}, which "
                f"Skim does not read; it reads {', '.join(LAYOUTS)}: use such a checkpoint, a GGUF file or "
                "the unquantized model"
            )
        return layout(self._shards, settings)
