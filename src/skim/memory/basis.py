"""The basis in which a quantized layer stores its heads.

A Hadamard rotation spreads an outlier channel over the whole head, or over half of it, so that one scale
serves all of that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property

import torch


@cache
def hadamard(dim: int) -> torch.Tensor:
    """A rotation that is its own inverse. [dim, dim]

    For sizes that are no power of two, blocks of the largest power of two that divides them.
    """
    block = rotated_block(dim)
    matrix = torch.ones(1, 1, device="cpu")
    while matrix.shape[0] < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.kron(torch.eye(dim // block), matrix * block**-0.5)


@cache
def paired_hadamard(dim: int) -> torch.Tensor:
    """A rotation of each half of the head: the first half becomes the even values, the second the odd ones.

    [dim, dim]. Models pair value i of the first half with value i of the second one for rotary positions.
    """
    half = hadamard(dim // 2)
    turn = torch.zeros(dim, dim, device="cpu")
    turn[: dim // 2, 0::2] = half
    turn[dim // 2 :, 1::2] = half
    return turn


def rotated_block(dim: int) -> int:
    """The largest power of two that divides the head size."""
    return dim & -dim


@dataclass(frozen=True, eq=False)
class Basis:
    """Stores x as `x @ to_stored`. One for the keys of a layer, one for its values."""

    to_stored: torch.Tensor  # [kv_heads, dim, dim] float32, a rotation
    to_plain: torch.Tensor  # its inverse
    _cast: dict[tuple[str, torch.dtype], torch.Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def rotation(cls, kv_heads: int, turn: torch.Tensor) -> Basis:
        """The same rotation of every head. [dim, dim]"""
        to_stored, to_plain = (t.expand(kv_heads, *t.shape).contiguous() for t in (turn, turn.T))
        return cls(to_stored, to_plain)

    def to(self, device: torch.device) -> Basis:
        return Basis(self.to_stored.to(device).contiguous(), self.to_plain.to(device).contiguous())

    @cached_property
    def factor(self) -> float:
        """The largest entry of `to_stored`. A Hadamard rotation divided by it has the entries -1, 0 and 1."""
        return float(self.to_stored.abs().max())

    def store(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, kv_heads, dim] -> the same in this basis, float32

        Computed in float64. In float32, products of one token and of several may round differently, but a
        token's codes must not depend on the tokens beside it.
        """
        return multiply(x.double(), self.matrix("stored", torch.float64)).float()

    def restore(self, stored: torch.Tensor) -> torch.Tensor:
        """The inverse of `store`. [tokens, kv_heads, dim] float32"""
        return multiply(stored.float(), self.to_plain)

    def turn_query(self, query: torch.Tensor) -> torch.Tensor:
        """Queries whose products with stored keys are the scores. [tokens, heads, dim]"""
        return multiply(query, self.matrix("query", query.dtype))

    def turn_out(self, out: torch.Tensor) -> torch.Tensor:
        """Restore weighted sums of stored values. [tokens, heads, dim]"""
        return multiply(out, self.matrix("out", out.dtype))

    def matrix(self, use: str, dtype: torch.dtype) -> torch.Tensor:
        """The matrix of each KV head. [kv_heads, dim, dim]

        To be `stored`, for a `query` or a result (`out`), or `to_stored` by its `factor` (`signs`).
        """
        if (use, dtype) not in self._cast:
            made = {
                "stored": self.to_stored,
                "query": self.to_plain.transpose(1, 2),
                "out": self.to_plain,
                "signs": self.to_stored / self.factor,
            }[use]
            self._cast[use, dtype] = made.to(dtype).contiguous()
        return self._cast[use, dtype]


def multiply(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Multiply every head by the matrix of its KV head. [tokens, heads, dim] x [kv_heads, dim, dim]"""
    tokens, heads, dim = x.shape
    kv_heads = len(matrices)
    out = torch.bmm(_by_head(x, kv_heads), matrices)
    return out.view(kv_heads, tokens, -1, dim).transpose(0, 1).reshape(tokens, heads, dim)


def _by_head(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[tokens, heads, dim] -> [kv_heads, tokens * group, dim]"""
    tokens, heads, dim = x.shape
    return x.reshape(tokens, kv_heads, heads // kv_heads, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
