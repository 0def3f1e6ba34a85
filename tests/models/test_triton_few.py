"""The product kernel for few tokens against the product in float64. Runs like `test_triton.py`."""

from __future__ import annotations

import random

import pytest
import torch

from tests.attention.test_triton import DEVICE, HALF, INTERPRETED  # isort: skip (skips where Triton cannot run)

from skim.attention.hook import FEW_TOKENS
from skim.models.forwards.triton_few import Launch, can_multiply, choose, multiply_few

if not INTERPRETED:
    pytestmark = pytest.mark.gpu

BOUND = 1e-3 if INTERPRETED else 8e-3
DTYPES = [HALF] if INTERPRETED else [torch.bfloat16, torch.float16]
SIZES = [(1, 1), (3, 7), (64, 512), (65, 130), (200, 1100)]
if not INTERPRETED:
    SIZES += [(6144, 4096), (4096, 12288), (2560, 9728), (1025, 4099)]


def inside_nans(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers, with NaNs around them in memory."""
    around = torch.full((rows + 3, columns + 5), float("nan"), dtype=dtype, device=DEVICE)
    return around[:rows, :columns].copy_(torch.randn(rows, columns, device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [2, 4, 16, 17, 32])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_every_weight_counts_once_and_nothing_outside_is_read(
    outputs: int, inputs: int, tokens: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(outputs + inputs + tokens)
    draw = random.Random(outputs + inputs + tokens)
    weight, hidden = inside_nans(outputs, inputs, dtype), inside_nans(tokens, inputs, dtype)
    bias = inside_nans(1, outputs, dtype)[0] if draw.random() < 0.5 else None
    launch = choose(outputs, inputs, overlap=False)
    if draw.random() < 0.5:  # any launch must be right
        launch = Launch(draw.choice((16, 32, 64)), draw.choice((32, 64, 128)), draw.choice((1, 2, 4)), 4, 3)
    used = launch if INTERPRETED else None
    out = multiply_few(hidden[None], weight, bias, launch=used)
    assert (out.shape, out.dtype) == ((1, tokens, outputs), dtype)
    assert torch.isfinite(out).all()
    expected = hidden.double() @ weight.double().T
    if bias is not None:
        expected += bias.double()
    size = (hidden.double().abs() @ weight.double().abs().T).clamp_min(1.0)
    error = (out[0].double() - expected).abs()
    assert (error <= BOUND * torch.minimum(size, expected.abs() + 1e-2 * size)).all()
    residual = torch.randn(1, tokens, outputs, device=DEVICE).to(dtype)
    assert torch.equal(multiply_few(hidden[None], weight, bias, residual, launch=used), out + residual)
    if outputs % 2 == 0:
        left, right = out.float().chunk(2, dim=-1)
        gated = multiply_few(hidden[None], weight, bias, gated=True, launch=used)
        expected = (torch.nn.functional.silu(left) * right).to(dtype)
        torch.testing.assert_close(gated, expected, rtol=BOUND, atol=1e-6)


def test_a_token_does_not_depend_on_those_beside_it() -> None:
    torch.manual_seed(0)
    hidden, weight = inside_nans(20, 520, HALF), inside_nans(70, 520, HALF)
    alone = multiply_few(hidden[3:5], weight, None)
    assert torch.equal(multiply_few(hidden[:16], weight, None)[3:5], alone)
    hidden[0, 7], hidden[1, 9] = float("nan"), float("inf")
    broken = multiply_few(hidden, weight, None)
    assert torch.equal(broken[3:5], alone)
    assert not torch.isfinite(broken[:2]).any()


def test_a_product_leaves_no_count_behind() -> None:
    hidden, weight = inside_nans(4, 1024, HALF), inside_nans(40, 1024, HALF)
    launch = Launch(16, 64, 4, 4, 3)
    first = multiply_few(hidden, weight, None, launch=launch)
    assert all(torch.equal(multiply_few(hidden, weight, None, launch=launch), first) for _ in range(3))


def test_which_products_the_kernel_computes() -> None:
    weight = torch.empty(8, 8, dtype=torch.bfloat16)
    found = [tokens for tokens in range(100) if can_multiply(tokens, weight, torch.bfloat16)]
    assert found == list(range(2, FEW_TOKENS + 1))
    assert not can_multiply(4, weight, torch.float16)
    assert not can_multiply(4, weight.float(), torch.float32)
