"""The operations of a decoder layer: in torch, and in C for a few tokens on a CPU.

With few tokens torch's matrix products do not reach memory bandwidth, and the operations between them cost
more to launch than to compute: a norm is nine of them. In C (`few_tokens.c`) products are memory-bound, and
every other operation is one call.
"""

from __future__ import annotations

from ctypes import c_double, c_int64, c_uint, c_void_p
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F

from skim.models.quantized.format import CodedWeight
from skim.models.quantized.product import multiply
from skim.native import build
from skim.native.build import NativeUnavailable

SOURCE = build.SOURCES / "few_tokens.c"
FEW_TOKENS = 16  # torch's products are faster for more
TOLERANCE = 1e-4  # of `check`: far above rounding errors, far below any mistake

Weight = torch.Tensor | CodedWeight


class Ops(Protocol):
    """A layer's operations in float32. Heads are [tokens, heads, dim]; a token's heads are contiguous."""

    def product(self, given: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """Matrix product, plus the bias. [tokens, inner] by [outer, inner] -> [tokens, outer]"""
        ...

    def norm(self, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """RMS norm. [tokens, width]"""
        ...

    def add_norm(
        self, hidden: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Add `other` to `hidden` in place and return the RMS norm of the sum. [tokens, width]"""
        ...

    def norm_heads(self, heads: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """RMS norm of each head, possibly in place."""
        ...

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Apply rotary embeddings, possibly in place. cos and sin: [tokens, dim]"""
        ...

    def gate(self, both: torch.Tensor) -> torch.Tensor:
        """silu of the left half times the right half. [tokens, 2 * inner] -> [tokens, inner]"""
        ...


class TorchOps:
    """Plain torch, for any number of tokens."""

    def product(self, given: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        if isinstance(weight, CodedWeight):
            return multiply(given, weight, bias)
        return F.linear(given, weight, bias)

    def norm(self, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return F.rms_norm(hidden, weight.shape, weight, epsilon)

    def add_norm(
        self, hidden: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        return self.norm(hidden.add_(other), weight, epsilon)

    def norm_heads(self, heads: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return self.norm(heads, weight, epsilon)

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        low, high = sin.chunk(2, dim=-1)
        signed = torch.cat((-low, high), dim=-1)
        swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
        return torch.addcmul(heads * cos[:, None], swapped, signed[:, None])

    def gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, passed = both.chunk(2, dim=-1)
        return F.silu(gate).mul_(passed)


class NativeOps:
    """Compiled C. Inputs are contiguous, except that `heads` may be a slice of each token's heads."""

    def __init__(self) -> None:
        self._team = build.team_launcher()
        library = build.load(SOURCE)
        at, count = c_void_p, c_int64
        self._product = library.skim_product
        self._product.argtypes = [*[at] * 4, *[count] * 3, at, c_uint]
        self._norm = library.skim_norm
        self._norm.argtypes = [at, at, count, at, c_double, at, *[count] * 4]
        self._rotate = library.skim_rotate
        self._rotate.argtypes = [at, count, at, at, *[count] * 3]
        self._gate = library.skim_gate
        self._gate.argtypes = [at, at, count, count]
        for function in (self._product, self._norm, self._rotate, self._gate):
            function.restype = None

    def product(self, given: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        if isinstance(weight, CodedWeight):
            return multiply(given, weight, bias)
        tokens, (outer, inner) = given.shape[0], weight.shape
        out = given.new_empty(tokens, outer)
        self._product(
            given.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            tokens,
            inner,
            outer,
            self._team,
            torch.get_num_threads(),
        )
        return out

    def norm(self, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return self._norm_of(hidden, None, weight, epsilon)

    def add_norm(
        self, hidden: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        return self._norm_of(hidden, other.data_ptr(), weight, epsilon)

    def _norm_of(
        self, hidden: torch.Tensor, other: int | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        tokens, width = hidden.shape
        out = hidden.new_empty(tokens, width)
        sizes = width, tokens, 1, width
        self._norm(hidden.data_ptr(), other, width, weight.data_ptr(), epsilon, out.data_ptr(), *sizes)
        return out

    def norm_heads(self, heads: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        at, stride = heads.data_ptr(), heads.stride(0)
        self._norm(at, None, stride, weight.data_ptr(), epsilon, at, stride, *heads.shape)
        return heads

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        self._rotate(heads.data_ptr(), heads.stride(0), cos.data_ptr(), sin.data_ptr(), *heads.shape)
        return heads

    def gate(self, both: torch.Tensor) -> torch.Tensor:
        tokens, inner = both.shape[0], both.shape[1] // 2
        out = both.new_empty(tokens, inner)
        self._gate(both.data_ptr(), out.data_ptr(), tokens, inner)
        return out


PLAIN = TorchOps()


@cache
def for_few_tokens() -> Ops:
    """Native operations if they are available and agree with torch's, else torch's."""
    without = "layers use torch's operations; the native ones are not available"
    return build.available(NativeOps, check, without) or PLAIN


def check(ops: Ops) -> None:
    """Compare with torch's for every number of tokens, and verify that a NaN propagates."""
    draw = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=draw, dtype=torch.float32, device="cpu")

    weight, bias, width = random(75, 38), random(75), random(38)
    for tokens in range(1, FEW_TOKENS + 1):
        hidden, heads, cos, sin = (
            random(tokens, 38),
            random(tokens, 5, 6),
            random(tokens, 6),
            random(tokens, 6),
        )
        pairs = [
            [
                one.product(hidden, weight, bias),
                one.norm(hidden, width, 1e-6),
                one.rotate(one.norm_heads(heads.clone()[:, 1:], width[:6], 1e-6), cos, sin),
                one.gate(hidden),
            ]
            for one in (ops, PLAIN)
        ]
        if not all(torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE) for a, b in zip(*pairs, strict=True)):
            raise NativeUnavailable(f"its results differ from torch's for {tokens} tokens")
    hidden[0, 0] = float("nan")
    if not (
        ops.product(hidden, weight, None)[0].isnan().all() and ops.norm(hidden, width, 1e-6)[0].isnan().all()
    ):
        raise NativeUnavailable("it loses a NaN")
