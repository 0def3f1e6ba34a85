"""Products in 8 bits: near the exact ones, and only where a forward ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skim.attention.step import AttentionCall, Ranking
from skim.models.forwards import lean
from skim.models.forwards.eight_bits import EXACT_COLUMNS, EightBitOps, for_ranking, rounded
from skim.models.forwards.few_tokens import FEW_TOKENS, PLAIN
from tests import tiny

SIZES = st.integers(1, 90)
INNER = st.integers(2, 90)  # torch multiplies matrices of one column wrongly; no model has them


@given(tokens=SIZES, inner=INNER, outer=SIZES, biased=st.booleans(), seed=st.integers(0, 2**32))
def test_products_are_exact_products_of_the_rounded_values(
    tokens: int, inner: int, outer: int, biased: bool, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(*size, generator=draw) for size in ((tokens, inner), (outer, inner), (outer,))
    )
    found = EightBitOps().product(hidden, weight, bias if biased else None)
    exact = hidden.abs().amax(0).argsort(descending=True)[:EXACT_COLUMNS]
    rest = hidden.clone()
    rest[:, exact] = 0
    (rows, scale), (columns, column_scale) = rounded(rest), rounded(weight)
    expected = (rows.double() * scale.double()) @ (columns.double() * column_scale.double()).t()
    expected += hidden[:, exact].double() @ weight[:, exact].double().t()
    torch.testing.assert_close(found.double(), expected + bias * biased, rtol=1e-5, atol=1e-5)


@given(rows=SIZES, inner=SIZES, seed=st.integers(0, 2**32))
def test_rounding_moves_a_value_by_half_a_step_at_most(rows: int, inner: int, seed: int) -> None:
    given = torch.randn(rows, inner, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 7)
    whole, scale = rounded(given)
    assert ((whole * scale - given).abs() <= 0.501 * scale).all()
    assert (scale * 127 >= given.abs().amax(1, keepdim=True) * 0.999).all()


@pytest.mark.parametrize("large", ["columns", "tokens"])
def test_large_values_do_not_hide_the_others(large: str) -> None:
    """A few columns of all tokens, or all columns of a few tokens, are ten thousand times larger."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(100, 256, generator=draw), torch.randn(90, 256, generator=draw)
    some = torch.randperm(90, generator=draw)[:EXACT_COLUMNS]
    scaled = hidden.clone()
    weight_of_rest = weight.clone()
    if large == "columns":
        scaled[:, some] *= 10_000
        weight_of_rest[:, some] = 0
    else:
        scaled[some] *= 10_000
    found = EightBitOps().product(scaled, weight_of_rest, None)
    expected = scaled @ weight_of_rest.t()
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 0.03


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_stay_so(value: float) -> None:
    hidden, weight = torch.randn(3, 16), torch.randn(8, 16)
    hidden[1, 5] = value
    found = EightBitOps().product(hidden, weight, None)
    assert not found[1].isfinite().any()
    assert found[[0, 2]].isfinite().all()


def test_zeros_stay_zeros() -> None:
    found = EightBitOps().product(torch.zeros(2, 16), torch.randn(8, 16), None)
    assert torch.equal(found, torch.zeros(2, 8))


def test_weights_are_rounded_once_and_forgotten_with_their_model() -> None:
    ops = EightBitOps()
    weight = torch.randn(8, 16)
    for _ in range(3):
        ops.product(torch.randn(2, 16), weight, None)
    assert len(ops._rounded) == 1
    del weight
    assert len(ops._rounded) == 0


@pytest.mark.parametrize("supported", [False, True])
def test_only_where_the_cpu_has_instructions_for_it(supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: supported)
    for_ranking.cache_clear()
    try:
        assert isinstance(for_ranking(), EightBitOps) == supported
    finally:
        for_ranking.cache_clear()


def test_only_forwards_that_rank_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    class RankingStep(tiny.CausalStep, Ranking):
        def attend(
            self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
        ) -> torch.Tensor:
            asked.append(call.rounds)
            return super().attend(layer, query, key, value, call)

    asked: list[bool] = []
    module = tiny.with_our_attention("llama")
    assert lean.lean_layers(module) > 0
    monkeypatch.setattr(lean, "for_ranking", EightBitOps)

    def run(step: Any, tokens: int) -> torch.Tensor:
        ids = torch.arange(65, 65 + tokens)[None]
        with torch.inference_mode():
            out: torch.Tensor = module(
                input_ids=ids, position_ids=torch.arange(tokens)[None], use_cache=False, skim_step=step
            ).logits
        return out

    many = FEW_TOKENS + 5
    exact, ranked = run(tiny.CausalStep(), many), run(RankingStep(), many)
    assert set(asked) == {True}
    monkeypatch.setattr(lean, "for_ranking", lambda: PLAIN)
    asked.clear()
    assert torch.equal(exact, run(RankingStep(), many))
    assert set(asked) == {False}
    assert not torch.equal(exact, ranked)
    assert (ranked - exact).norm() < 0.1 * exact.norm()
