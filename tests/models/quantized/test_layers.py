"""Layers with coded weights: packing, lean forwards, the head, and ranking in 8 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from skim.models.forwards.eight_bits import EightBitOps, rounded, rounded_plainly, rounding
from skim.models.forwards.few_tokens import FEW_TOKENS, PLAIN
from skim.models.forwards.lean import LeanHead, lean_layers
from skim.models.forwards.packed import PackedCoded, PackedPart, bypass, pack_products
from skim.models.quantized.cpu_many import many_tokens_for
from skim.models.quantized.format import stacked
from skim.models.quantized.module import CodedEmbedding, CodedLinear
from tests import tiny
from tests.models.quantized.weights import coded_near, every_kind, random_weight

SIZES = (1, 7, FEW_TOKENS, FEW_TOKENS + 1, 60)
KINDS = {  # (bits, group, ordered) of each projection; others have 4 bits in groups of 32
    "alike": {},
    "mixed": {"v_proj": (6, 16, False), "up_proj": (8, 32, False)},
    "ordered": {"q_proj": (4, 32, True), "k_proj": (4, 32, True), "down_proj": (5, 16, True)},
}


def code_model(family: str, kinds: dict[str, tuple[int, int, bool]], tied: bool = False) -> tuple[Any, Any]:
    """A model with coded weights, and one with the same weights restored."""
    coded, plain = tiny.with_our_attention(family), tiny.with_our_attention(family)
    for name, module in list(plain.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        last = name.rpartition(".")[2]
        weight = coded_near(module.weight, *kinds.get(last, (4, 32, False)))
        module.weight.data.copy_(weight.restore())
        bias = None if module.bias is None else module.bias.detach()
        coded.set_submodule(name, CodedLinear(weight, bias))
    if tied:
        head = coded.get_output_embeddings().coded
        coded.set_input_embeddings(CodedEmbedding(head, torch.float32))
        plain.get_input_embeddings().weight.data.copy_(head.restore())
    return coded, plain


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2"])
def test_lean_layers_compute_what_transformers_does_with_restored_weights(family: str, kinds: str) -> None:
    tied = kinds == "mixed" and family != "gemma2"  # its embedding also scales
    coded, plain = code_model(family, KINDS[kinds], tied)
    expected = [tiny.logits(plain, tokens) for tokens in SIZES]
    lean = lean_layers(coded)
    assert lean == (0 if family == "gemma2" else coded.config.num_hidden_layers)
    for tokens, want in zip(SIZES, expected, strict=True):
        torch.testing.assert_close(tiny.logits(coded, tokens), want, rtol=1e-4, atol=1e-4)
    if lean:
        assert isinstance(vars(coded.get_output_embeddings())["forward"], LeanHead)
        with bypass(coded):
            got = tiny.logits(coded, SIZES[1])
        torch.testing.assert_close(got, expected[1], rtol=1e-4, atol=1e-4)


def test_packed_models_hold_no_float_copy() -> None:
    coded, _ = code_model("llama", KINDS["mixed"], tied=True)

    def held() -> int:
        tensors = [*coded.parameters(), *coded.buffers()]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    before = held()
    assert lean_layers(coded)
    tiny.logits(coded, 3), tiny.logits(coded, 60)
    assert held() == before


@pytest.mark.parametrize(("kinds", "pieces"), [("alike", (1, 1)), ("mixed", (2, 2)), ("ordered", (2, 1))])
def test_weights_of_one_kind_are_concatenated(kinds: str, pieces: tuple[int, int]) -> None:
    coded, _ = code_model("qwen2", KINDS[kinds])
    layer = coded.model.layers[0]
    hidden = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    names = [(layer.self_attn, f"{name}_proj") for name in "qkv"]
    names += [(layer.mlp, "gate_proj"), (layer.mlp, "up_proj")]
    expected = [getattr(owner, name)(hidden) for owner, name in names]
    pack_products(coded)
    parts = [getattr(owner, name) for owner, name in names]
    assert all(isinstance(part, PackedPart) for part in parts)
    packed = layer.self_attn.q_proj.packed, layer.mlp.gate_proj.packed
    assert all(isinstance(one, PackedCoded) for one in packed)
    assert tuple(len(one.pieces) for one in packed) == pieces
    for part, want in zip(parts, expected, strict=True):
        assert torch.equal(part(hidden), want)
    with bypass(coded):
        for part, want in zip(parts, expected, strict=True):
            assert torch.equal(part(hidden), want)


def test_stacked_weights_have_the_rows_of_both() -> None:
    for name, weight in every_kind(rows=5, columns=64):
        both = stacked(weight, weight.some_rows(1, 3))
        assert both is not None, name
        assert torch.equal(both.restore(), torch.cat((weight.restore(), weight.restore()[1:3])))
    one = random_weight("offset", 4, 32, 5, 64, 0)
    for other in (
        random_weight("offset", 5, 32, 5, 64, 0),
        random_weight("offset", 4, 16, 5, 64, 0),
        random_weight("offset", 4, 32, 5, 96, 0),
        random_weight("zeros", 4, 32, 5, 64, 0),
        random_weight("ordered", 4, 32, 5, 64, 0),
    ):
        assert stacked(one, other) is None
    ordered = [random_weight("ordered", 4, 32, 5, 64, seed) for seed in (2, 4)]
    assert ordered[0].scale.dtype != ordered[1].scale.dtype or stacked(*ordered) is None


@pytest.mark.parametrize("tokens", [3, 40])
def test_ranking_in_8_bits_is_that_of_the_restored_weight(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skim.models.quantized.product.TILE_BYTES", 4 * 96 * 20)
    ops = EightBitOps()
    for name, weight in every_kind(rows=50, columns=96):
        hidden = torch.randn(tokens, weight.columns, generator=torch.Generator().manual_seed(0))
        bias = torch.linspace(-1, 1, weight.rows)
        found = ops.product(hidden, weight, bias)
        stored = hidden if weight.order is None else hidden[:, weight.order]
        if many_tokens_for(weight, hidden.dtype) is not None:  # codes are not rounded, and tokens in runs
            exact, tolerance = stored @ weight.restore_stored().t() + bias, 2e-2
            in_rows = ops.product(stored, weight.restore_stored(), bias)
            assert (found - exact).abs().mean() <= 1.5 * (in_rows - exact).abs().mean(), name
        else:
            exact, tolerance = ops.product(stored, weight.restore_stored(), bias), 1e-6
        assert (found - exact).abs().max() <= tolerance * exact.abs().max(), name
    coded_only = EightBitOps()
    coded_only.product(hidden, weight, None)
    assert len(coded_only._rounded) == 0  # nothing is kept


def test_native_rounding_is_torchs() -> None:
    if rounding() is None:
        pytest.skip("no native rounding")
    draw = torch.Generator().manual_seed(0)
    for rows, columns in ((1, 1), (3, 7), (40, 64), (17, 1000)):
        for size in (1.0, 1e-30, 1e-42, 1e30, 0.0):
            given = torch.randn(rows, columns, generator=draw) * size
            for found, expected in zip(rounded(given), rounded_plainly(given), strict=True):
                assert torch.equal(found, expected)
    given[0, 0], given[1, 1] = float("nan"), float("inf")
    scale = rounded(given)[1]
    assert not scale[:2].isfinite().any()
    assert scale[2:].isfinite().all()


def test_plain_operations_take_coded_weights() -> None:
    weight = random_weight("offset", 4, 32, 20, 64, 0)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        PLAIN.product(hidden, weight, None), hidden @ weight.restore().t(), rtol=1e-4, atol=1e-4
    )
