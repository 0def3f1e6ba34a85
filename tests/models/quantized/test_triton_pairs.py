"""The kernel that multiplies pairs of codes on tensor cores, and its twin. Runs like `test_triton.py`."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.attention.test_triton import DEVICE, INTERPRETED  # isort: skip (skips where Triton cannot run)

import triton.language as tl

from skim.models.quantized.triton_pairs import (
    MOST_TOKENS,
    Launch,
    can_multiply,
    choose,
    constant_pair,
    multiply_pairs,
    unpack_assembly,
)
from skim.models.quantized.triton_shares import _counts
from tests.models.quantized.test_triton_coded_weights import bias_of, check, inputs
from tests.models.quantized.weights import random_weight, shaped

if not INTERPRETED:
    pytestmark = pytest.mark.gpu

DTYPES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]  # see test_triton_coded_weights


@pytest.mark.parametrize("kind", ["zeros", "zero"])
@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("splits", [1, 3])
def test_every_launch(kind: str, group: int, splits: int) -> None:
    for seed in range(1 if INTERPRETED else 20):
        draw = random.Random(f"{kind} {group} {splits} {seed}")
        launch = Launch(draw.choice([64, 128]), splits, 4, draw.choice([3, 4]))
        rows = draw.choice([3, 64, 133]) if INTERPRETED else draw.choice([5, 4096, 6001])
        weight = random_weight(kind, 4, group, rows, draw.randint(1, 1200), seed).to(DEVICE)
        tokens = draw.randint(2, MOST_TOKENS)
        for dtype in DTYPES:
            given, bias = inputs(tokens, weight, dtype, seed), bias_of(weight, dtype, draw.randint(0, 1))
            out = multiply_pairs(given, weight, bias, launch)
            check(given, weight, bias, out)
            assert torch.equal(multiply_pairs(given, weight, bias, launch), out)
        assert not _counts(weight.device).any()


@pytest.mark.parametrize("splits", [1, 2])
def test_what_is_not_finite_stays(splits: int) -> None:
    weight = random_weight("zeros", 4, 128, 5, 256, 0).to(DEVICE)
    launch = Launch(64, splits, 4, 4)
    for value in (float("nan"), float("inf")):
        given = inputs(3, weight, torch.float16, 0)
        given[1, 7] = value
        out = multiply_pairs(given, weight, None, launch)
        assert not out[1].isfinite().any()
        assert out[[0, 2]].isfinite().all()
    given = inputs(3, weight, torch.float16, 0)
    scale = weight.scale.clone()
    scale[2, 0] = float("nan")
    out = multiply_pairs(given, replace(weight, scale=scale), None, launch)
    assert out[:, 2].isnan().all()
    assert out[:, [0, 1, 3, 4]].isfinite().all()


def test_which_products_it_is_for() -> None:
    for kind in ("offset", "zeros", "zero", "super", "super-offset", "fp8"):
        for bits in (4, 5, 6, 8):
            for group in (16, 32, 64, 128):
                weight = random_weight(kind, bits, group, 2, 256, 0)
                good = weight.bits == 4 and group >= 64 and kind.startswith("zero")
                assert can_multiply(weight, 16, torch.bfloat16) == good
                assert not can_multiply(weight, MOST_TOKENS + 1, torch.bfloat16)
                assert not can_multiply(weight, 16, torch.float32)


def test_few_rows_share_their_columns() -> None:
    assert choose(shaped(4, 4096, 12288)).splits > 1
    assert choose(shaped(4, 65536, 4096)).splits == choose(shaped(4, 9, 64)).splits == 1


@pytest.mark.parametrize("dtype", [tl.float16, tl.bfloat16])
def test_assembly(dtype: tl.dtype) -> None:
    """Follow the instructions for random words and every zero point."""
    draw = np.random.default_rng(0)
    as_torch = torch.float16 if dtype == tl.float16 else torch.bfloat16
    raised = 1024 if dtype == tl.float16 else 128

    def halves(word: int) -> torch.Tensor:
        return torch.from_numpy(np.array([word], np.uint32).view(np.int16)).view(as_torch).float()

    def number(pair: torch.Tensor) -> int:
        return int(pair.to(as_torch).view(torch.int16).numpy().view(np.uint32)[0])

    for zero in range(17):
        word = int(draw.integers(0, 2**32))
        less = number(torch.tensor([-raised - zero] * 2).float())
        assert int(constant_pair(dtype, zero), 0) == less
        values = {"$8": word, "$9": less}
        for line in str(unpack_assembly(dtype, "$9")).replace("{", "").replace("}", "").split(";")[:-1]:
            instruction, target, *names = line.replace(",", " ").split()
            if instruction == ".reg":
                continue
            taken = [values.get(name, name) for name in names]
            given = [int(str(one), 0) for one in taken if not str(one).startswith("$")]
            match instruction:
                case "mov.b32" if len(names) == 1:
                    values[target] = given[0]
                case "mov.b32":
                    first, second = halves(values[names[1]])
                    values |= {target: int(first), names[0]: int(second)}
                case "prmt.b32":
                    bytes_of = given[0].to_bytes(4, "little") + bytes(4)
                    values[target] = sum(bytes_of[given[2] >> 4 * at & 7] << 8 * at for at in range(4))
                case "shr.u32":
                    values[target] = given[0] >> given[1]
                case "lop3.b32":
                    assert given[3] == 0xEA
                    values[target] = given[0] & given[1] | given[2]
                case "fma.rn.f16x2" | "fma.rn.bf16x2":
                    values[target] = number(halves(given[0]) * halves(given[1]) + halves(given[2]))
                case _:
                    raise AssertionError(line)
        found = [values[f"${at}"] for at in range(8)]
        assert found == [(word >> 8 * b + 4 * h & 15) - zero for h in range(2) for b in range(4)]
