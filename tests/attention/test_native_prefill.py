"""The native prefill kernels equal the torch backend, with the same bits wherever chunks are cut."""

from __future__ import annotations

from copy import copy
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skim.attention.cpu import native_prefill
from skim.attention.cpu.native import NativeBackend
from skim.attention.cpu.native_kernel import Kernel
from skim.attention.cpu.native_prefill import PAIRS, SOURCE, TILES, PrefillKernel, kernel_for
from skim.attention.cpu.torch_backend import TorchBackend
from skim.attention.pieces import Piece, attend_causal, attend_piece
from skim.attention.plain import merge
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.memory.pool import KVPool
from skim.memory.store import LayerShape
from skim.native.build import NativeUnavailable
from tests.attention.test_native import make_full_pool

SHAPE = LayerShape(kv_heads=3, key_dim=64, value_dim=64)


def make_kernel(source: Path, rounding: Path | None = None) -> PrefillKernel:
    if source == TILES and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this processor has no tile registers (AMX)")
    if rounding == PAIRS and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this processor multiplies no pairs of bfloat16 numbers")
    try:
        return PrefillKernel(source, rounding)
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module", params=[SOURCE, TILES], ids=["floats", "tiles"])
def kernel(request: pytest.FixtureRequest) -> PrefillKernel:
    return make_kernel(request.param)


@pytest.fixture(scope="module")
def native(kernel: PrefillKernel) -> NativeBackend:
    return NativeBackend(Kernel(), None, kernel)


class Chunks:
    """A step of chunks over a random pool: (context, queries) of each, their blocks in random order."""

    def __init__(
        self,
        shape: LayerShape,
        group: int,
        sizes: list[tuple[int, int]],
        *,
        block_size: int = 16,
        slab_blocks: int = 7,
        gaps: bool = False,
    ) -> None:
        need = [-(-(context + queries) // block_size) for context, queries in sizes]
        self.pool: KVPool = make_full_pool(shape, block_size, sum(need) + 2, slab_blocks)
        order = torch.randperm(self.pool.allocated).tolist()
        self.rows = []
        for (context, queries), count in zip(sizes, need, strict=True):
            blocks, order = order[:count], order[count:]
            length = context + queries
            positions = sorted(torch.randperm(3 * length)[:length].tolist()) if gaps else None
            self.rows.append(Row(Role.PREFILL, blocks, context, queries, positions, ascending=gaps))
        tokens = sum(queries for _, queries in sizes)
        self.query = torch.randn(tokens, group * shape.kv_heads, shape.key_dim)
        self.key = torch.randn(tokens, shape.kv_heads, shape.key_dim)
        self.value = torch.randn(tokens, shape.kv_heads, shape.value_dim)

    def attend(self, backend: NativeBackend | TorchBackend, call: AttentionCall) -> torch.Tensor:
        return Step(self.pool, tuple(self.rows), backend).attend(0, self.query, self.key, self.value, call)

    def attend_in_parts(self, backend: NativeBackend, call: AttentionCall, edges: list[int]) -> torch.Tensor:
        """The same for one chunk, cut at these queries."""
        [row] = self.rows
        part, parts = copy(self), []
        for first, end in pairwise(edges):
            part.rows = [row._replace(context=row.context + first, queries=end - first)]
            part.query, part.key, part.value = (t[first:end] for t in (self.query, self.key, self.value))
            parts.append(part.attend(backend, call))
        return torch.cat(parts)


class Case(NamedTuple):
    """A random step and call."""

    kv_heads: int
    group: int
    key_dim: int
    value_dim: int | None
    block_size: int
    slab_blocks: int
    sizes: list[tuple[int, int]]
    window: int | None
    sinks: bool
    gaps: bool
    sharpness: float
    seed: int

    def make(self, rounds: bool = False) -> tuple[Chunks, AttentionCall]:
        torch.manual_seed(self.seed)
        shape = LayerShape(self.kv_heads, self.key_dim, self.value_dim or self.key_dim)
        chunks = Chunks(
            shape,
            self.group,
            self.sizes,
            block_size=self.block_size,
            slab_blocks=self.slab_blocks,
            gaps=self.gaps,
        )
        sinks = torch.randn(self.group * self.kv_heads) if self.sinks else None
        scale = self.sharpness * self.key_dim**-0.5
        return chunks, AttentionCall(scale, window=self.window, sinks=sinks, rounds=rounds)


CASES = st.builds(
    Case,
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3, 4, 7, 16, 50]),
    key_dim=st.sampled_from([8, 24, 40, 64, 128]),
    value_dim=st.sampled_from([None, None, 8, 40, 64, 72]),
    block_size=st.sampled_from([1, 4, 16]),
    slab_blocks=st.sampled_from([1, 3, 40, 10**6]),
    sizes=st.lists(
        st.tuples(
            st.sampled_from([0, 0, 1, 63, 64, 65, 200]),
            st.one_of(st.integers(1, 40), st.sampled_from([64, 65, 130])),
        ),
        min_size=1,
        max_size=4,
    ),
    window=st.sampled_from([None, None, 1, 31, 100, 10**6]),
    sinks=st.booleans(),
    gaps=st.booleans(),
    sharpness=st.sampled_from([0.5, 1.0, 3.0]),
    seed=st.integers(0, 10**6),
)


