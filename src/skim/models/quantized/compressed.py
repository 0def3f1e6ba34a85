"""compressed-tensors checkpoints, as llm-compressor writes them.

    pack-quantized   weight_packed [outputs, inputs * bits / 32], codes of 4 or 8 bits with inputs in order,
                     and weight_shape; weight_zero_point [outputs * bits / 32, groups] is packed along outputs
    int-quantized    weight int8 [outputs, inputs], weight_zero_point int8; also named naive-quantized
    float-quantized  weight fp8 [outputs, inputs]

Scales are weight_scale: one number, or [outputs, 1], [outputs, groups] or blocks. Codes and zero points are
signed; packed ones are stored with half of their range added. weight_g_idx is the group of every input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from skim.errors import shown
from skim.models.quantized.format import CodedWeight
from skim.models.quantized.fp8 import BLOCK, read_fp8
from skim.models.quantized.layout import FLOAT_TYPES, Layout
from skim.models.quantized.packed import assemble, unpack_words
from skim.models.quantized.shards import Shards

FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "dense")
MIXED = "mixed-precision"  # every group of modules names its own format


class CompressedLayout(Layout):
    """Reads weights by their tensors. The config says only what must be refused."""

    format = "compressed-tensors"
    marks = ("weight_packed", "weight")
    endings = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

    def __init__(self, shards: Shards, settings: Mapping[str, Any]) -> None:
        super().__init__(shards, settings)
        groups = [one for one in self.setting("config_groups", {}, dict).values() if isinstance(one, dict)]
        named = [self.setting("format", "dense", str), *(one.get("format") for one in groups)]
        for one in named:
            if one not in FORMATS and one not in (MIXED, None):
                raise self.refused(f"format {shown(one)}")
        sparse = self.setting("sparsity_config", {}, dict, type(None)) or {}
        if sparse.get("format", "dense") != "dense":
            raise self.refused(f"a sparsity_config of the format {shown(sparse['format'])}")
        if settings.get("transform_config"):
            raise self.refused("a transform_config")
        self._bits, self._blocks = set(), [BLOCK]
        for one in groups:
            weights = self.setting("weights", {}, dict, type(None), of=one) or {}
            self._bits.add(self.setting("num_bits", 8, int, of=weights))
            if isinstance(block := weights.get("block_structure"), list):
                self._blocks.insert(0, block)
        if refused := sorted(self._bits - {4, 8}):
            raise self.refused(f"{refused[0]} bits")

    def marked(self, module: str, ending: str) -> bool:
        whole = self.shards.dtype(f"{module}.{ending}") in ("I8", "F8_E4M3", "F8_E5M2")
        return ending == "weight_packed" or whole

    def read(self, module: str) -> CodedWeight:
        if self.has(module, "weight_packed"):
            return self._read_packed(module)
        if self.shards.dtype(f"{module}.weight") != "I8":
            return read_fp8(self, module, "weight_scale", self._blocks)
        stored = self.part(module, "weight", ("I8",), (None, None))
        codes = stored.view(torch.uint8) ^ 0x80
        zeros = 128 if not self.has(module, "weight_zero_point") else None
        return self._assemble(module, codes, 8, zeros)

    def _read_packed(self, module: str) -> CodedWeight:
        words = self.part(module, "weight_packed", ("I32",), (None, None))
        rows, columns = self.part(module, "weight_shape", ("I64", "I32"), (2,)).tolist()
        bits = next((bits for bits in (4, 8) if words.shape == (rows, -(-columns * bits // 32))), None)
        if bits is None:
            raise self.shards.wrong(
                f"{module}.weight_packed",
                f"its shape is {list(words.shape)}, which is not [{rows}, {columns}] in 4 or 8 bits",
            )
        codes = unpack_words(words, bits)[:, :columns]
        zeros = 2 ** (bits - 1) if not self.has(module, "weight_zero_point") else None
        return self._assemble(module, codes, bits, zeros)

    def _assemble(self, module: str, codes: torch.Tensor, bits: int, zeros: int | None) -> CodedWeight:
        rows, columns = codes.shape
        scale = self._scale(module, rows)
        given = self.even_groups(module, "weight_scale", columns, scale.shape[1])
        found = self._zeros(module, bits, scale) if zeros is None else zeros
        order = None
        if self.has(module, "weight_g_idx"):
            index = self.part(module, "weight_g_idx", ("I32", "I64"), (columns,))
            if int(index.min()) >= 0:  # -1: not set
                order = self.sorted_groups(module, "weight_g_idx", index, scale.shape[1])
        if order is not None:
            codes = codes[:, order]
        return assemble(codes, bits, scale, found, given, self.group(module, columns, given), order)

    def _scale(self, module: str, rows: int) -> torch.Tensor:
        """Scales of integer codes. [rows, groups]"""
        shape = self.shards.shape(f"{module}.weight_scale") if self.has(module, "weight_scale") else ()
        if len(shape) == 2:
            return self.part(module, "weight_scale", FLOAT_TYPES, (rows, None))
        scale = self.part(module, "weight_scale", FLOAT_TYPES, (1,) * len(shape))
        return scale.reshape(1, 1).expand(rows, 1)

    def _zeros(self, module: str, bits: int, scale: torch.Tensor) -> torch.Tensor:
        """Zero points as unsigned numbers. uint8 [rows, groups]"""
        rows, groups = scale.shape
        tensor = f"{module}.weight_zero_point"
        if self.shards.dtype(tensor) == "I32":
            words = self.part(module, "weight_zero_point", ("I32",), (-(-rows * bits // 32), groups))
            return unpack_words(words.t(), bits)[:, :rows].t()
        if len(self.shards.shape(tensor)) < 2:
            value = self.part(module, "weight_zero_point", ("I8",), (1,) * len(self.shards.shape(tensor)))
            value = value.reshape(1, 1).expand(rows, groups)
        else:
            value = self.part(module, "weight_zero_point", ("I8",), (rows, groups))
        half = 2 ** (bits - 1)
        if int(value.min()) < -half or int(value.max()) >= half:
            raise self.shards.wrong(tensor, f"it has zero points beyond {bits} bits")
        return torch.add(value.short(), half).to(torch.uint8)
