"""Quantized formats: bytes, precision, and the layers they apply to."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skim.config import EngineConfig
from skim.engine.profile import make_pool
from skim.errors import ConfigError
from skim.memory.basis import Basis, hadamard, paired_hadamard, rotated_block
from skim.memory.codec import CodedStore
from skim.memory.formats import AUTO, CODED, FORMATS, make_stores, refusal
from skim.memory.pool import KVPool
from skim.memory.store import LayerShape, PlainStore

CPU = torch.device("cpu")
ERROR = {"fp8": 0.035, "int8": 0.008, "int4": 0.11, "k8v4": 0.11}
"""Relative error of normal values. Four bits cannot do better than 1/16 on independent normal values."""


def pool_of(kv_format: str, shape: LayerShape, blocks: int = 12) -> KVPool:
    return KVPool.of_blocks(
        [shape], blocks, block_size=4, dtype=torch.float32, device=CPU, slab_blocks=5, kv_format=kv_format
    )


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dim", [8, 24, 64, 80, 96, 128, 192, 256])
def test_the_rotation_is_orthogonal_and_its_own_inverse(dim: int) -> None:
    turn = hadamard(dim)
    torch.testing.assert_close(turn @ turn, torch.eye(dim), atol=1e-6, rtol=0)
    torch.testing.assert_close(turn, turn.T)
    assert (turn != 0).sum(dim=0).eq(rotated_block(dim)).all()


@pytest.mark.parametrize("dim", [8, 24, 64, 96, 128])
def test_the_rotation_of_bytes_keeps_the_halves_of_a_head_apart(dim: int) -> None:
    turn = paired_hadamard(dim)
    torch.testing.assert_close(turn @ turn.T, torch.eye(dim), atol=1e-6, rtol=0)
    assert (turn[: dim // 2, 1::2] == 0).all()
    assert (turn[dim // 2 :, 0::2] == 0).all()


def test_products_survive_any_basis() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(2, 16, 16)
    basis = Basis(matrix, torch.linalg.inv(matrix))
    key, query = torch.randn(5, 2, 16), torch.randn(3, 6, 16)
    torch.testing.assert_close(basis.restore(basis.store(key)), key, atol=1e-4, rtol=1e-4)
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(3, dim=1))
    turned = torch.einsum(
        "qhd,khd->hqk", basis.turn_query(query), basis.store(key).repeat_interleave(3, dim=1)
    )
    torch.testing.assert_close(turned, scores, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("kv_format", "most"), [("int8", 0.53), ("fp8", 0.53), ("k8v4", 0.41), ("int4", 0.29)]
)
def test_bytes_scales_included_are_a_fraction_of_bfloat16s(kv_format: str, most: float) -> None:
    layers = [LayerShape(8, 128, 128)] * 3
    sizes = {}
    for name in (AUTO, kv_format):
        pool = KVPool(
            layers,
            block_size=16,
            budget_bytes=2**24,
            dtype=torch.bfloat16,
            device=CPU,
            kv_format=name,
        )
        pool.allocate(pool.capacity)
        stats = pool.stats()
        sizes[name] = stats.reserved_bytes / pool.token_capacity
        assert stats.block_bytes == sizes[name] * 16
    assert sizes[kv_format] <= most * sizes[AUTO]
    coded, plain = (2**24 // int(16 * sizes[name]) for name in (kv_format, AUTO))
    assert coded >= plain / most * 0.99  # the pool admits that many more tokens


def test_off_is_the_plain_store() -> None:
    stores = make_stores([LayerShape(2, 8, 8), LayerShape(1, 4, 2, window=3)], torch.bfloat16)
    assert all(type(store) is PlainStore for store in stores)


@pytest.mark.parametrize("kv_format", CODED)
def test_sliding_windows_and_odd_heads_are_left_alone(kv_format: str) -> None:
    layers = [LayerShape(2, 64, 64), LayerShape(2, 64, 64, window=128), LayerShape(2, 20, 64)]
    kinds = [type(store) for store in make_stores(layers, torch.float32, kv_format)]
    assert kinds == [CodedStore, PlainStore, PlainStore]


@pytest.mark.parametrize("kv_format", CODED)
@pytest.mark.parametrize("shape", [LayerShape(2, 64, 64), LayerShape(1, 128, 128), LayerShape(3, 24, 80)])
def test_random_writes_are_restored_whatever_the_cuts(kv_format: str, shape: LayerShape) -> None:
    rng = random.Random(f"{kv_format}{shape}")
    torch.manual_seed(rng.randrange(2**31))
    key, value = (
        torch.randn(40, shape.kv_heads, shape.key_dim),
        torch.randn(40, shape.kv_heads, shape.value_dim),
    )
    key *= torch.exp(torch.randn(40, shape.kv_heads, 1) * 3)  # tokens and heads of any size
    value[:, :, 3] *= 30  # an outlier channel
    found = []
    for _ in range(2):
        pool = pool_of(kv_format, shape)
        table = rng.sample(pool.allocate(12), 10)
        first = 0
        while first < 40:
            end = min(40, first + rng.randrange(1, 9))
            pool.write(0, pool.runs(table, first, end), key[first:end], value[first:end])
            first = end
        found.append(pool.gather(0, pool.runs(table, 0, 40)))
    for one, other, wanted in zip(*found, (key, value), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)  # however it was cut
        errors = [relative(a, b) for a, b in zip(one, wanted, strict=True)]
        assert sum(errors) / len(errors) < ERROR[kv_format]


@pytest.mark.parametrize("kv_format", CODED)
def test_zeros_stay_zero_and_broken_numbers_stay_broken(kv_format: str) -> None:
    shape = LayerShape(1, 16, 16)
    pool = pool_of(kv_format, shape)
    table = pool.allocate(3)
    new = torch.zeros(12, 1, 16)
    new[4, 0, 3], new[8, 0, 5] = float("nan"), float("inf")
    new[11] = 1e-30
    pool.write(0, pool.runs(table, 0, 12), new, new)
    for got in pool.gather(0, pool.runs(table, 0, 12)):
        assert (got[:4] == 0).all()
        assert got[4].isnan().all()
        assert got[8].isnan().any()
        assert got[11].isfinite().all()
        assert (got[5:8] == 0).all()


def test_fp8_is_refused_where_the_device_lacks_it() -> None:
    assert refusal("int8", CPU) is None
    model: Any = SimpleNamespace(device=CPU)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype fp8 needs a GPU .* not cpu; set int8"):
        make_pool(model, EngineConfig.of(kv_cache_dtype="fp8", kv_memory="1M"), 64)


def test_every_format_can_be_configured() -> None:
    for name in FORMATS:
        assert EngineConfig.of(kv_cache_dtype=name).memory.kv_cache_dtype == name
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        EngineConfig.of(kv_cache_dtype="int3")
