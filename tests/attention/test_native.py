"""The native decode kernel equals the torch backend, or torch is used and the log says why."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skim.attention.backend import choose_backend
from skim.attention.cpu import native_kernel
from skim.attention.cpu.native import NativeBackend, check
from skim.attention.cpu.native_kernel import Kernel
from skim.attention.cpu.torch_backend import TorchBackend
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.memory.pool import KVPool
from skim.memory.store import LayerShape
from skim.native import build as native_build
from skim.native.build import NativeUnavailable
from tests import tiny
from tests.models import test_parity
from tests.pools import make_pool, write_random

SHAPE = LayerShape(kv_heads=3, key_dim=64, value_dim=64)


def make_full_pool(
    shape: LayerShape,
    block_size: int,
    blocks: int,
    slab_blocks: int,
    dtype: torch.dtype = torch.float32,
    kv_format: str = "auto",
) -> KVPool:
    """A full pool with random keys and values."""
    pool = make_pool(shape, block_size, blocks, slab_blocks, dtype, kv_format=kv_format)
    write_random(pool, range(blocks), blocks * block_size)
    return pool


@pytest.fixture(scope="module")
def native() -> NativeBackend:
    try:
        return NativeBackend(Kernel())
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def empty_cache(native: NativeBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache for one test. Skips if the kernel cannot be built."""
    monkeypatch.setenv("SKIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "native"


class Layer:
    """One decode step over a random pool: rows of the given lengths, their blocks in random order."""

    def __init__(
        self,
        shape: LayerShape,
        group: int,
        lengths: list[int],
        *,
        block_size: int = 16,
        slab_blocks: int = 7,
        gaps: bool = False,
        kv_format: str = "auto",
    ) -> None:
        need = [-(-length // block_size) for length in lengths]
        self.pool = make_full_pool(shape, block_size, sum(need) + 2, slab_blocks, kv_format=kv_format)
        order = torch.randperm(self.pool.allocated).tolist()
        self.rows = []
        for length, count in zip(lengths, need, strict=True):
            blocks, order = order[:count], order[count:]
            positions = sorted(torch.randperm(3 * length)[:length].tolist()) if gaps else None
            self.rows.append(Row(Role.DECODE, blocks, length - 1, 1, positions, ascending=gaps))
        heads = group * shape.kv_heads
        self.query = torch.randn(len(lengths), heads, shape.key_dim)
        self.key = torch.randn(len(lengths), shape.kv_heads, shape.key_dim)
        self.value = torch.randn(len(lengths), shape.kv_heads, shape.value_dim)

    def attend(self, backend: Any, call: AttentionCall) -> torch.Tensor:
        return Step(self.pool, tuple(self.rows), backend).attend(0, self.query, self.key, self.value, call)

    def slot(self, row: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the key and the value in one slot of a row. [kv_heads, dim]"""
        key, value = self.pool.gather(0, self.pool.runs(self.rows[row].blocks, index, index + 1))
        return key[0], value[0]


@settings(max_examples=150)
@given(
    kv_heads=st.sampled_from([1, 2, 3, 8]),
    group=st.integers(1, 16),
    key_dim=st.sampled_from([32, 40, 64, 72, 80, 96, 128, 192, 256]),
    value_dim=st.sampled_from([None, None, None, 64, 128]),
    block_size=st.sampled_from([1, 4, 16]),
    slab_blocks=st.sampled_from([1, 3, 40, 10**6]),
    lengths=st.lists(
        st.one_of(st.integers(1, 70), st.sampled_from([255, 256, 257, 600])), min_size=1, max_size=5
    ),
    window=st.sampled_from([None, None, 1, 31, 256, 10**6]),
    sinks=st.booleans(),
    gaps=st.booleans(),
    sharpness=st.sampled_from([0.5, 1.0, 2.0]),
    seed=st.integers(0, 10**6),
)
def test_it_equals_the_torch_backend(
    native: NativeBackend,
    kv_heads: int,
    group: int,
    key_dim: int,
    value_dim: int | None,
    block_size: int,
    slab_blocks: int,
    lengths: list[int],
    window: int | None,
    sinks: bool,
    gaps: bool,
    sharpness: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    shape = LayerShape(kv_heads, key_dim, value_dim or key_dim)
    layer = Layer(shape, group, lengths, block_size=block_size, slab_blocks=slab_blocks, gaps=gaps)
    call = AttentionCall(
        sharpness * key_dim**-0.5, window=window, sinks=torch.randn(group * kv_heads) if sinks else None
    )
    out = layer.attend(native, call)
    for index, row in enumerate(layer.rows):
        key, value = layer.slot(index, row.context)
        assert torch.equal(key, layer.key[index])
        assert torch.equal(value, layer.value[index])
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out, layer.attend(TorchBackend(), call), atol=2e-5, rtol=2e-5)


def test_rows_longer_than_the_most_chunks(native: NativeBackend) -> None:
    layer = Layer(LayerShape(1, 8, 8), 2, [16 * 1024 + 5, 40_000])
    call = AttentionCall(0.3)
    torch.testing.assert_close(layer.attend(native, call), layer.attend(TorchBackend(), call))


def test_large_scores_do_not_overflow(native: NativeBackend) -> None:
    layer = Layer(SHAPE, 3, [900])
    layer.query *= 1000
    out = layer.attend(native, AttentionCall(1.0))
    torch.testing.assert_close(out, layer.attend(TorchBackend(), AttentionCall(1.0)), atol=1e-3, rtol=1e-3)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_row_has_the_same_bits_alone_in_a_batch_and_with_more_threads(
    native: NativeBackend, two_threads: None
) -> None:
    layer = Layer(SHAPE, 3, [2000, 1, 700, 256])
    call = AttentionCall(0.125, sinks=torch.randn(9))
    together = layer.attend(native, call)
    torch.set_num_threads(1)
    assert torch.equal(together, layer.attend(native, call))
    rows, tensors = layer.rows, (layer.query, layer.key, layer.value)
    for i, row in enumerate(rows):
        layer.rows = [row]
        layer.query, layer.key, layer.value = (t[i : i + 1] for t in tensors)
        assert torch.equal(together[i : i + 1], layer.attend(native, call))


def test_a_row_has_the_same_bits_wherever_its_blocks_lie(native: NativeBackend) -> None:
    layer = Layer(SHAPE, 3, [700], slab_blocks=10**6)
    moved = Layer(SHAPE, 3, [700], slab_blocks=5)
    moved.query, moved.key, moved.value = layer.query, layer.key, layer.value
    for i in range(700):
        for here, there in zip(layer.slot(0, i), moved.slot(0, i), strict=True):
            there.copy_(here)
    assert torch.equal(layer.attend(native, AttentionCall(1.0)), moved.attend(native, AttentionCall(1.0)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", ["query", "key", "value", "old key", "old value"])
@pytest.mark.parametrize("length", [1, 3, 700])
def test_non_finite_values_are_kept_and_stay_in_their_row(
    native: NativeBackend, bad: float, place: str, length: int
) -> None:
    torch.manual_seed(1)
    layer = Layer(SHAPE, 3, [50, length, 50])
    if place.startswith("old"):
        layer.slot(1, 0)[place == "old value"][1, 5] = bad  # overwritten if the row has one key
    else:
        getattr(layer, place)[1, 1, 5] = bad
    out = layer.attend(native, AttentionCall(0.125))
    keys, values = (
        torch.stack(side) for side in zip(*(layer.slot(1, i) for i in range(length)), strict=True)
    )
    scores = torch.einsum("kgd,nkd->kgn", layer.query[1].view(3, 3, 64), keys) * 0.125
    expected = torch.einsum("kgn,nkd->kgd", torch.softmax(scores, dim=-1), values).view(9, 64)
    torch.testing.assert_close(out[1], expected, equal_nan=True)
    assert expected.isfinite().all() == (place.startswith("old") and length == 1) or bad < 0
    assert out[0].isfinite().all()
    assert out[2].isfinite().all()


def test_non_contiguous_tensors(native: NativeBackend) -> None:
    """[tokens, heads, dim] views of [heads, tokens, dim] (transformers' layout); a strided last dimension."""
    layer = Layer(SHAPE, 3, [100, 20, 300])
    call = AttentionCall(0.125)
    expected = layer.attend(native, call)
    for name in ("query", "key", "value"):
        tensor = getattr(layer, name)
        setattr(layer, name, tensor.transpose(0, 1).contiguous().transpose(0, 1))
    assert torch.equal(layer.attend(native, call), expected)
    for name in ("query", "key", "value"):
        tensor = getattr(layer, name)
        setattr(layer, name, torch.stack([tensor, tensor], dim=-1)[..., 0])
    assert torch.equal(layer.attend(native, call), expected)


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_every_family_decodes_like_eager_attention(
    native: NativeBackend, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_parity, "TorchBackend", lambda: native)
    case = test_parity.Case(tiny.build(family), tiny.build(family), longest=150)
    test_parity.test_decode(case)
    test_parity.test_mixed_batch_of_prefill_chunks_and_decode_rows(case)


# -- choosing and falling back


def test_only_a_float32_pool_on_the_cpu_gets_the_kernel(native: NativeBackend) -> None:
    assert isinstance(choose_backend(make_full_pool(SHAPE, 16, 2, 2)), NativeBackend)
    assert isinstance(choose_backend(make_full_pool(SHAPE, 16, 2, 2, torch.bfloat16)), TorchBackend)
    assert isinstance(choose_backend(make_full_pool(LayerShape(1, 6, 6), 16, 2, 2)), TorchBackend)


def assert_torch_is_chosen(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    pool = make_full_pool(SHAPE, 16, 2, 2)
    with caplog.at_level(logging.INFO, logger="skim"):
        backend = choose_backend(pool)
    assert isinstance(backend, TorchBackend)
    [record] = [r for r in caplog.records if "native kernel is not available" in r.getMessage()]
    assert record.levelno == logging.INFO
    assert reason in record.getMessage()
    row = Row(Role.DECODE, [0, 1], 20, 1)
    out = Step(pool, (row,), backend).attend(
        0, torch.randn(1, 9, 64), torch.randn(1, 3, 64), torch.randn(1, 3, 64), AttentionCall(0.125)
    )
    assert out.isfinite().all()


def test_without_a_compiler_torch_is_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert_torch_is_chosen(caplog, "no C compiler found (cc, gcc or clang)")


def test_without_torchs_openmp_runtime_torch_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    maps = tmp_path / "maps"
    maps.write_text("")
    monkeypatch.setattr(native_build, "MAPS", maps)
    assert_torch_is_chosen(caplog, "found: none")


def test_a_cache_that_cannot_be_written(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SKIM_CACHE", os.devnull)
    assert_torch_is_chosen(caplog, "cannot write /dev/null/native")


def test_a_kernel_that_is_wrong_is_not_used(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = tmp_path / "wrong.c"
    wrong.write_text(native_kernel.SOURCE.read_text().replace("* LOG2_E", "* 1.44f"))
    monkeypatch.setattr(native_kernel, "SOURCE", wrong)
    assert_torch_is_chosen(caplog, "differ")


def test_a_kernel_that_loses_a_nan_is_not_used() -> None:
    class LosesNaN(TorchBackend):
        def attend(self, *arguments: Any) -> torch.Tensor:
            return super().attend(*arguments).nan_to_num()

    with pytest.raises(NativeUnavailable, match="loses a NaN"):
        check(LosesNaN(), SHAPE)


def test_importing_builds_nothing(empty_cache: Path) -> None:
    subprocess.run([sys.executable, "-c", "import skim.attention.cpu.native"], check=True)
    assert not empty_cache.exists()
