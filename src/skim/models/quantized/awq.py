"""AWQ checkpoints: 4 bits with zero points, packed along the outputs ("gemm") or the inputs ("gemv").

gemm  qweight [inputs, outputs / 8], qzeros [groups, outputs / 8], scales [groups, outputs];
      a word holds outputs 0, 2, 4, 6, 1, 3, 5, 7, lowest bits first
gemv  qweight [outputs, inputs / 8], qzeros [outputs, groups / 8], scales [outputs, groups], the last two
      filled up; a word holds inputs in order
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from skim.models.quantized.format import CodedWeight
from skim.models.quantized.layout import FLOAT_TYPES, Layout
from skim.models.quantized.packed import assemble, unpack_words
from skim.models.quantized.shards import Shards

_AT_ONCE = 2**20  # codes that are unpacked together: they should stay in the cache
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where outputs 0, 1, 2, ... are in a word


class AWQLayout(Layout):
    """Reads both layouts."""

    format = "awq"
    marks = ("qweight",)
    endings = ("qzeros", "scales")

    def __init__(self, shards: Shards, settings: Mapping[str, Any]) -> None:
        super().__init__(shards, settings)
        bits = self.setting("bits", settings.get("w_bit", 4), int)
        if bits != 4:
            raise self.refused(f"{bits} bits")
        self._version = str(self.setting("version", "gemm", str)).lower()
        if self._version not in ("gemm", "gemv"):
            raise self.refused(f"version {self._version!r}")
        self._group = self.setting("group_size", settings.get("q_group_size", 128), int)

    def read(self, module: str) -> CodedWeight:
        words = self.part(module, "qweight", ("I32",), (None, None))
        if self._version == "gemv":
            codes = unpack_words(words, 4)
            rows, columns = codes.shape
            given = self.given_group(module, columns, self._group)
            groups = columns // given
            scale = self._wide(module, "scales", FLOAT_TYPES, rows, groups)
            zeros = unpack_words(self._wide(module, "qzeros", ("I32",), rows, -(-groups // 8)), 4)
            scale, zeros = scale[:, :groups], zeros[:, :groups]
        else:
            codes = _outputs(words)
            rows, columns = codes.shape
            given = self.given_group(module, columns, self._group)
            groups = columns // given
            scale = self.part(module, "scales", FLOAT_TYPES, (groups, rows)).t()
            zeros = _outputs(self.part(module, "qzeros", ("I32",), (groups, rows // 8)))
        return assemble(codes, 4, scale, zeros, given, self.group(module, columns, given))

    def _wide(self, module: str, ending: str, dtypes: tuple[str, ...], rows: int, least: int) -> torch.Tensor:
        """A matrix with at least so many columns."""
        value = self.part(module, ending, dtypes, (rows, None))
        if value.shape[1] < least:
            raise self.shards.wrong(
                f"{module}.{ending}", f"its shape is {list(value.shape)}, with less than {least} columns"
            )
        return value


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """Codes by outputs, some words at a time. [inputs, outputs / 8] -> [outputs, inputs]"""
    inputs, count = words.shape
    codes = torch.empty(count, 8, inputs, dtype=torch.uint8)
    some = max(1, _AT_ONCE // (8 * inputs))
    for first in range(0, count, some):
        part = words[:, first : first + some].t()
        bytes_ = (
            part.reshape(-1).view(torch.uint8).view(*part.shape, 4).movedim(2, 0).contiguous()
        )  # [4, some, inputs]
        for output, place in enumerate(PLACES):
            found = bytes_[place // 2]
            codes[first : first + some, output] = found >> 4 if place % 2 else found & 15
    return codes.view(count * 8, inputs)