@settings(max_examples=150)
@given(case=CASES)
def test_it_equals_the_torch_backend(native: NativeBackend, case: Case) -> None:
    chunks, call = case.make()
    out = chunks.attend(native, call)
    assert torch.isfinite(out).all()
    for row, start in zip(
        chunks.rows, Step(chunks.pool, tuple(chunks.rows), native).cumulative_lengths, strict=False
    ):
        key, value = chunks.pool.gather(0, chunks.pool.runs(row.blocks, row.context, row.length))
        assert torch.equal(key, chunks.key[start : start + row.queries])
        assert torch.equal(value, chunks.value[start : start + row.queries])
    torch.testing.assert_close(out, chunks.attend(TorchBackend(), call), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("window", [None, 50])
def test_a_token_has_the_same_bits_wherever_chunks_are_cut(native: NativeBackend, window: int | None) -> None:
    call = AttentionCall(0.3, window=window, sinks=torch.randn(9))
    whole = Chunks(SHAPE, 3, [(70, 230)])
    expected = whole.attend(native, call)
    assert torch.equal(whole.attend_in_parts(native, call, [0, 2, 59, 61, 150, 230]), expected)


def test_a_row_has_the_same_bits_alone_in_a_batch_and_with_more_threads(native: NativeBackend) -> None:
    chunks = Chunks(SHAPE, 3, [(0, 300), (513, 2), (100, 31)])
    call = AttentionCall(0.125)
    threads = torch.get_num_threads()
    together = chunks.attend(native, call)
    starts = (0, 300, 302, 333)
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert torch.equal(together, chunks.attend(native, call))
    finally:
        torch.set_num_threads(threads)
    rows, tensors = chunks.rows, (chunks.query, chunks.key, chunks.value)
    for i, row in enumerate(rows):
        chunks.rows = [row]
        own = slice(starts[i], starts[i + 1])
        chunks.query, chunks.key, chunks.value = (t[own] for t in tensors)
        assert torch.equal(together[own], chunks.attend(native, call))


def test_rows_of_all_kinds_share_a_step(native: NativeBackend) -> None:
    """One query, a chunk, and a chunk whose positions do not ascend, which torch must read."""
    chunks = Chunks(SHAPE, 3, [(90, 1), (20, 60), (64, 33), (7, 12)])
    mixed = torch.randperm(97).tolist()
    chunks.rows[2] = chunks.rows[2]._replace(positions=mixed)
    for call in (AttentionCall(0.125), AttentionCall(0.125, window=17)):
        torch.testing.assert_close(chunks.attend(native, call), chunks.attend(TorchBackend(), call))


def test_layers_with_a_softcap_go_to_torch(native: NativeBackend) -> None:
    chunks = Chunks(SHAPE, 3, [(20, 60)])
    call = AttentionCall(0.125, softcap=5.0)
    assert torch.equal(chunks.attend(native, call), chunks.attend(TorchBackend(), call))


BAD = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_non_finite_values_are_kept_and_stay_in_their_row(
    native: NativeBackend, bad: float, place: str
) -> None:
    expect_non_finite_values_to_stay(native, AttentionCall(0.125), bad, place)


def expect_non_finite_values_to_stay(
    backend: NativeBackend, call: AttentionCall, bad: float, place: str
) -> None:
    torch.manual_seed(1)
    chunks = Chunks(SHAPE, 3, [(5, 50), (30, 70), (5, 50)])
    getattr(chunks, place)[60, 0, :] = bad
    out = chunks.attend(backend, call)
    assert out[:50].isfinite().all()
    assert out[120:].isfinite().all()
    assert not out[60, 0].isfinite().any()


def test_large_scores_do_not_overflow(native: NativeBackend) -> None:
    chunks = Chunks(SHAPE, 3, [(300, 90)])
    chunks.query *= 1000
    call = AttentionCall(1.0)
    torch.testing.assert_close(
        chunks.attend(native, call), chunks.attend(TorchBackend(), call), atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize("tokens", [1, 5, 64, 200])
@pytest.mark.parametrize("window", [None, 20])
def test_causal_attention_reads_tensors_in_any_layout(tokens: int, window: int | None) -> None:
    torch.manual_seed(tokens)
    query, key, value = (torch.randn(tokens, heads, 48).transpose(0, 1) for heads in (8, 2, 2))
    call = AttentionCall(0.2, window=window)
    own = Piece(key, value, (range(tokens),), own=True)
    expected = merge(attend_piece(query, own, Row(Role.PREFILL, (), 0, tokens), call))
    torch.testing.assert_close(attend_causal(query, key, value, call), expected)
    spread = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value))
    torch.testing.assert_close(attend_causal(*spread, call), expected)


def test_other_tensors_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    t = torch.randn(2, 5, 16)
    assert kernel_for(t, t, t, AttentionCall(1.0, softcap=2.0)) is None
    assert kernel_for(t.double(), t.double(), t.double(), AttentionCall(1.0)) is None
    assert kernel_for(t, t[:, :, :12], t, AttentionCall(1.0)) is None
    monkeypatch.setattr(native_prefill, "prefill_kernel", lambda: None)
    assert kernel_for(t, t, t, AttentionCall(1.0)) is None


def test_a_wrong_kernel_is_refused(kernel: PrefillKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernel.attend_causal
    native_prefill.check(kernel)
    monkeypatch.setattr(kernel, "attend_causal", lambda *given: right(*given) + 0.01)
    with pytest.raises(NativeUnavailable, match="differ"):
        native_prefill.check(kernel)
    monkeypatch.setattr(kernel, "attend_causal", lambda *given: right(*given) + 0.2 * given[3].rounds)
    with pytest.raises(NativeUnavailable, match="differ"):
        native_prefill.check(kernel)
    monkeypatch.setattr(kernel, "attend_causal", lambda *given: right(*given).nan_to_num())
    with pytest.raises(NativeUnavailable, match="NaN"):
        native_prefill.check(kernel)
