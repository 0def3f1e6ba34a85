"""The kernel that multiplies pairs of float16 numbers, and its twin. Runs like `test_triton.py`."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.attention.test_triton import DEVICE, INTERPRETED  # isort: skip (skips where Triton cannot run)

from skim.models.quantized.triton_halves import (
    Launch,
    can_multiply,
    choose,
    has_assembly,
    multiply_halves,
    run_assembly,
)
from tests.models.quantized.test_triton_coded_weights import bias_of, check, inputs
from tests.models.quantized.weights import random_weight, shaped

if not INTERPRETED:
    pytestmark = pytest.mark.gpu

KINDS = ("offset", "zeros", "zero")


@pytest.mark.parametrize("kind", KINDS)
def test_every_launch(kind: str) -> None:
    for seed in range(4 if INTERPRETED else 40):
        draw = random.Random(f"{kind} {seed}")
        launch = Launch(draw.choice([4, 8]), draw.choice([1, 2, 4]))
        rows = draw.choice([3, 8, 21]) if INTERPRETED else draw.choice([5, 4096, 6001])
        weight = random_weight(kind, 4, draw.choice([32, 64, 128]), rows, draw.randint(1, 2500), seed)
        weight = weight.to(DEVICE)
        given, bias = inputs(1, weight, torch.bfloat16, seed), bias_of(weight, torch.bfloat16, seed)
        check(given, weight, bias, multiply_halves(given, weight, bias, launch))


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e15])
def test_inputs_of_any_size(size: float) -> None:
    """The same numbers, with other exponents."""
    weight = random_weight("zeros", 4, 32, 5, 64, 0).to(DEVICE)
    raise_by = 2.0 ** round(np.log2(size))
    given = inputs(1, weight, torch.bfloat16, 0)
    out = multiply_halves(given * raise_by, weight)
    assert torch.equal(out, multiply_halves(given, weight) * raise_by)


@pytest.mark.parametrize("outliers", [1, 1000])
def test_error_before_rounding(outliers: float) -> None:
    """The error is less than that of rounding. A bias takes the result away: its rounding hides no error."""
    weight = random_weight("zeros", 4, 128, 64, 1024, 0).to(DEVICE)
    given = inputs(1, weight, torch.bfloat16, 0)
    given[0, ::100] *= outliers
    restored = weight.restore_stored().double()
    expected = given.double() @ restored.T
    bias = -expected[0].bfloat16()
    error = multiply_halves(given, weight, bias).double() - (expected + bias.double())
    size = (given.double() ** 2 @ (restored**2).T).sqrt()
    rounding = expected.bfloat16().double() - expected
    assert (error / size).square().mean() <= (rounding / size).square().mean()


def test_what_is_not_finite_stays() -> None:
    weight = random_weight("zeros", 4, 128, 5, 256, 0).to(DEVICE)
    for value in (float("nan"), float("inf"), 2.0**120):
        given = inputs(1, weight, torch.bfloat16, 0)
        given[0, 7] = value
        assert not multiply_halves(given, weight).isfinite().any()
    given = inputs(1, weight, torch.bfloat16, 0)
    scale = weight.scale.clone()
    scale[2, 0] = float("nan")
    out = multiply_halves(given, replace(weight, scale=scale))
    assert out[:, 2].isnan().all()
    assert out[:, [0, 1, 3, 4]].isfinite().all()


def test_zeros_give_zero() -> None:
    weight = random_weight("zeros", 4, 128, 5, 256, 0).to(DEVICE)
    assert (multiply_halves(inputs(1, weight, torch.bfloat16, 0) * 0, weight) == 0).all()


def test_which_products_it_is_for() -> None:
    for kind in ("offset", "zeros", "zero", "super", "super-offset", "fp8"):
        for bits in (4, 5, 6, 8):
            for group in (16, 32, 128):
                weight = random_weight(kind, bits, group, 2, 256, 0)
                good = weight.bits == 4 and group > 16 and not kind.startswith("super")
                assert can_multiply(weight, torch.bfloat16) == good
                assert not can_multiply(weight, torch.float16)


def test_many_rows_have_few_warps() -> None:
    assert choose(shaped(4, 24576, 4096)) == Launch(8, 2)
    assert choose(shaped(4, 4096, 12288)) == choose(shaped(4, 9, 64)) == Launch(8, 4)


def test_assembly() -> None:
    """Follow the instructions: pair i of a word's inputs belongs to the codes at two places of the word."""
    draw = np.random.default_rng(0)
    words = draw.integers(0, 2**32, 4, dtype=np.uint64)
    given = draw.standard_normal((16, 2)).astype(np.float16) * 100
    values: dict[str, int | np.ndarray | np.float32] = {
        f"${1 + at}": int(one) for at, one in enumerate(words)
    }
    values |= {f"${5 + at}": pair for at, pair in enumerate(given)}

    def halves(name: str) -> np.ndarray:
        value = values[name]
        return np.array([value], np.uint32).view(np.float16) if isinstance(value, int) else np.asarray(value)

    for line in str(run_assembly()).strip("{}").split(";")[:-1]:
        instruction, *names = line.replace(",", " ").replace("{", "").replace("}", "").split()
        taken = names[1:]
        match instruction:
            case ".reg":
                pass
            case "shr.u32":
                values[names[0]] = int(values[taken[0]]) >> int(taken[1])
            case "and.b32":
                values[names[0]] = int(values[taken[0]]) & int(taken[1])
            case "mul.rn.f16x2":
                values[names[0]] = halves(taken[0]) * halves(taken[1])
            case "fma.rn.f16x2":
                exact = halves(taken[0]).astype(float) * halves(taken[1]) + halves(taken[2])
                values[names[0]] = exact.astype(np.float16)
            case "add.rn.f16x2":
                values[names[0]] = halves(taken[0]) + halves(taken[1])
            case "mov.b32":
                values["low"], values["high"] = halves(names[2])
            case "cvt.f32.f16":
                values[names[0]] = np.float32(values[taken[0]])
            case "add.f32":
                values[names[0]] = np.float32(values[taken[0]]) + np.float32(values[taken[1]])
            case _:
                raise AssertionError(line)
    expected = 0.0
    for word in range(4):
        for pair, (shift, factor) in enumerate([(0, 1), (4, 16), (8, 1), (12, 16)]):
            for half in range(2):
                code = int(words[word]) >> (shift + 16 * half) & 15
                expected += code * factor * float(given[4 * word + pair, half])
    assert float(values["$0"]) * 2**24 == pytest.approx(expected, rel=0.02, abs=200)  # type: ignore[arg-type]


def test_only_an_nvidia_gpu_has_assembly() -> None:
    assert not has_assembly(torch.device("cpu"))
