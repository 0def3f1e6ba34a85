"""The parts of a decoder layer of the common kind, and the halves of its forward, one operation at a time."""

from __future__ import annotations

from typing import Any

import torch

from skim.models.forwards.few_tokens import Ops, Weight
from skim.models.forwards.packed import PackedCoded
from skim.models.quantized.module import CodedLinear

HEAD_NORMS = ("q_norm", "k_norm")

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values, each [tokens, heads, dim]. A token's heads are contiguous."""


class Norm:
    """A norm's parameters, held directly: looking them up in the module takes as long as using them."""

    def __init__(self, norm: Any) -> None:
        self.weight: torch.Tensor = norm.weight.detach()
        self.epsilon = float(norm.variance_epsilon)


class Product:
    """A matrix product's parameters, held directly for the same reason."""

    def __init__(self, linear: Any) -> None:
        pieces = linear.pieces if isinstance(linear, PackedCoded) else [linear]
        self.weights = [_weight_of(piece) for piece in pieces]

    def __call__(self, ops: Ops, given: torch.Tensor) -> torch.Tensor:
        products = [ops.product(given, weight, bias) for weight, bias in self.weights]
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)


def _weight_of(linear: Any) -> tuple[Weight, torch.Tensor | None]:
    bias = None if linear.bias is None else linear.bias.detach()
    return linear.coded if isinstance(linear, CodedLinear) else linear.weight.detach(), bias


class Parts:
    """A layer's parts. They share the weights of the layer's own modules, whose products are packed."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.before, self.after = Norm(layer.input_layernorm), Norm(layer.post_attention_layernorm)
        self.head_norms = [Norm(getattr(attention, name)) for name in HEAD_NORMS if hasattr(attention, name)]
        self.qkv, self.output = Product(attention.q_proj.packed), Product(attention.o_proj)
        self.gate_up, self.down = Product(mlp.gate_proj.packed), Product(mlp.down_proj)
        self.dim = dim = int(attention.head_dim)
        ends = (attention.q_proj.end, attention.k_proj.end, attention.v_proj.end)
        self.heads = tuple((end - first) // dim for first, end in zip((0, *ends), ends, strict=False))
        """Of queries, keys and values."""

    def begin(self, ops: Ops, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Heads:
        """Up to attention. hidden: [tokens, width]; cos and sin: [tokens, dim]"""
        queries, keys, _ = self.heads
        rotated = queries + keys
        new = self.qkv(ops, ops.norm(hidden, self.before.weight, self.before.epsilon))
        new = new.view(len(hidden), -1, self.dim)
        value = new[:, rotated:]
        if not self.head_norms:
            turned = ops.rotate(new[:, :rotated], cos, sin)
            return turned[:, :queries], turned[:, queries:], value
        query, key = (
            ops.rotate(ops.norm_heads(heads, norm.weight, norm.epsilon), cos, sin)
            for heads, norm in zip((new[:, :queries], new[:, queries:rotated]), self.head_norms, strict=True)
        )
        return query, key, value

    def end(self, ops: Ops, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """From what attention returned for the layer's input `hidden` to its output. [tokens, width]"""
        residual = self.output(ops, attended)
        normed = ops.add_norm(residual, hidden, self.after.weight, self.after.epsilon)
        return self.down(ops, ops.gate(self.gate_up(ops, normed))).add_(residual)
