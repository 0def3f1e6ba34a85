"""Compiled layers with coded weights: equal products are computed once, and nothing looks into them."""

from __future__ import annotations

import uuid
from typing import Any

import torch
from torch import nn

from skim.models.forwards import compiled
from skim.models.forwards.packed import MergeProducts, PackedPart, pack_products
from skim.models.quantized.module import CodedLinear
from tests.models.quantized.weights import random_weight


class Layer(nn.Module):
    """Three projections of one input, and another product after them."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, CodedLinear(random_weight("zeros", 4, 32, 32, 64, 0)))
        self.o_proj = CodedLinear(random_weight("super-offset", 6, 16, 64, 256, 0), torch.randn(64))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = torch.cat([self.q_proj(hidden), self.k_proj(hidden) * 2, self.v_proj(hidden).sin()], dim=-1)
        return self.o_proj(nn.functional.pad(mixed, (0, 160))) + hidden  # type: ignore[no-any-return]


COUNTS: list[tuple[int, int]] = []  # torch copies the pass


class Counting(MergeProducts):
    """Counts products before and after they are merged."""

    def __call__(self, graph: Any) -> None:
        def products() -> int:
            return sum(node.target is torch.ops.skim.multiply_coded.default for node in graph.nodes)

        before = products()
        super().__call__(graph)
        graph.lint()
        COUNTS.append((before, products()))

    def uuid(self) -> str:
        return str(uuid.uuid4())  # so that no cached code skips the pass


def test_a_packed_product_is_computed_once_in_compiled_layers() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    COUNTS.clear()
    layers = [Layer(), Layer()]
    inputs = [torch.randn(1, tokens, 64) for tokens in (9, 1)]
    expected = [[layer(hidden) for layer in layers] for hidden in inputs]
    options = {**compiled.OPTIONS, "pre_grad_custom_pass": Counting()}
    for layer in layers:
        pack_products(layer)
        assert isinstance(layer.q_proj, PackedPart)
        layer.compile(dynamic=True, options=dict(options))
    for hidden, wanted in zip(inputs, expected, strict=True):
        for layer, want in zip(layers, wanted, strict=True):
            torch.testing.assert_close(layer(hidden), want, rtol=1e-4, atol=1e-4)
    assert set(COUNTS) == {(4, 2)}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # one token; any other number
    assert not torch._dynamo.utils.counters["graph_break"]
