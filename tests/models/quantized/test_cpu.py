"""Native products and restored rows against torch, for every kind of codes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from skim.models.quantized import cpu, product
from skim.models.quantized.cpu import FEW_TOKENS, Kernels
from skim.models.quantized.format import BITS, GROUPS, CodedWeight
from skim.models.quantized.product import multiply
from skim.native.build import NativeUnavailable
from tests.models.quantized.weights import KINDS, every_kind, random_weight

WEIGHTS = dict(every_kind(rows=41, columns=300))


@cache
def native() -> Kernels:
    try:
        return Kernels()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_product(
    found: torch.Tensor, hidden: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None
) -> None:
    """Rounding errors are relative to the sum of magnitudes. `hidden` has the weight's order of columns."""
    plain = weight.restore_stored().double()
    expected = F.linear(hidden.double(), plain, None if bias is None else bias.double())
    scale, offset = weight.affine()
    parts = (
        weight.codes().abs().view(weight.rows, -1, weight.group) * scale.abs()[..., None]
        + offset.abs()[..., None]
    )
    magnitude = F.linear(hidden.abs(), parts.view(weight.rows, -1)) + 1.0
    assert found.isfinite().all()
    assert ((found - expected).abs() / magnitude).max() < 1e-6


@settings(deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    bits=st.sampled_from(BITS),
    group=st.sampled_from(GROUPS),
    rows=st.integers(1, 70),
    runs=st.integers(1, 45),
    tokens=st.integers(1, FEW_TOKENS),
    biased=st.booleans(),
    count=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**20),
)
def test_products(
    kind: str, bits: int, group: int, rows: int, runs: int, tokens: int, biased: bool, count: int, seed: int
) -> None:
    weight = random_weight(kind, bits, group, rows, 32 * runs, seed)
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, weight.columns, generator=draw) * 10.0 ** (seed % 5 - 2)
    bias = torch.randn(rows, generator=draw) if biased else None
    with threads(count):
        found = native().product(hidden, weight, bias)
    check_product(found, hidden, weight, bias)


@pytest.mark.parametrize("name", WEIGHTS)
def test_every_number_of_tokens(name: str) -> None:
    """Also 17, which are multiplied with restored rows, and an order of columns."""
    weight = WEIGHTS[name]
    hidden = torch.randn(17, weight.columns, generator=torch.Generator().manual_seed(0))
    bias = torch.linspace(-1, 1, weight.rows)
    stored = hidden if weight.order is None else hidden[:, weight.order]
    for tokens in range(1, 18):
        check_product(multiply(hidden[:tokens], weight, bias), stored[:tokens], weight, bias)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_token_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(name: str) -> None:
    weight = WEIGHTS[name]
    hidden = torch.randn(FEW_TOKENS, weight.columns, generator=torch.Generator().manual_seed(0))
    with threads(1):
        alone = [native().product(one[None], weight, None)[0] for one in hidden]
    with threads(2):
        for tokens in (2, 3, 7, FEW_TOKENS):
            together = native().product(hidden[:tokens], weight, None)
            assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=False))


@pytest.mark.parametrize("name", WEIGHTS)
def test_restored_rows_equal_torchs(name: str) -> None:
    weight = WEIGHTS[name]
    expected = weight.restore_stored()
    space = torch.empty(weight.rows, weight.columns)
    for first, end, count in ((0, weight.rows, 1), (0, weight.rows, 2), (3, 4, 1), (5, 38, 2)):
        with threads(count):
            found = native().restore_rows(weight, first, end, space)
        assert torch.equal(found, expected[first:end])


def test_activations_far_apart_do_not_lose_the_small_ones() -> None:
    """A run of 32 columns has one unit: a large value may cost its neighbours bits, but no other column."""
    weight = random_weight("offset", 4, 32, 40, 256, 0)
    hidden = torch.randn(1, 256, generator=torch.Generator().manual_seed(0)) * 1e-6
    hidden[0, :32] = 0
    hidden[0, 3] = 1e6
    rest = hidden.clone()
    rest[0, 3] = 0
    columns = weight.restore()
    zeroed = native().product(rest, weight, None)
    torch.testing.assert_close(zeroed, F.linear(rest, columns), rtol=1e-4, atol=1e-11)
    torch.testing.assert_close(
        native().product(hidden, weight, None), F.linear(hidden, columns), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["offset-4-32", "super-6-16", "zero-8-64", "fp8-8-128", "zeros-5-32"])
def test_non_finite_values_propagate_within_their_token_only(name: str, bad: float) -> None:
    weight = WEIGHTS[name]
    hidden = torch.randn(5, weight.columns, generator=torch.Generator().manual_seed(0))
    hidden[1, weight.columns - 1] = bad
    found = native().product(hidden, weight, None)
    expected = F.linear(hidden, weight.restore_stored())
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[1].nan_to_num(0), expected[1].nan_to_num(0))
    assert found[[0, 2, 3, 4]].isfinite().all()


@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-44, 1e29, 1e34])
def test_extreme_values(value: float) -> None:
    weight = WEIGHTS["offset-4-32"]
    hidden = torch.full((2, weight.columns), value)
    expected = F.linear(hidden, weight.restore())
    found = native().product(hidden, weight, None)
    assert torch.equal(found.isfinite(), expected.isfinite())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-30, equal_nan=True)


def test_without_a_compiler_products_are_computed_in_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Missing:
        def __init__(self) -> None:
            raise NativeUnavailable("no C compiler found")

    monkeypatch.setattr(cpu, "Kernels", Missing)
    with caplog.at_level(logging.INFO):
        assert cpu.kernels.__wrapped__() is None
    assert "no C compiler found" in caplog.text
    monkeypatch.setattr(cpu, "kernels", lambda: None)
    weight = WEIGHTS["offset-4-32"]
    hidden = torch.randn(3, weight.columns, generator=torch.Generator().manual_seed(0))
    check_product(multiply(hidden, weight), hidden, weight, None)


def test_kernels_that_compute_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = native().product
    monkeypatch.setattr(Kernels, "product", lambda self, x, weight, bias: plain(x, weight, bias) * 1.01)
    assert cpu.kernels.__wrapped__() is None


def test_rows_with_too_many_groups_and_other_dtypes_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    native()
    weight = random_weight("offset", 4, 32, 5, 64, 0)
    assert cpu.kernels_for(weight, torch.float32) is not None
    assert cpu.kernels_for(weight, torch.bfloat16) is None
    wide = random_weight("offset", 4, 16, 2, 16 * (cpu.MOST_GROUPS + 16), 0)
    assert cpu.kernels_for(wide, torch.float32) is None
    hidden = torch.randn(2, wide.columns, generator=torch.Generator().manual_seed(0))
    check_product(multiply(hidden, wide), hidden, wide, None)


def test_tiles_cover_all_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = WEIGHTS["offset-4-32"]
    hidden = torch.randn(40, weight.columns, generator=torch.Generator().manual_seed(0))
    for most in (1, 4 * weight.columns * 7, 2**23):
        monkeypatch.setattr(product, "TILE_BYTES", most)
        check_product(product.multiply_tiles(hidden, weight), hidden, weight, None)
