"""Summaries of full blocks equal those of the plain twin, after every kind of write."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from skim.attention.backend import Backend
from skim.attention.cpu.native import make_native
from skim.attention.cpu.torch_backend import TorchBackend
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.memory.copying import Copier
from skim.memory.formats import make_stores
from skim.memory.groups import group_layers
from skim.memory.manager import MemoryManager
from skim.memory.pool import KVPool
from skim.memory.segment import Segment, format_of
from skim.memory.store import LayerShape
from skim.memory.summary import MEAN, VARIANCE, summary_of

CPU = torch.device("cpu")
SHAPES = [LayerShape(2, 16, 16), LayerShape(2, 16, 16, window=20), LayerShape(2, 16, 16)]
FORMATS = ("auto", "int8", "int4")


def make_pool(block_size: int, kv_format: str = "auto", summaries: bool = True, blocks: int = 64) -> KVPool:
    return KVPool.of_blocks(
        SHAPES,
        blocks,
        block_size=block_size,
        dtype=torch.float32,
        device=CPU,
        slab_blocks=max(1, blocks // 3),
        kv_format=kv_format,
        summaries=summaries,
    )


def check(pool: KVPool, blocks: list[int], length: int, tolerance: float = 1e-5) -> int:
    """Compare the summaries of a table's full blocks with its keys as stored."""
    for layer in pool.summarized:
        for index in range(length // pool.block_size):
            first = index * pool.block_size
            keys, _ = pool.read(layer, pool.runs(blocks, first, first + pool.block_size))
            slab, place = divmod(blocks[index], pool.slab_blocks)
            planes = pool.slabs[slab].layers[layer].blocks
            for name, wanted in zip((MEAN, VARIANCE), summary_of(keys[None]), strict=True):
                torch.testing.assert_close(planes[name][place], wanted[0], rtol=tolerance, atol=tolerance)
    return length // pool.block_size


def forward(pool: KVPool, backend: Backend, rows: list[Row]) -> None:
    step = Step(pool, tuple(rows), backend)
    tokens = step.cumulative_lengths[-1]
    for layer, shape in enumerate(SHAPES):
        query, key, value = torch.randn(tokens, 4, 16), torch.randn(tokens, 2, 16), torch.randn(tokens, 2, 16)
        step.attend(layer, query, key, value, AttentionCall(0.25, window=shape.window))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_after_chunks_and_decode_tokens_of_a_mixed_batch(
    block_size: int, kv_format: str, native: bool
) -> None:
    torch.manual_seed(block_size)
    generator = random.Random(block_size)
    pool = make_pool(block_size, kv_format, blocks=-(-120 // block_size) * 3)
    backend = make_native(pool) if native else TorchBackend()
    manager = MemoryManager(pool)
    tables = [manager.open() for _ in range(2)]
    for _ in range(12):
        rows = []
        for table in tables:
            tokens = generator.choice([1, 1, 1, 5, 17])
            tokens = min(tokens, 110 - table.length)
            if tokens < 1:
                continue
            manager.extend(table, tokens)
            role = Role.DECODE if tokens == 1 else Role.PREFILL
            rows.append(Row(role, list(table.blocks), table.length, tokens))
            table.length += tokens
        if not rows:
            break
        forward(pool, backend, rows)
        for table in tables:
            # C may round one number of a code the other way than torch, which wrote the summary.
            check(pool, list(table.blocks), table.length, 1e-5 if kv_format == "auto" else 0.02)
    assert all(table.length // block_size for table in tables)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_after_copies_of_shared_tails_and_forks(kv_format: str) -> None:
    torch.manual_seed(0)
    pool = make_pool(4, kv_format)
    manager = MemoryManager(pool)
    first = manager.open()
    manager.extend(first, 18)
    forward(pool, TorchBackend(), [Row(Role.PREFILL, list(first.blocks), 0, 18)])
    first.length = 18
    forks = [first, *(manager.fork(first) for _ in range(2))]
    for _ in range(9):  # each copies the tail and fills it differently
        for table in forks:
            manager.extend(table, 1)
        rows = [Row(Role.DECODE, list(table.blocks), table.length, 1) for table in forks]
        forward(pool, TorchBackend(), rows)
        for table in forks:
            table.length += 1
            check(pool, list(table.blocks), table.length)
    assert len({table.blocks[4] for table in forks}) == 3


@pytest.mark.parametrize("source_format", FORMATS)
@pytest.mark.parametrize("target_format", FORMATS)
def test_after_a_restore_from_any_format(source_format: str, target_format: str) -> None:
    torch.manual_seed(0)
    source = make_pool(4, source_format, summaries=False)
    target = make_pool(5, target_format)
    table = source.allocate(8)
    forward(source, TorchBackend(), [Row(Role.PREFILL, table, 0, 30)])
    copier = Copier(source)
    assert copier.form == format_of(make_stores(SHAPES, torch.float32, source_format), torch.float32)
    assert Copier(target).form == format_of(make_stores(SHAPES, torch.float32, target_format), torch.float32)
    data = copier.read([table], 0, 30).wait()
    segment = Segment("", "", 0, array("q", range(30)), "", "", copier.form, copier.kind)
    blocks = target.allocate(6)
    for part in (range(12), range(12, 30)):  # a part ends inside a block
        Copier(target).write([blocks], part, data, segment)
    assert check(target, blocks, 30) == 6


def test_layers_with_a_sliding_window_have_no_summaries_and_still_share_blocks() -> None:
    plain, summarized = (make_stores(SHAPES, torch.bfloat16, summaries=given) for given in (False, True))
    assert [store.summarized for store in summarized] == [True, False, True]
    assert group_layers(summarized, 10**6) == group_layers(plain, 10**6)
    windowed = make_stores(SHAPES[1:2], torch.bfloat16, summaries=True)
    assert not windowed[0].summarized
    assert windowed[0].planes == plain[1].planes


def test_summaries_off_cost_nothing() -> None:
    pool, other = make_pool(16, summaries=False), make_pool(16)
    assert not pool.summarized
    extra = 2 * 2 * 16 * 4 * len(SHAPES)
    assert other.block_bytes == pool.block_bytes + extra


def test_a_variance_beyond_float16_is_kept_as_bfloat16() -> None:
    [store] = make_stores(SHAPES[:1], torch.float16, summaries=True)
    assert {plane.dtype for plane in store.planes if plane.derived} == {torch.bfloat16}
