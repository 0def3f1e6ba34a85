"""Quantizers round to the nearest codes, and never fail on finite weights of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skim.errors import ModelError
from skim.models.quantized import quantize as module
from skim.models.quantized.checks import why_unusable
from skim.models.quantized.quantize import can_quantize, quantize

HOWS = ["int4", "int8", "fp8"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_matrix(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=draw) * 0.02).to(dtype)


def relative_error(weight: torch.Tensor, how: str) -> float:
    values = weight.float()
    return float((quantize(weight, how).restore() - values).square().sum() / values.square().sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("how", "most"), [("int4", 1.0e-2), ("int8", 6e-5), ("fp8", 9e-4)])
def test_the_error_is_that_of_the_bits(how: str, most: float, dtype: torch.dtype) -> None:
    assert most / 3 < relative_error(random_matrix(64, 1024, 0, dtype), how) < most


@pytest.mark.parametrize(
    ("columns", "group"), [(32, 32), (96, 32), (64, 64), (576, 64), (128, 128), (1536, 128)]
)
@pytest.mark.parametrize("how", HOWS)
def test_groups_are_the_widest_that_divide_the_columns(how: str, columns: int, group: int) -> None:
    weight = quantize(random_matrix(3, columns, 0), how)
    assert weight.group == group
    assert (weight.rows, weight.columns) == (3, columns)


def test_every_int4_code_is_the_nearest_one() -> None:
    weight = random_matrix(16, 256, 0)
    coded = quantize(weight, "int4")
    scale, offset = coded.affine()
    every = torch.arange(16.0) * scale[:, :, None, None] + offset[:, :, None, None]  # [rows, groups, 1, 16]
    distance = (weight.view(16, 2, 128, 1) - every).abs()
    chosen = coded.codes().long().view(16, 2, 128, 1)
    assert (distance.gather(-1, chosen)[..., 0] <= distance.amin(-1) * 1.0001 + 1e-9).all()


def test_cutting_the_range_lowers_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_matrix(64, 1024, 0)
    cut = relative_error(weight, "int4")
    monkeypatch.setattr(module, "CUTS", (1.0,))
    assert cut < 0.95 * relative_error(weight, "int4")


@pytest.mark.parametrize("how", HOWS)
def test_tiles_are_the_whole(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_matrix(37, 96, 0)
    whole = quantize(weight, how)
    monkeypatch.setattr(module, "AT_ONCE", 96 * 5)
    parts = quantize(weight, how)
    assert all(torch.equal(plane, parts.planes[name]) for name, plane in whole.planes.items())


@pytest.mark.parametrize("how", HOWS)
def test_a_transposed_matrix_is_quantized_like_its_copy(how: str) -> None:
    weight = random_matrix(64, 37, 0).t()
    found, copied = quantize(weight, how), quantize(weight.contiguous(), how)
    assert all(torch.equal(plane, copied.planes[name]) for name, plane in found.planes.items())


@pytest.mark.parametrize("how", HOWS)
@given(
    dtype=st.sampled_from(DTYPES),
    power=st.integers(-150, 125),
    seed=st.integers(0, 99),
    kind=st.sampled_from(["normal", "positive", "negative", "constant", "zero", "spike"]),
)
@settings(max_examples=60, deadline=None)
def test_finite_weights_of_any_size_stay_finite(
    how: str, dtype: torch.dtype, power: int, seed: int, kind: str
) -> None:
    values = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)).clamp(-4, 4)
    match kind:
        case "positive":
            values = values.abs()
        case "negative":
            values = -values.abs()
        case "constant":
            values = torch.full_like(values, 0.7)
        case "zero":
            values = torch.zeros_like(values)
        case "spike":
            values[0, 0] = 4000
    limit = torch.finfo(dtype).max / 8
    weight = (values.double() * 2.0**power).clamp(-limit, limit).to(dtype)
    coded = quantize(weight, how)
    assert why_unusable(coded) is None
    restored = coded.restore()
    largest = weight.float().abs().max()
    assert (restored - weight.float()).abs().max() <= largest * 0.25 + 2.0**-24
    assert (restored[weight == 0] == 0).all()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(how: str, bad: float) -> None:
    weight = random_matrix(4, 64, 0)
    weight[2, 3] = bad
    with pytest.raises(ModelError, match=r"layers.0.up has values that are not finite.*--quantization none"):
        quantize(weight, how, "layers.0.up")


def test_values_too_large_for_codes_are_refused_by_name() -> None:
    weight = torch.full((4, 64), torch.finfo(torch.float32).max)
    weight[:, ::2] *= -1
    with pytest.raises(ModelError, match=r"layers.0.up cannot be quantized.*not finite"):
        quantize(weight, "int4", "layers.0.up")


@pytest.mark.parametrize(
    ("shape", "possible"),
    [
        ((4, 32), True),
        ((1, 4096), True),
        ((4, 48), False),
        ((4, 31), False),
        ((4,), False),
        ((2, 4, 32), False),
    ],
)
def test_which_tensors_can_be_quantized(shape: tuple[int, ...], possible: bool) -> None:
    assert can_quantize(shape) == possible


@pytest.mark.parametrize("how", HOWS)
def test_tiles_are_converted_and_moved_one_by_one(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_matrix(50, 256, 1)
    whole = quantize(weight.bfloat16(), how)
    monkeypatch.setattr(module, "AT_ONCE", 7 * 256)
    sizes: list[int] = []
    convert = module.convert

    def note(value: torch.Tensor, *others: Any) -> torch.Tensor:
        sizes.append(len(value))
        return convert(value, *others)

    monkeypatch.setattr(module, "convert", note)
    tiled = quantize(weight, how, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert sizes == [7] * 7 + [1]
    for name, plane in whole.planes.items():
        assert torch.equal(plane.view(torch.uint8), tiled.planes[name].view(torch.uint8))
    assert whole.zero == tiled.zero
