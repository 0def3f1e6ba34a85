"""The halves of a decoder layer, before and after attention, as one call of compiled code each.

For one token a step's operations take less time in C than Python takes to call them one by one. `Parts` has
the same operations, and gives the same bits with native ones.
"""

from __future__ import annotations

from ctypes import Structure, addressof, c_double, c_int, c_int64, c_uint, c_void_p
from functools import cache

import torch

from skim.models.forwards.few_tokens import SOURCE, NativeOps, for_few_tokens
from skim.models.forwards.parts import Heads, Norm, Parts, Product
from skim.models.quantized.cpu import Planes, kernels, kernels_for, planes_of
from skim.models.quantized.format import CodedWeight
from skim.native import build


class CMatrix(Structure):
    _fields_ = (
        ("coded", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("inner", c_int64),
        ("outer", c_int64),
    )


class CNorm(Structure):
    _fields_ = (("weight", c_void_p), ("epsilon", c_double))


class CLayer(Structure):
    """`layer_t` in `few_tokens.c`."""

    _fields_ = (
        ("qkv", CMatrix),
        ("output", CMatrix),
        ("gate_up", CMatrix),
        ("down", CMatrix),
        ("before", CNorm),
        ("after", CNorm),
        ("query", CNorm),
        ("key", CNorm),
        ("queries", c_int64),
        ("keys", c_int64),
        ("dim", c_int64),
        ("coded_product", c_void_p),
        ("team", c_void_p),
    )


class Functions:
    """The compiled functions."""

    def __init__(self) -> None:
        library = build.load(SOURCE)
        self.begin, self.end = library.skim_begin_layer, library.skim_end_layer
        self.begin.argtypes = [*[c_void_p] * 5, c_int64, c_uint]
        self.end.argtypes = [*[c_void_p] * 4, c_int64, c_uint]
        for function in (self.begin, self.end):
            function.restype = c_int
        coded = kernels()
        self.coded_product = None if coded is None else coded.product_address
        self.team = build.team_launcher()


@cache
def functions() -> Functions | None:
    """Compiled functions, if the native operations are used."""
    return Functions() if isinstance(for_few_tokens(), NativeOps) else None


class NativeLayer:
    """A layer's halves for 1 to 16 tokens. Not thread-safe, like the module that contains the layer."""

    def __init__(self, parts: Parts, compiled: Functions) -> None:
        self._parts, self._compiled = parts, compiled
        self._begin, self._end = compiled.begin, compiled.end
        products = (parts.qkv, parts.output, parts.gate_up, parts.down)
        norms = (parts.before, parts.after, *parts.head_norms)
        self._tensors = [norm.weight for norm in norms]
        for product in products:
            self._tensors += _tensors_of(product)
        self._heads = parts.heads
        self._columns = sum(parts.heads) * parts.dim
        self._pointers: list[int] = []
        self._address = 0
        self._kept: tuple[CLayer, list[Planes]] | None = None

    @classmethod
    def of(cls, parts: Parts) -> NativeLayer | None:
        """The layer, or None if compiled code cannot compute it."""
        compiled = functions()
        products = (parts.qkv, parts.output, parts.gate_up, parts.down)
        if compiled is None or not all(_can_multiply(product) for product in products):
            return None
        return cls(parts, compiled)

    def begin(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Heads:
        """`Parts.begin`. All are contiguous."""
        pointers = [tensor.data_ptr() for tensor in self._tensors]
        if pointers != self._pointers:  # weights may be moved between steps
            self._describe(pointers)
        tokens = hidden.shape[0]
        new = hidden.new_empty(tokens, self._columns)
        if not self._begin(
            self._address,
            hidden.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            new.data_ptr(),
            tokens,
            torch.get_num_threads(),
        ):
            raise MemoryError
        query, key, value = new.view(tokens, -1, self._parts.dim).split_with_sizes(self._heads, 1)
        return query, key, value

    def end(self, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """`Parts.end`, after `begin` of the same tokens. All are contiguous."""
        out = torch.empty_like(hidden)
        if not self._end(
            self._address,
            attended.data_ptr(),
            hidden.data_ptr(),
            out.data_ptr(),
            hidden.shape[0],
            torch.get_num_threads(),
        ):
            raise MemoryError
        return out

    def _describe(self, pointers: list[int]) -> None:
        """Write the layer's description for C, with the weights where they are now."""
        parts, planes = self._parts, list[Planes]()
        query, key = parts.head_norms or (None, None)
        layer = CLayer(
            *(_matrix(product, planes) for product in (parts.qkv, parts.output, parts.gate_up, parts.down)),
            *(_norm(norm) for norm in (parts.before, parts.after, query, key)),
            *parts.heads[:2],
            parts.dim,
            self._compiled.coded_product,
            self._compiled.team,
        )
        self._pointers, self._address, self._kept = pointers, addressof(layer), (layer, planes)


def _can_multiply(product: Product) -> bool:
    if len(product.weights) != 1:
        return False
    weight, _ = product.weights[0]
    if isinstance(weight, CodedWeight):
        return weight.order is None and kernels_for(weight, torch.float32) is not None
    return weight.is_cpu and weight.dtype == torch.float32 and weight.is_contiguous()


def _tensors_of(product: Product) -> list[torch.Tensor]:
    weight, bias = product.weights[0]
    found = list(weight.planes.values()) if isinstance(weight, CodedWeight) else [weight]
    return found if bias is None else [*found, bias]


def _matrix(product: Product, planes: list[Planes]) -> CMatrix:
    """The product for C. Planes that it points at are added to the list."""
    weight, bias = product.weights[0]
    at = None if bias is None else bias.data_ptr()
    if isinstance(weight, CodedWeight):
        planes.append(planes_of(weight))
        return CMatrix(addressof(planes[-1]), None, at, weight.columns, weight.rows)
    return CMatrix(None, weight.data_ptr(), at, weight.shape[1], weight.shape[0])


def _norm(norm: Norm | None) -> CNorm:
    return CNorm(None, 0.0) if norm is None else CNorm(norm.weight.data_ptr(), norm.epsilon)
