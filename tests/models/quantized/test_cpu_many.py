"""Products of codes with many tokens, against restored rows."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from skim.models.quantized import cpu_many, product
from skim.models.quantized.cpu_many import ManyTokens, many_tokens, many_tokens_for
from skim.models.quantized.product import multiply, multiply_tiles
from skim.native.build import NativeUnavailable
from tests.models.quantized.weights import random_weight

KINDS = ("offset", "zeros", "zero", "super", "super-offset")


@cache
def native(tiles: bool = False) -> ManyTokens:
    try:
        return ManyTokens(tiles)
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_as_precise_as_float32_or_8_bits(kind: str, parts: int, tiles: bool) -> None:
    for seed in range(12):
        draw = random.Random(f"{kind} {seed}")
        bits = draw.choice([4, 5, 6, 8]) if tiles else 4
        group = draw.choice([16, 32, 64, 128] if tiles else [32, 64, 128])
        rows, columns, tokens = draw.randint(1, 70), draw.choice([900, 3000]), draw.randint(1, 70)
        weight = random_weight(kind, bits, group, rows, draw.randint(1, columns), seed)
        torch.manual_seed(seed)
        given = torch.randn(tokens, weight.columns) * 10 ** draw.uniform(-6, 6)
        given[:, ::50] *= draw.choice([1, 100])  # outliers, as activations have
        given[0, : draw.randint(0, weight.columns)] = 0.0
        bias = torch.randn(rows) if seed % 2 else None
        got = native(tiles).product(given, weight, bias, parts)
        restored = weight.restore_stored().double()
        expected = given.double() @ restored.T
        scale, offset = (one.double().abs().repeat_interleave(weight.group, 1) for one in weight.affine())
        large = given.double().abs()
        if parts == 1:  # relative to the largest of 32 columns
            large = large.view(tokens, -1, 32).amax(dim=2).repeat_interleave(32, 1)
        size = large @ ((2**bits - 1) * scale + offset).T  # errors do not depend on codes
        if bias is not None:
            expected, size = expected + bias.double(), size + bias.double().abs()
        assert got is not None
        assert (
            (got.double() - expected).abs() <= (1e-6 if parts == 3 else 0.5 / 127 + 1e-6) * size + 1e-30
        ).all()


def test_tiles_restore_floats_of_8_bits() -> None:
    weight = random_weight("fp8", 8, 32, 37, 200, 0)
    given = torch.randn(30, weight.columns)
    got = native(tiles=True).product(given, weight, None)
    assert got is not None
    torch.testing.assert_close(got, given @ weight.restore_stored().T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("rows", [75, 1100])
def test_a_tokens_product_is_bit_identical_in_any_batch_and_with_any_number_of_threads(
    rows: int, parts: int, tiles: bool
) -> None:
    weight = random_weight("offset", 4, 32, rows, 1300, 0)
    given = torch.randn(53, weight.columns)
    together = native(tiles).product(given, weight, None, parts)
    assert together is not None
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        for first, end in ((0, 1), (4, 11), (17, 53)):
            alone = native(tiles).product(given[first:end].clone(), weight, None, parts)
            assert alone is not None
            assert torch.equal(alone, together[first:end])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_no_tokens_have_no_products(parts: int, tiles: bool) -> None:
    weight = random_weight("offset", 4, 32, 3, 60000, 0)
    product = native(tiles).product(torch.empty(0, weight.columns), weight, None, parts)
    assert product is not None
    assert product.shape == (0, 3)


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e35])
def test_values_that_do_not_fit_are_left_to_restored_rows(value: float, tiles: bool) -> None:
    native()
    weight = random_weight("offset", 4, 32, 20, 128, 0)
    given = torch.randn(30, 128)
    given[7, 100] = value
    assert native(tiles).product(given, weight, None) is None
    out, expected = multiply(given, weight), multiply_tiles(given, weight)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert out[[0, 29]].isfinite().all()


@pytest.mark.parametrize("part", ["scale", "offset"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("tiles", [False, True])
def test_a_weight_that_is_not_finite_spoils_its_row(tiles: bool, parts: int, value: float, part: str) -> None:
    weight = random_weight("offset", 4, 32, 40, 200, 0)
    given = torch.randn(30, weight.columns)
    clean = native(tiles).product(given, weight, None, parts)
    assert clean is not None
    getattr(weight, part)[21, 3] = value
    spoilt = native(tiles).product(given, weight, None, parts)
    assert spoilt is not None
    assert not spoilt[:, 21].isfinite().any()
    spoilt[:, 21] = clean[:, 21]
    assert torch.equal(spoilt, clean)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_one_digit_loses_no_more_than_the_rounding_of_activations(size: float) -> None:
    """Whatever the sizes of the scales of a row."""
    torch.manual_seed(0)
    weight = random_weight("offset", 4, 32, 300, 1600, 3)
    assert weight.offset is not None
    weight.scale.mul_(torch.where(torch.rand(weight.scale.shape) < 0.1, size, 1.0))
    given = torch.randn(60, weight.columns)
    runs = given.view(60, -1, 32)
    step = runs.abs().amax(dim=2, keepdim=True) / 127
    rounded = ((runs / step).round() * step).view(given.shape)
    got = native().product(given, weight, None, 1)
    restored = weight.restore_stored().double()
    expected = given.double() @ restored.T
    assert got is not None
    inherent = (rounded.double() @ restored.T - expected).norm(dim=0)
    assert ((got.double() - expected).norm(dim=0) < 1.1 * inherent).all()


def test_which_products_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    native()
    assert many_tokens_for(random_weight("offset", 4, 32, 3, 64, 0), torch.float32) is not None
    assert many_tokens_for(random_weight("offset", 4, 32, 1, 14336, 0), torch.float32) is not None
    assert many_tokens_for(random_weight("offset", 4, 32, 3, 64, 0), torch.bfloat16) is None
    best = many_tokens()
    assert best is not None
    for kind, bits, group in (("offset", 5, 32), ("fp8", 8, 32), ("offset", 4, 16)):
        weight = random_weight(kind, bits, group, 1, 64, 0)
        assert (many_tokens_for(weight, torch.float32) is not None) == best.tiles
    weight = random_weight("ordered", 4, 32, 40, 96, 0)
    given = torch.randn(40, 96)
    torch.testing.assert_close(multiply(given, weight), given @ weight.restore().T, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(product, "many_tokens_for", lambda *_: None)
    torch.testing.assert_close(multiply(given, weight), given @ weight.restore().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tiles", [False, True])
def test_the_kernels_pass_their_check(tiles: bool) -> None:
    cpu_many.check(native(tiles))


class Wrong(ManyTokens):
    def product(self, given, weight, bias, parts=3):  # type: ignore[no-untyped-def]
        out = super().product(given, weight, bias, parts)
        return None if out is None else out * 1.001


class Forgetful(ManyTokens):
    def product(self, given, weight, bias, parts=3):  # type: ignore[no-untyped-def]
        return super().product(given.nan_to_num(), weight, bias, parts)


class WrongForOneKind(ManyTokens):
    def product(self, given, weight, bias, parts=3):  # type: ignore[no-untyped-def]
        out = super().product(given, weight, bias, parts)
        return out if out is None or (weight.bits, weight.group) != (6, 16) else out * 1.001


def test_a_kernel_that_is_wrong_for_one_kind_of_codes_is_not_used() -> None:
    native(tiles=True)
    with pytest.raises(NativeUnavailable, match="codes of 6 bits in groups of 16"):
        cpu_many.check(WrongForOneKind(tiles=True))


@pytest.mark.parametrize(("kernel", "reason"), [(Wrong, "differ from torch's"), (Forgetful, "loses a NaN")])
def test_a_wrong_kernel_is_not_used(kernel: type[ManyTokens], reason: str) -> None:
    native()
    with pytest.raises(NativeUnavailable, match=reason):
        cpu_many.check(kernel(tiles=False))
