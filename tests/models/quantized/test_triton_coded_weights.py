"""The Triton kernels of coded weights against the restored weight. Runs like `test_triton.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.attention.test_triton import DEVICE, INTERPRETED  # isort: skip (skips where Triton cannot run)

from skim.models.quantized import triton_matrix, triton_vector
from skim.models.quantized.format import CodedWeight
from skim.models.quantized.module import CodedEmbedding, CodedLinear
from skim.models.quantized.product import look_up, multiply
from skim.models.quantized.triton_product import multiply_few_tokens
from skim.models.quantized.triton_restore import restore_stored
from tests.models.quantized.weights import every_kind, random_weight, shaped

if not INTERPRETED:
    pytestmark = pytest.mark.gpu

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# The interpreter cannot multiply matrices of bfloat16, and rounds numbers to it by cutting bits off.
MATRIX = [torch.float32, torch.float16] if INTERPRETED else list(BOUNDS)
RESTORED = [torch.float32, torch.float16] if INTERPRETED else list(BOUNDS)
ROWS = 5 if INTERPRETED else 37
WEIGHTS = dict(every_kind(ROWS))
if INTERPRETED:  # one group for each kind and number of bits; each group with each number of bits
    WEIGHTS = {name: weight for at, (name, weight) in enumerate(WEIGHTS.items()) if at % 4 == at // 4 % 5 % 4}
LARGE = [(6144, 4096), (4096, 12288), (4099, 5120)]


def check(given: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """`out` is the product in float64, up to rounding of the inputs' type."""
    assert (out.shape, out.dtype) == ((len(given), weight.rows), given.dtype)
    assert torch.isfinite(out).all()
    restored = weight.restore_stored().double()
    expected = given.double() @ restored.T
    size = given.double().abs() @ restored.abs().T
    if bias is not None:
        expected += bias.double()
        size += bias.double().abs()
    assert ((out.double() - expected).abs() <= BOUNDS[given.dtype] * (0.1 * size + expected.abs())).all()


def inputs(tokens: int, weight: CodedWeight, dtype: torch.dtype, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, weight.columns, generator=draw).to(DEVICE, dtype)


def bias_of(weight: CodedWeight, dtype: torch.dtype, seed: int) -> torch.Tensor | None:
    return None if seed % 2 else torch.linspace(-1, 1, weight.rows).to(DEVICE, dtype)


@pytest.mark.parametrize("name", WEIGHTS)
def test_one_token(name: str) -> None:
    seed = list(WEIGHTS).index(name)
    weight = WEIGHTS[name].to(DEVICE)
    dtypes = [list(BOUNDS)[seed % 3]] if INTERPRETED else list(BOUNDS)
    for dtype in dtypes:
        given, bias = inputs(1, weight, dtype, seed), bias_of(weight, dtype, seed)
        check(given, weight, bias, multiply_few_tokens(given, weight, bias))


@pytest.mark.parametrize("name", WEIGHTS)
def test_few_tokens(name: str) -> None:
    seed = list(WEIGHTS).index(name)
    weight = WEIGHTS[name].to(DEVICE)
    dtypes = [MATRIX[seed % 2]] if INTERPRETED else MATRIX
    tokens = 2 + seed * 11 % 63
    for dtype in dtypes:
        given, bias = inputs(tokens, weight, dtype, seed), bias_of(weight, dtype, seed)
        check(given, weight, bias, multiply_few_tokens(given, weight, bias))
        launch = triton_matrix.Launch(16, 16, 1 + seed % 3, 4, 3)
        check(given, weight, bias, triton_matrix.multiply_few(given, weight, bias, launch))


@pytest.mark.parametrize("name", WEIGHTS)
def test_restored_rows(name: str) -> None:
    """Bit for bit on a GPU. The interpreter rounds products before it adds to them."""
    seed = list(WEIGHTS).index(name)
    weight = WEIGHTS[name].to(DEVICE)
    for dtype in [RESTORED[seed % 2]] if INTERPRETED else RESTORED:
        plain = weight.restore_stored(dtype)
        chosen = torch.tensor([ROWS - 1, 0, 0], device=DEVICE)
        for restored, expected in [
            (restore_stored(weight, dtype), plain),
            (restore_stored(weight, dtype, chosen), plain[chosen]),
        ]:
            if INTERPRETED:
                largest = float(plain.abs().max())
                step = largest * torch.finfo(dtype).eps
                torch.testing.assert_close(restored, expected, rtol=torch.finfo(dtype).eps, atol=step)
            else:
                assert torch.equal(restored, expected)


@pytest.mark.parametrize("launch", [triton_vector.Launch(1, 32, 1), triton_vector.Launch(8, 64, 2)])
@pytest.mark.parametrize("columns", [32, 1056])
def test_launches_for_one_token(columns: int, launch: triton_vector.Launch) -> None:
    weight = random_weight("offset", 4, 32, 9, columns, 1).to(DEVICE)
    given = inputs(1, weight, torch.float32, 0)
    check(given, weight, None, triton_vector.multiply_one(given, weight, None, launch))


