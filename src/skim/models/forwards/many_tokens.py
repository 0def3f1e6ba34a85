"""The operations of a decoder layer beside its products in C, for many tokens on a CPU.

torch takes several passes over memory for each, and a tenth of the products' time. `native/many_tokens.c`
takes one pass. `TorchOps` is its plain twin.
"""

from __future__ import annotations

from ctypes import c_double, c_int64, c_uint, c_void_p
from functools import cache

import torch

from skim.models.forwards.few_tokens import PLAIN, TOLERANCE, Ops, TorchOps
from skim.native import build
from skim.native.build import NativeUnavailable

SOURCE = build.SOURCES / "many_tokens.c"


class ManyTokenOps(TorchOps):
    """Torch's products, and compiled C for float32 tensors that are contiguous; `heads` may be a slice."""

    def __init__(self) -> None:
        self._team = build.team_launcher()
        library = build.load(SOURCE)
        at, count = c_void_p, c_int64
        self._norm = library.skim_norm_many
        self._norm.argtypes = [at, at, count, at, c_double, at, *[count] * 4, at, c_uint]
        self._rotate = library.skim_rotate_many
        self._rotate.argtypes = [at, count, at, at, *[count] * 3, at, c_uint]
        self._gate = library.skim_gate_many
        self._gate.argtypes = [at, at, count, count, at, c_uint]
        for function in (self._norm, self._rotate, self._gate):
            function.restype = None

    def norm(self, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return self._norm_of(hidden, None, weight, epsilon)

    def add_norm(
        self, hidden: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        return self._norm_of(hidden, other.contiguous(), weight, epsilon)

    def _norm_of(
        self, hidden: torch.Tensor, other: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        if not hidden.is_contiguous():
            return super().norm(hidden if other is None else hidden.add_(other), weight, epsilon)
        tokens, width = hidden.shape
        out = torch.empty_like(hidden)
        self._norm(
            hidden.data_ptr(),
            None if other is None else other.data_ptr(),
            width,
            weight.data_ptr(),
            epsilon,
            out.data_ptr(),
            width,
            tokens,
            1,
            width,
            self._team,
            torch.get_num_threads(),
        )
        return out

    def norm_heads(self, heads: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        at, stride = heads.data_ptr(), heads.stride(0)
        threads = torch.get_num_threads()
        self._norm(
            at, None, stride, weight.data_ptr(), epsilon, at, stride, *heads.shape, self._team, threads
        )
        return heads

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        at, stride, threads = heads.data_ptr(), heads.stride(0), torch.get_num_threads()
        self._rotate(at, stride, cos.data_ptr(), sin.data_ptr(), *heads.shape, self._team, threads)
        return heads

    def gate(self, both: torch.Tensor) -> torch.Tensor:
        both = both.contiguous()
        tokens, inner = both.shape[0], both.shape[1] // 2
        out = both.new_empty(tokens, inner)
        self._gate(both.data_ptr(), out.data_ptr(), tokens, inner, self._team, torch.get_num_threads())
        return out


@cache
def for_many_tokens() -> Ops:
    """Native operations if they are available and agree with torch's, else torch's."""
    without = "layers use torch's operations for many tokens; the native ones are not available"
    return build.available(ManyTokenOps, check, without) or PLAIN


def check(ops: Ops) -> None:
    """Compare with torch's, and verify that a NaN propagates."""
    draw = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=draw, dtype=torch.float32, device="cpu")

    tokens = 53
    hidden, other, heads, cos, sin, weight = (
        random(*sizes)
        for sizes in ((tokens, 38), (tokens, 38), (tokens, 5, 6), (tokens, 6), (tokens, 6), (38,))
    )
    pairs = [
        [
            one.norm(hidden, weight, 1e-6),
            one.add_norm(hidden.clone(), other, weight, 1e-6),
            one.rotate(one.norm_heads(heads.clone()[:, 1:], weight[:6], 1e-6), cos, sin),
            one.gate(hidden),
        ]
        for one in (ops, PLAIN)
    ]
    if not all(torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE) for a, b in zip(*pairs, strict=True)):
        raise NativeUnavailable("its results differ from torch's")
    hidden[40, 0] = float("nan")
    if not (ops.norm(hidden, weight, 1e-6)[40].isnan().all() and ops.gate(hidden)[40, 0].isnan()):
        raise NativeUnavailable("it loses a NaN")
