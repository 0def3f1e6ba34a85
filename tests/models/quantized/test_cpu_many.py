"""Products of codes with many tokens, against restored rows."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from skim.models.quantized import cpu_many, product
from skim.models.quantized.cpu_many import MOST_GROUPS, ManyTokens, many_tokens_for
from skim.models.quantized.product import multiply, multiply_tiles
from skim.native.build import NativeUnavailable
from tests.models.quantized.weights import random_weight

KINDS = ("offset", "zeros", "zero", "super", "super-offset")


@cache
def native() -> ManyTokens:
    try:
        return ManyTokens()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("digits", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_as_precise_as_float32_or_8_bits(kind: str, digits: int) -> None:
    for seed in range(12):
        draw = random.Random(f"{kind} {seed}")
        rows, columns, tokens = draw.randint(1, 70), draw.randint(1, 900), draw.randint(1, 60)
        weight = random_weight(kind, 4, draw.choice([32, 64, 128]), rows, columns, seed)
        torch.manual_seed(seed)
        given = torch.randn(tokens, weight.columns) * 10 ** draw.uniform(-6, 6)
        given[:, ::50] *= draw.choice([1, 100])  # outliers, as activations have
        given[0, : draw.randint(0, weight.columns)] = 0.0
        bias = torch.randn(rows) if seed % 2 else None
        got = native().product(given, weight, bias, digits)
        restored = weight.restore_stored().double()
        expected = given.double() @ restored.T
        scale, offset = (one.double().abs().repeat_interleave(weight.group, 1) for one in weight.affine())
        large = given.double().abs()
        if digits == 1:  # relative to the largest of 32 columns
            large = large.view(tokens, -1, 32).amax(dim=2).repeat_interleave(32, 1)
        size = large @ (15 * scale + offset).T  # errors do not depend on codes
        if bias is not None:
            expected, size = expected + bias.double(), size + bias.double().abs()
        assert got is not None
        assert (
            (got.double() - expected).abs() <= (1e-6 if digits == 3 else 0.5 / 127 + 1e-6) * size + 1e-30
        ).all()


def test_a_tokens_product_is_bit_identical_in_any_batch_and_with_any_number_of_threads() -> None:
    weight = random_weight("offset", 4, 32, 75, 300, 0)
    given = torch.randn(23, weight.columns)
    together = native().product(given, weight, None)
    assert together is not None
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        for first, end in ((0, 1), (4, 11), (17, 23)):
            alone = native().product(given[first:end].clone(), weight, None)
            assert alone is not None
            assert torch.equal(alone, together[first:end])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e35])
def test_values_that_do_not_fit_are_left_to_restored_rows(value: float) -> None:
    native()
    weight = random_weight("offset", 4, 32, 20, 128, 0)
    given = torch.randn(30, 128)
    given[7, 100] = value
    assert native().product(given, weight, None) is None
    out, expected = multiply(given, weight), multiply_tiles(given, weight)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert out[[0, 29]].isfinite().all()


def test_which_products_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    native()
    assert many_tokens_for(random_weight("offset", 4, 32, 3, 64, 0), torch.float32) is not None
    assert many_tokens_for(random_weight("offset", 4, 32, 1, 32 * MOST_GROUPS, 0), torch.float32) is not None
    for kind, bits, group, columns in (
        ("offset", 5, 32, 64),
        ("fp8", 8, 32, 64),
        ("offset", 4, 16, 64),
        ("offset", 4, 32, 32 * MOST_GROUPS + 32),
    ):
        weight = random_weight(kind, bits, group, 1, columns, 0)
        assert many_tokens_for(weight, torch.float32) is None
    weight = random_weight("ordered", 4, 32, 40, 96, 0)
    given = torch.randn(40, 96)
    torch.testing.assert_close(multiply(given, weight), given @ weight.restore().T, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(product, "many_tokens_for", lambda *_: None)
    torch.testing.assert_close(multiply(given, weight), given @ weight.restore().T, rtol=1e-4, atol=1e-4)


class Wrong(ManyTokens):
    def product(self, given, weight, bias, digits=3):  # type: ignore[no-untyped-def]
        out = super().product(given, weight, bias, digits)
        return None if out is None else out * 1.001


class Forgetful(ManyTokens):
    def product(self, given, weight, bias, digits=3):  # type: ignore[no-untyped-def]
        return super().product(given.nan_to_num(), weight, bias, digits)


@pytest.mark.parametrize(("kernel", "reason"), [(Wrong, "differ from torch's"), (Forgetful, "loses a NaN")])
def test_a_wrong_kernel_is_not_used(kernel: type[ManyTokens], reason: str) -> None:
    native()
    with pytest.raises(NativeUnavailable, match=reason):
        cpu_many.check(kernel())