@pytest.mark.parametrize(
    ("bits", "rows", "columns", "one", "four", "sixteen"),
    [
        (4, 6144, 4096, (8, 128, 4), (64, 16, 4, 4, 3), (128, 16, 8, 8, 3)),
        (4, 4096, 4096, (8, 128, 4), (64, 16, 4, 4, 3), (128, 16, 8, 8, 3)),
        (4, 24576, 4096, (8, 64, 2), (64, 16, 1, 4, 3), (128, 16, 2, 8, 3)),
        (4, 4096, 12288, (8, 256, 8), (64, 16, 4, 4, 3), (128, 16, 8, 8, 3)),
        (8, 151936, 4096, (4, 64, 2), (64, 16, 1, 4, 3), (128, 16, 1, 8, 3)),
    ],
)
def test_chosen_launches(
    bits: int, rows: int, columns: int, one: tuple[int, ...], four: tuple[int, ...], sixteen: tuple[int, ...]
) -> None:
    """The fastest on an H200 of those that were measured, or at most 6% slower."""
    weight = shaped(bits, rows, columns)
    assert triton_vector.choose(weight) == one
    assert triton_matrix.choose(weight, 4) == four
    assert triton_matrix.choose(weight, 16) == sixteen


def test_chosen_launches_fit_short_rows() -> None:
    for runs in range(1, 200):
        launch = triton_vector.choose(shaped(4, 3, 32 * runs))
        assert launch.pairs == 32 * launch.warps


@pytest.mark.parametrize("tokens", [1, 3])
def test_inputs_anywhere_in_memory(tokens: int) -> None:
    weight = random_weight("zero", 4, 32, ROWS, 64, 1).to(DEVICE)
    around = inputs(tokens, weight, torch.float16, 0).repeat(1, 2)
    for given in (around[:, 1:65], around.flatten()[3 : 3 + 64 * tokens].view(tokens, 64)):
        check(given, weight, None, multiply_few_tokens(given, weight))


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    ("kind", "bits", "group"), [("offset", 4, 32), ("zero", 4, 128), ("super", 6, 16), ("fp8", 8, 128)]
)
def test_nan_stays(kind: str, bits: int, group: int, tokens: int) -> None:
    weight = random_weight(kind, bits, group, ROWS, 200, 0).to(DEVICE)
    dtype = torch.float32
    given = inputs(tokens, weight, dtype, 0)
    given[-1, 7] = float("nan")
    out = multiply_few_tokens(given, weight)
    assert out[-1].isnan().all()
    assert out[:-1].isfinite().all()
    given = inputs(tokens, weight, dtype, 0)
    scaled = weight.factor if weight.factor is not None else weight.scale
    broken = scaled.clone()
    broken[2].view(-1)[0] = float("nan")
    change = {"factor": broken} if weight.factor is not None else {"scale": broken}
    out = multiply_few_tokens(given, replace(weight, **change))  # type: ignore[arg-type]
    assert out[:, 2].isnan().all()
    assert out[:, [0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_code_of_nan_stays(tokens: int) -> None:
    weight = random_weight("fp8", 8, 128, ROWS, 200, 0).to(DEVICE)
    for byte, row in [(0x7F, 0), (0xFF, 3)]:
        codes = weight.low.view(torch.uint8).clone()
        codes[row, 21] = byte
        broken = replace(weight, low=codes.view(torch.float8_e4m3fn))
        out = multiply_few_tokens(inputs(tokens, weight, torch.float32, 0), broken)
        assert out[:, row].isnan().all()
        assert out[:, [1, 2, 4]].isfinite().all()
        assert restore_stored(broken, torch.float32)[row].isnan().sum() == 1


def test_every_e4m3_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(1, 256).view(torch.float8_e4m3fn)
    scale = torch.ones(1, 2, device=DEVICE)
    weight = CodedWeight(8, 128, codes, scale)
    restored = restore_stored(weight, torch.float32)
    torch.testing.assert_close(restored, codes.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1e-30, 1e15])
def test_inputs_of_any_size(size: float) -> None:
    weight = random_weight("zero", 4, 32, 5, 64, 0).to(DEVICE)
    given = inputs(1, weight, torch.float32, 0)
    out = multiply_few_tokens(given * size, weight)
    atol = 1e-17 + 1e-5 * size
    torch.testing.assert_close(out, multiply_few_tokens(given, weight) * size, rtol=1e-4, atol=atol)


if not INTERPRETED:

    @pytest.mark.parametrize("tokens", [1, 2, 8, 9, 16, 17, 64, 65])
    @pytest.mark.parametrize("kind", ["zero", "offset", "ordered", "super-offset", "fp8"])
    @pytest.mark.parametrize(("rows", "columns"), LARGE)
    def test_large_products(rows: int, columns: int, kind: str, tokens: int) -> None:
        for bits, group in [(4, 128), (6, 16), (8, 64)]:
            weight = random_weight(kind, bits, group, rows, columns, tokens).to(DEVICE)
            given = inputs(tokens, weight, torch.bfloat16, rows)
            bias = bias_of(weight, torch.bfloat16, tokens)
            stored = replace(weight, order=None)
            check(given, stored, bias, multiply(given, stored, bias))
            linear = CodedLinear(weight, bias)
            expected = multiply(given if weight.order is None else given[:, weight.order], stored, bias)
            assert torch.equal(linear(given), expected)

    def test_captured_products_give_the_same_again() -> None:
        weight = random_weight("zeros", 4, 128, 4096, 4096, 0).to(DEVICE)
        module, table = CodedLinear(weight), CodedEmbedding(weight, torch.bfloat16)
        ids = torch.tensor([5, 4095], device=DEVICE)

        def work() -> list[torch.Tensor]:
            looked_up = table(ids)
            return [looked_up, module(looked_up[:1]), module(looked_up), module(looked_up.repeat(40, 1))]

        expected = work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = work()
        for one in captured:
            one.zero_()
        graph.replay()
        for one, other in zip(captured, expected, strict=True):
            assert torch.equal(one, other)
        assert torch.equal(look_up(weight, ids, torch.bfloat16), weight.restore(torch.bfloat16)[ids])
