"""Pack matrix products that share an input into one: query, key and value; gate and up projections.

The weights are concatenated, and each projection returns its columns of the packed product. The first
projection that is called computes the product, which is cached until the last one is called. A compiled
layer cannot cache it; there a graph pass merges equal products.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.symbolic_shapes import statically_known_true

from skim.attention.hook import FEW_TOKENS
from skim.models.quantized.format import stacked
from skim.models.quantized.module import CodedLinear

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Packed(nn.Module, ABC):
    """A packed product. Not thread-safe, like the module that contains it."""

    out_features: int
    bypass = False  # True: compute each projection separately, as transformers does
    _input: torch.Tensor | None = None
    _cached: torch.Tensor | None = None

    def cached(self, hidden: torch.Tensor, last: bool) -> torch.Tensor:
        """The product with `hidden`, computed unless it is cached. `last` clears the cache."""
        computed = self._cached
        if computed is None or self._input is not hidden:
            computed = self(hidden)
        self._input, self._cached = (None, None) if last else (hidden, computed)
        return computed

    @abstractmethod
    def separate(self, hidden: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """The product of one projection: columns `first` to `end`."""


class PackedLinear(Packed, nn.Linear):
    """Weights of one kind, concatenated."""

    def separate(self, hidden: torch.Tensor, first: int, end: int) -> torch.Tensor:
        bias = None if self.bias is None else self.bias[first:end]
        return nn.functional.linear(hidden, self.weight[first:end], bias)


class PackedCoded(Packed):
    """Coded weights. Those of one kind are concatenated; the outputs of others are."""

    def __init__(self, products: list[CodedLinear]) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(_join_coded(products))
        self.out_features = sum(product.out_features for product in products)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        products = [piece(hidden) for piece in self.pieces]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)

    def separate(self, hidden: torch.Tensor, first: int, end: int) -> torch.Tensor:
        for piece in self.pieces:
            assert isinstance(piece, CodedLinear)
            if first < piece.out_features:
                bias = None if piece.bias is None else piece.bias[first:end]
                return CodedLinear(piece.coded.some_rows(first, end), bias)(hidden)  # type: ignore[no-any-return]
            first, end = first - piece.out_features, end - piece.out_features
        raise IndexError(f"no projection starts at column {first}")


class PackedPart(nn.Module):
    """One projection: some columns of a packed product."""

    def __init__(self, packed: Packed, first: int, end: int) -> None:
        super().__init__()
        self.packed = packed
        self.first = first
        self.end = end
        self.last = end == packed.out_features

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        packed = self.packed
        if packed.bypass:
            return packed.separate(hidden, self.first, self.end)
        compiling = torch.compiler.is_compiling()
        product = packed(hidden) if compiling else packed.cached(hidden, self.last)
        return product[..., self.first : self.end]  # type: ignore[no-any-return]


def pack_products(module: Any) -> None:
    """Pack all products that share an input. Calling it again changes nothing.

    Packing alone gains nothing on a CPU, where each separate product is already memory-bound.
    """
    for part in list(module.modules()):
        for names in TOGETHER:
            products = [getattr(part, name, None) for name in names]
            if len({getattr(product, "in_features", None) for product in products}) > 1:
                continue
            if all(type(product) is nn.Linear for product in products):
                _pack(part, names, products, _join(products))
            elif all(type(product) is CodedLinear for product in products):
                _pack(part, names, products, PackedCoded(products))  # type: ignore[arg-type]


@contextmanager
def bypass(module: Any) -> Iterator[None]:
    """Within this context the module computes its products one by one, as transformers does.

    A replaced `forward` that computes products has a `bypass` attribute too.
    """
    ours: list[Any] = [part for part in module.modules() if isinstance(part, Packed)]
    ours += [forward for part in module.modules() if hasattr(forward := vars(part).get("forward"), "bypass")]
    for one in ours:
        one.bypass = True
    try:
        yield
    finally:
        for one in ours:
            one.bypass = False


def _pack(owner: Any, names: tuple[str, ...], products: list[Any], packed: Packed | None) -> None:
    """Put parts of the packed product in the place of the products."""
    if packed is None:
        return
    first = 0
    for name, product in zip(names, products, strict=True):
        end = first + product.out_features
        setattr(owner, name, PackedPart(packed, first, end))
        first = end


def _join(products: list[Any]) -> PackedLinear | None:
    """None if only some have a bias."""
    if len({product.bias is None for product in products}) > 1:
        return None
    outputs = sum(product.out_features for product in products)
    with torch.device("meta"):
        packed = PackedLinear(products[0].in_features, outputs, bias=products[0].bias is not None)
    for name in [name for name, _ in packed.named_parameters()]:
        joined = torch.cat([getattr(product, name).detach() for product in products])
        setattr(packed, name, nn.Parameter(joined, requires_grad=False))
    return packed


def _join_coded(products: list[CodedLinear]) -> list[CodedLinear]:
    """Concatenate neighbours whose weights have the same kind."""
    joined: list[CodedLinear] = []
    for product in products:
        whole = stacked(joined[-1].coded, product.coded) if joined else None
        before = joined[-1].bias if joined else None
        if whole is None or (before is None) != (product.bias is None):
            joined.append(product)
        elif before is None or product.bias is None:
            joined[-1] = CodedLinear(whole)
        else:
            joined[-1] = CodedLinear(whole, torch.cat((before, product.bias)))
    return joined


class MergeProducts(CustomGraphPass):
    """Merge equal products in a layer's graph, and compute those of few tokens with our kernels.

    Inductor would fuse a one-token product with the activation before it, and every program would recompute
    that activation. Products with coded weights are merged too, and choose their kernel themselves.

    With few tokens a launch takes as long as a small operation. So the product of a gated MLP's first half
    computes its activation, and the one that ends a layer adds the residual.
    """

    def __call__(self, graph: fx.Graph) -> None:
        seen: dict[Any, fx.Node] = {}
        for node in list(graph.nodes):
            coded = node.target is torch.ops.skim.multiply_coded.default
            if node.op == "call_function" and (coded or _is_linear(node)):
                first = seen.setdefault((node.target, node.args, tuple(sorted(node.kwargs.items()))), node)
                if first is not node:
                    node.replace_all_uses_with(first)
                    graph.erase_node(node)
        for product in filter(_is_linear, seen.values()):
            # Not `numel()`: it would specialize the compiled layer to the symbolic size's current value.
            *sizes, _ = product.meta["example_value"].shape
            if all(statically_known_true(size <= FEW_TOKENS) for size in sizes):
                product.target = torch.ops.skim.multiply.default
                if not _gate_in_product(graph, product):
                    _add_in_product(graph, product)

    def uuid(self) -> str:
        return "skim merges equal products and computes those of few tokens, 7"


def _is_linear(node: fx.Node) -> bool:
    return node.target is nn.functional.linear


def _gate_in_product(graph: fx.Graph, product: fx.Node) -> bool:
    """Replace `silu(left half) * right half` of a product by one operator; False if that is not computed."""
    halves = [node for node in product.users if node.target is operator.getitem]
    if len(halves) != 2 or len(product.users) != 2:
        return False
    outputs = product.meta["example_value"].shape[-1]
    cuts = [slice(0, outputs // 2), slice(outputs // 2, outputs)]
    left, right = halves if halves[0].args[1] == (Ellipsis, cuts[0]) else reversed(halves)
    if [left.args[1], right.args[1]] != [(Ellipsis, cut) for cut in cuts] or outputs % 2:
        return False
    if not left.users or not right.users:
        return False
    silu, gated = (next(iter(node.users)) for node in (left, right))
    if silu.target is not nn.functional.silu or silu.args != (left,) or silu.kwargs.get("inplace"):
        return False
    if gated.target is not operator.mul or set(gated.args) != {silu, right}:
        return False
    if any(len(node.users) != 1 for node in (left, right, silu)):
        return False
    _replace(graph, gated, torch.ops.skim.multiply_gated.default, product.args, product.kwargs)
    for node in (silu, left, right, product):
        graph.erase_node(node)
    return True


def _add_in_product(graph: fx.Graph, product: fx.Node) -> None:
    """Replace a product, and its sum with another tensor that the graph returns, by one operator."""
    total = next(iter(product.users), None)
    if total is None or len(product.users) > 1 or total.target is not operator.add or total.kwargs:
        return
    others = [one for one in total.args if one is not product]
    if len(others) != 1 or not isinstance(others[0], fx.Node) or any(u.op != "output" for u in total.users):
        return
    shown, added = (one.meta.get("example_value") for one in (product, others[0]))
    if not (isinstance(shown, torch.Tensor) and isinstance(added, torch.Tensor)):
        return
    if (added.shape, added.dtype) != (shown.shape, shown.dtype):
        return
    _replace(graph, total, torch.ops.skim.multiply_add.default, (others[0], *product.args), product.kwargs)
    graph.erase_node(product)


def _replace(graph: fx.Graph, node: fx.Node, target: Any, args: Any, kwargs: Any) -> None:
    with graph.inserting_before(node):
        other = graph.call_function(target, args, kwargs)
    other.meta = dict(node.meta)
    node.replace_all_uses_with(other)
    graph.erase_node(node)


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """torch's `linear`. With few tokens on CUDA, a row-major weight takes our kernels.

    `residual` is added to the product. `gated`: silu of its left half times its right half.
    """
    row_major = weight.dim() == 2 and weight.stride(1) == 1 and (bias is None or bias.stride(0) == 1)
    if input.is_cuda and row_major:
        from skim.models.forwards import triton_few, triton_product

        tokens = input.numel() // weight.shape[1]
        if tokens == 1:
            return triton_product.multiply(input, weight, bias, residual, gated)
        if triton_few.can_multiply(tokens, weight, input.dtype):
            return triton_few.multiply_few(input, weight, bias, residual, gated)
    product = nn.functional.linear(input, weight, bias)
    if gated:
        left, right = product.chunk(2, dim=-1)
        product = (nn.functional.silu(left.float()) * right.float()).to(product.dtype)
    return product if residual is None else product.add_(residual)


@torch.library.custom_op("skim::multiply", mutates_args=())
def multiply(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`linear` as one operator, which compiled layers do not look into."""
    return linear(input, weight, bias)


@multiply.register_fake
def _(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return input.new_empty(*input.shape[:-1], *weight.shape[:-1])


@torch.library.custom_op("skim::multiply_add", mutates_args=())
def multiply_add(
    residual: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The same plus the residual, which has the product's shape."""
    return linear(input, weight, bias, residual)


@multiply_add.register_fake
def _(
    residual: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return input.new_empty(*input.shape[:-1], *weight.shape[:-1])


@torch.library.custom_op("skim::multiply_gated", mutates_args=())
def multiply_gated(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """silu of the product's left half times its right half."""
    return linear(input, weight, bias, gated=True)


@multiply_gated.register_fake
def _(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0] // 2)
