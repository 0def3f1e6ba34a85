"""The one-token product kernel against the product in float64. Runs like `test_triton.py`."""

from __future__ import annotations

import pytest
import torch

from tests.attention.test_triton import DEVICE, INTERPRETED  # isort: skip (skips where Triton cannot run)

from skim.models.forwards.triton_product import multiply

if not INTERPRETED:
    pytestmark = pytest.mark.gpu

BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SIZES = [(1, 1), (3, 7), (2, 1024), (5, 1025), (40, 2048), (33, 3000)]
if not INTERPRETED:
    SIZES += [(6144, 4096), (4096, 12288), (51200, 5120), (1025, 4099)]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_every_weight_counts_once_and_nothing_outside_is_read(
    outputs: int, inputs: int, biased: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(outputs + inputs)
    around = torch.full((outputs + 3, inputs + 5), float("nan"), dtype=dtype, device=DEVICE)
    weight = around[:outputs, :inputs]
    weight.copy_(torch.randn(outputs, inputs, device=DEVICE))
    row = torch.full((1, 2 * inputs), float("nan"), dtype=dtype, device=DEVICE)
    hidden = row[:, ::2].copy_(torch.randn(1, inputs, device=DEVICE))[None]
    bias = None
    if biased:
        bias = torch.full((outputs + 1,), float("nan"), dtype=dtype, device=DEVICE)[:outputs]
        bias.copy_(torch.randn(outputs, device=DEVICE))
    out = multiply(hidden, weight, bias)
    assert (out.shape, out.dtype) == ((1, 1, outputs), dtype)
    assert torch.isfinite(out).all()
    expected = weight.double() @ hidden[0, 0].double()
    if bias is not None:
        expected += bias.double()
    size = (weight.double().abs() @ hidden[0, 0].double().abs()).clamp_min(1.0)
    error = (out[0, 0].double() - expected).abs()
    assert (error <= BOUNDS[dtype] * torch.minimum(size, expected.abs() + 1e-2 * size)).all()
    residual = torch.randn(1, 1, outputs, device=DEVICE).to(dtype)
    added = multiply(hidden, weight, bias, residual)
    torch.testing.assert_close(added, out + residual, rtol=BOUNDS[dtype], atol=1e-6)
    if outputs % 2 == 0:
        left, right = out.float().chunk(2, dim=-1)
        gated = multiply(hidden, weight, bias, gated=True)
        expected = (torch.nn.functional.silu(left) * right).to(dtype)
        torch.testing.assert_close(gated, expected, rtol=2 * BOUNDS[dtype], atol=1e-6)
