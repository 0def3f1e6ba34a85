"""GPTQ checkpoints: 4 or 8 bits with zero points, packed along the inputs.

    qweight [inputs * bits / 32, outputs], qzeros [groups, outputs * bits / 32], scales [groups, outputs],
    g_idx [inputs]: the group of every input

The first version of the format stores zero points less one, the second as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from skim.models.quantized.format import CodedWeight
from skim.models.quantized.layout import FLOAT_TYPES, Layout
from skim.models.quantized.packed import assemble, unpack_words
from skim.models.quantized.shards import Shards

VERSIONS = {"gptq": 1, "gptq_v2": 0}  # what is missing from stored zero points


class GPTQLayout(Layout):
    """Reads both versions, with columns in any order."""

    format = "gptq"
    marks = ("qweight",)
    endings = ("qzeros", "scales", "g_idx")

    def __init__(self, shards: Shards, settings: Mapping[str, Any]) -> None:
        super().__init__(shards, settings)
        version = self.setting("checkpoint_format", "gptq", str)
        if version not in VERSIONS:
            raise self.refused(f"checkpoint_format {version!r}")
        if settings.get("is_marlin_format"):
            raise self.refused("is_marlin_format true")
        self._missing = VERSIONS[version]
        self._bits: int = self.setting("bits", None, int)
        if self._bits not in (4, 8):
            raise self.refused(f"{self._bits} bits")

    def read(self, module: str) -> CodedWeight:
        words = self.part(module, "qweight", ("I32",), (None, None))
        bits = self._bits_of(module, len(words))
        columns, rows = len(words) * 32 // bits, words.shape[1]
        scale = self.part(module, "scales", FLOAT_TYPES, (None, rows))
        groups = len(scale)
        given = self.even_groups(module, "scales", columns, groups)
        packed = self.part(module, "qzeros", ("I32",), (groups, -(-rows * bits // 32)))
        zeros = unpack_words(packed, bits)[:, :rows] + self._missing & 2**bits - 1
        codes, order = unpack_words(words.t(), bits), None
        if self.has(module, "g_idx"):
            index = self.part(module, "g_idx", ("I32", "I64"), (columns,))
            if bool(index.any()):  # all zero: not set
                order = self.sorted_groups(module, "g_idx", index, groups)
        if order is not None:
            codes = codes[:, order]
        group = self.group(module, columns, given)
        return assemble(codes, bits, scale.t(), torch.as_tensor(zeros.t()), given, group, order)

    def _bits_of(self, module: str, words: int) -> int:
        """The bits of a module. They may differ from the config's if it has rules for some modules."""
        if not self.settings.get("dynamic") or not self.has(module, "g_idx"):
            return self._bits
        columns = len(self.part(module, "g_idx", ("I32", "I64"), (None,)))
        bits = words * 32 // columns
        if bits not in (4, 8):
            raise self.refused(f"{bits} bits for {module}")
        return bits
