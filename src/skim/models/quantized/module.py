"""Modules with coded weights: they replace `nn.Linear` and `nn.Embedding`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from skim.models.quantized.format import CodedWeight
from skim.models.quantized.product import look_up, multiply, multiply_coded

PLANES = ("low", "scale", "high", "offset", "factor", "order")


class Coded(nn.Module):
    """Holds a coded weight. Its planes are buffers, so they move with the module."""

    low: torch.Tensor
    scale: torch.Tensor
    high: torch.Tensor | None
    offset: torch.Tensor | None
    factor: torch.Tensor | None
    order: torch.Tensor | None

    def __init__(self, weight: CodedWeight) -> None:
        super().__init__()
        self._coded: CodedWeight | None = None
        self.bits, self.group, self.zero = weight.bits, weight.group, weight.zero
        for name in PLANES:
            self.register_buffer(name, getattr(weight, name))

    @property
    def values(self) -> int:
        """The number of values of the weight."""
        return self.coded.rows * self.coded.columns

    @property
    def coded(self) -> CodedWeight:
        """The weight, sharing memory. One object until planes are replaced: kernels keep data with it."""
        kept = self._coded
        if kept is not None and kept.low is self.low and kept.scale is self.scale:
            return kept
        self._coded = CodedWeight(
            self.bits,
            self.group,
            self.low,
            self.scale,
            self.high,
            self.offset,
            self.zero,
            self.factor,
            self.order,
        )
        return self._coded

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move planes, and never convert their dtype: scales are part of the format."""
        kept = {name: getattr(self, name) for name in PLANES if getattr(self, name) is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            moved = getattr(self, name)
            if moved.dtype != before.dtype:
                setattr(self, name, before.to(moved.device))
        return self


class CodedLinear(Coded):
    """`nn.Linear` with a coded weight."""

    bias: torch.Tensor | None

    def __init__(self, weight: CodedWeight, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight)
        self.in_features, self.out_features = weight.columns, weight.rows
        self.register_buffer("bias", bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            product = multiply(hidden.reshape(-1, hidden.shape[-1]), self.coded, self.bias)
            return product.view(*hidden.shape[:-1], self.out_features)
        return multiply_coded(  # type: ignore[no-any-return]
            hidden,
            self.low,
            self.scale,
            self.high,
            self.offset,
            self.factor,
            self.order,
            self.bias,
            self.bits,
            self.group,
            self.zero,
        )


class CodedEmbedding(Coded):
    """`nn.Embedding` with a coded weight. Its rows are restored when they are looked up.

    `multiplier`: some families multiply embeddings by a number.
    """

    def __init__(self, weight: CodedWeight, dtype: torch.dtype, multiplier: float | None = None) -> None:
        super().__init__(weight)
        self.num_embeddings, self.embedding_dim = weight.rows, weight.columns
        self.dtype = dtype
        self._multiplier = None if multiplier is None else torch.tensor(multiplier).to(dtype).item()

    def table_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the table. [n] -> [n, width]"""
        return look_up(self.coded, ids, self.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.table_rows(ids.reshape(-1)).view(*ids.shape, self.embedding_dim)
        return rows if self._multiplier is None else rows * self._multiplier
