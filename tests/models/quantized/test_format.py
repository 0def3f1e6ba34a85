"""The format of coded weights: packing, restoring, products and checks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skim.models.quantized.format import CodedWeight, pack, unpack, why_invalid
from skim.models.quantized.module import CodedEmbedding, CodedLinear
from skim.models.quantized.product import multiply_tiles
from tests.models.quantized.weights import every_kind, random_weight

WEIGHTS = dict(every_kind())


@settings(deadline=None)
@given(
    bits=st.sampled_from([4, 5, 6]), rows=st.integers(1, 5), runs=st.integers(1, 6), seed=st.integers(0, 9)
)
def test_packing_is_reversible(bits: int, rows: int, runs: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (rows, 32 * runs), generator=draw).to(torch.uint8)
    low, high = pack(codes, bits)
    assert torch.equal(unpack(low, high, bits), codes)
    assert low.nbytes + (0 if high is None else high.nbytes) == codes.numel() * bits // 8


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_value_is_scale_times_code_plus_offset(name: str) -> None:
    weight = WEIGHTS[name]
    scale, offset = weight.affine()
    codes = weight.codes()
    restored = weight.restore()
    where = range(weight.columns) if weight.order is None else weight.order.tolist()
    draw = torch.Generator().manual_seed(1)
    for row, column in torch.randint(0, weight.rows, (20, 2), generator=draw).tolist():
        group = column // weight.group
        expected = float(scale[row, group]) * float(codes[row, column]) + float(offset[row, group])
        assert float(restored[row, where[column]]) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", WEIGHTS)
def test_modules_compute_with_the_restored_weight(name: str) -> None:
    weight = WEIGHTS[name]
    bias = torch.linspace(-1, 1, weight.rows)
    hidden = torch.randn(2, 3, weight.columns, generator=torch.Generator().manual_seed(0))
    plain = weight.restore()
    expected = torch.nn.functional.linear(hidden.double(), plain.double(), bias.double())
    magnitude = torch.nn.functional.linear(hidden.abs(), plain.abs(), bias.abs())
    found = CodedLinear(weight, bias)(hidden)
    assert ((found - expected).abs() / magnitude).max() < 2e-6
    ids = torch.tensor([[3, 0], [weight.rows - 1, 3]])
    looked_up = CodedEmbedding(weight, torch.float32)(ids)
    assert torch.equal(looked_up, weight.restore()[ids])


def test_tiles_are_the_whole_product(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight("offset", 4, 32, 37, 64, 0)
    given_ = torch.randn(5, weight.columns, generator=torch.Generator().manual_seed(0))
    whole = multiply_tiles(given_, weight)
    monkeypatch.setattr("skim.models.quantized.product.TILE_BYTES", 4 * weight.columns * 3)
    torch.testing.assert_close(multiply_tiles(given_, weight), whole)


def test_a_change_of_dtype_leaves_the_planes_alone() -> None:
    weight = random_weight("offset", 4, 32, 5, 64, 0)
    module = CodedLinear(weight).to(torch.bfloat16)
    assert torch.equal(module.coded.restore(), weight.restore())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"bits": 3}, "3 bits"),
        ({"group": 48}, "groups of 48"),
        ({"low": torch.zeros(37, 7, dtype=torch.uint8)}, "low of shape"),
        ({"low": torch.zeros(37, 32, dtype=torch.int32)}, "low of type"),
        ({"low": torch.zeros(37, 32, dtype=torch.float8_e4m3fn)}, "low of type"),
        ({"high": torch.zeros(37, 8, dtype=torch.uint8)}, "high"),
        ({"offset": torch.zeros(37, 9)}, "offset of shape"),
        ({"order": torch.zeros(64, dtype=torch.int64)}, "no permutation"),
    ],
)
def test_planes_that_do_not_fit_are_named(change: dict[str, object], why: str) -> None:
    weight = random_weight("offset", 4, 32, 37, 64, 0)
    found = why_invalid(replace(weight, **change))  # type: ignore[arg-type]
    assert found is not None
    assert why in found


def test_bytes_are_those_of_the_planes() -> None:
    weight: CodedWeight = random_weight("offset", 4, 32, 64, 1024, 0)
    assert weight.scale.dtype in (torch.float16, torch.float32)
    assert weight.nbytes == 64 * 1024 // 2 + 2 * weight.scale.nbytes
