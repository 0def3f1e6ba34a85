"""Products of one input with several weights as one: queries, keys and values; gates and what they let pass.

The weights are laid one below the other, and a module that asks for one product gets its part of all of
them. Asked for three times, the whole would be computed three times; the compiler, which sees all of a layer,
is told to compute it once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Part(nn.Module):
    """Some columns of a product."""

    def __init__(self, whole: nn.Linear, first: int, end: int) -> None:
        super().__init__()
        self.whole = whole
        self.first = first
        self.end = end

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.whole(hidden)[..., self.first : self.end]  # type: ignore[no-any-return]


def pack_products(module: Any) -> None:
    """Lay the weights of all products together that have the same input. Worth nothing uncompiled."""
    for part in list(module.modules()):
        for names in TOGETHER:
            products = [getattr(part, name, None) for name in names]
            if all(type(product) is nn.Linear for product in products):
                _pack(part, names, products)


def _pack(owner: Any, names: tuple[str, ...], products: list[Any]) -> None:
    if len({(product.in_features, product.bias is None) for product in products}) > 1:
        return
    sizes = [product.out_features for product in products]
    with torch.device("meta"):
        whole = nn.Linear(products[0].in_features, sum(sizes), bias=products[0].bias is not None)
    for name in [name for name, _ in whole.named_parameters()]:
        joined = torch.cat([getattr(product, name).detach() for product in products])
        setattr(whole, name, nn.Parameter(joined, requires_grad=False))
    first = 0
    for name, size in zip(names, sizes, strict=True):
        setattr(owner, name, Part(whole, first, first + size))
        first += size


class MergeProducts(CustomGraphPass):
    """Of equal products in a layer's graph all but the first go."""

    def __call__(self, graph: fx.Graph) -> None:
        seen: dict[Any, fx.Node] = {}
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target is nn.functional.linear:
                first = seen.setdefault((node.args, tuple(sorted(node.kwargs.items()))), node)
                if first is not node:
                    node.replace_all_uses_with(first)
                    graph.erase_node(node)

    def uuid(self) -> str:
        return "skim merges equal products, 1"
