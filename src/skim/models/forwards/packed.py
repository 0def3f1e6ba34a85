"""Products of one input with several weights as one: queries, keys and values; gates and what they let pass.

The weights are laid one below the other, and a module that asks for one product gets its part of all of them.
All are computed when the first is asked for, and remembered until the last is. In a layer that is compiled
nothing can be remembered; there the compiler, which sees all of the layer, is told to compute equal products
once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Whole(nn.Linear):
    """All of the products. Used by one thread at a time, as the module it is part of is."""

    apart = False  # whether each product is computed by itself, as before the weights were laid together
    _asked: torch.Tensor | None = None
    _computed: torch.Tensor | None = None

    def once(self, hidden: torch.Tensor, last: bool) -> torch.Tensor:
        """The products of `hidden`, computed if it is another than before; forgotten with the last part."""
        computed = self._computed
        if computed is None or self._asked is not hidden:
            computed = self(hidden)
        self._asked, self._computed = (None, None) if last else (hidden, computed)
        return computed


class Part(nn.Module):
    """Some columns of the products."""

    def __init__(self, whole: Whole, first: int, end: int) -> None:
        super().__init__()
        self.whole = whole
        self.first = first
        self.end = end
        self.last = end == whole.out_features

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        whole, rows = self.whole, slice(self.first, self.end)
        if whole.apart:
            bias = None if whole.bias is None else whole.bias[rows]
            return nn.functional.linear(hidden, whole.weight[rows], bias)
        compiling = torch.compiler.is_compiling()
        products = whole(hidden) if compiling else whole.once(hidden, self.last)
        return products[..., rows]  # type: ignore[no-any-return]


def pack_products(module: Any) -> None:
    """Lay the weights of all products together that have the same input. Calling it again changes nothing.

    By itself it is no gain on a CPU, where each product alone is as fast as memory.
    """
    for part in list(module.modules()):
        for names in TOGETHER:
            products = [getattr(part, name, None) for name in names]
            if all(type(product) is nn.Linear for product in products):
                _pack(part, names, products)


@contextmanager
def apart(module: Any) -> Iterator[None]:
    """For as long as it lasts, the module computes its products one by one, as transformers would.

    Whatever replaces a part's forward and computes products has such an attribute, too.
    """
    ours: list[Any] = [part for part in module.modules() if isinstance(part, Whole)]
    ours += [forward for part in module.modules() if hasattr(forward := vars(part).get("forward"), "apart")]
    for one in ours:
        one.apart = True
    try:
        yield
    finally:
        for one in ours:
            one.apart = False


def _pack(owner: Any, names: tuple[str, ...], products: list[Any]) -> None:
    if len({(product.in_features, product.bias is None) for product in products}) > 1:
        return
    sizes = [product.out_features for product in products]
    with torch.device("meta"):
        whole = Whole(products[0].in_features, sum(sizes), bias=products[0].bias is not None)
    for name in [name for name, _ in whole.named_parameters()]:
        joined = torch.cat([getattr(product, name).detach() for product in products])
        setattr(whole, name, nn.Parameter(joined, requires_grad=False))
    first = 0
    for name, size in zip(names, sizes, strict=True):
        setattr(owner, name, Part(whole, first, first + size))
        first += size


class MergeProducts(CustomGraphPass):
    """Of equal products in a layer's graph all but the first go; those of one token are computed by us.

    To the compiler, which writes such a product itself, what it reads would become a part of it: each of its
    programs would compute an activation anew.
    """

    def __call__(self, graph: fx.Graph) -> None:
        seen: dict[Any, fx.Node] = {}
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target is nn.functional.linear:
                first = seen.setdefault((node.args, tuple(sorted(node.kwargs.items()))), node)
                if first is not node:
                    node.replace_all_uses_with(first)
                    graph.erase_node(node)
        for product in seen.values():
            # Not by `numel()`: it makes a number of a symbolic size, and with it the layer one for that size.
            if all(size == 1 for size in product.meta["example_value"].shape[:-1]):
                product.target = torch.ops.skim.multiply_one.default

    def uuid(self) -> str:
        return "skim merges equal products and computes those of one token, 2"


@torch.library.custom_op("skim::multiply_one", mutates_args=())
def multiply_one(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`linear` for one token, by our kernel if the weight lies as usual."""
    usual = weight.dim() == 2 and weight.stride(1) == 1 and (bias is None or bias.stride(0) == 1)
    if input.is_cuda and usual:
        from skim.models.forwards.triton_product import multiply

        return multiply(input, weight, bias)
    return nn.functional.linear(input, weight, bias)


@multiply_one.register_fake
def _(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return input.new_empty(*input.shape[:-1], *weight.shape[:-1])
