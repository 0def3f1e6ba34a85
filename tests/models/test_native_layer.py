"""The halves of a layer in one call of C each give the bits of their operations one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from skim.models.forwards.few_tokens import FEW_TOKENS
from skim.models.forwards.lean import WholeList, lean_layers
from skim.models.forwards.native_layer import NativeLayer
from skim.models.forwards.packed import pack_products
from skim.models.forwards.parts import Parts
from tests import tiny
from tests.models.quantized.test_layers import KINDS, code_model
from tests.models.test_lean import native_ops


def parts_of(family: str, kinds: str | None) -> list[Parts]:
    module: Any = tiny.with_our_attention(family) if kinds is None else code_model(family, KINDS[kinds])[0]
    pack_products(module)
    return [Parts(layer) for layer in module.model.layers]


@torch.inference_mode()
def compare(parts: Parts, layer: NativeLayer, tokens: int) -> None:
    ops, width = native_ops(), parts.before.weight.shape[0]
    hidden, cos, sin = (
        torch.randn(tokens, width),
        torch.randn(tokens, parts.dim),
        torch.randn(tokens, parts.dim),
    )
    before = hidden.clone()
    ours, theirs = layer.begin(hidden, cos, sin), parts.begin(ops, hidden.clone(), cos, sin)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    attended = torch.randn(tokens, parts.heads[0] * parts.dim)
    assert torch.equal(layer.end(attended, hidden), parts.end(ops, attended, hidden.clone()))
    assert torch.equal(hidden, before)


@pytest.mark.parametrize("kinds", [None, "alike"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_both_halves(family: str, kinds: str | None) -> None:
    native_ops()
    parts = parts_of(family, kinds)[0]
    layer = NativeLayer.of(parts)
    assert layer is not None
    for tokens in (1, 2, 5, FEW_TOKENS):
        compare(parts, layer, tokens)


@pytest.mark.parametrize("kinds", ["mixed", "ordered"])
def test_products_of_several_pieces_and_of_other_orders_are_left_to_python(kinds: str) -> None:
    assert all(NativeLayer.of(parts) is None for parts in parts_of("llama", kinds))


@pytest.mark.parametrize("kinds", [None, "alike"])
def test_weights_may_be_moved_between_steps(kinds: str | None) -> None:
    """Their storages are freed and filled again, elsewhere."""
    native_ops()
    parts = parts_of("llama", kinds)[0]
    layer = NativeLayer.of(parts)
    assert layer is not None
    compare(parts, layer, 1)
    held = []
    for tensor in layer._tensors:
        storage, kept = tensor.untyped_storage(), tensor.clone()
        size = storage.nbytes()
        storage.resize_(0)
        held.append(torch.full((size,), 255, dtype=torch.uint8))  # takes the place
        storage.resize_(size)
        tensor.copy_(kept)
    compare(parts, layer, 1)


def test_lists_of_lean_layers_are_not_copied_when_sliced() -> None:
    module = tiny.with_our_attention("llama")
    layers = list(module.model.layers)
    assert lean_layers(module) == len(layers)
    assert isinstance(module.model.layers, WholeList)
    assert module.model.layers[: len(layers)] is module.model.layers
    assert list(module.model.layers[1:]) == layers[1:]
    assert list(module.model.layers[::-1]) == layers[::-1]
    assert module.model.layers[-1] is layers[-1]
    others = tiny.with_our_attention("gemma3")
    lean_layers(others)
    assert not any(isinstance(part, WholeList) for part in others.modules())
    assert type(others.model.layers) is nn.ModuleList
