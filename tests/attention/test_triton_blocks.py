"""Kernels that read chosen key blocks only, in decode and prefill, and the choice, against references."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.attention.test_triton import DEVICE, HALF, INTERPRETED, Case, assert_close  # isort: skip (skips this module without GPU and interpreter)

from skim.attention.blocksparse import plain as blocksparse
from skim.attention.blocksparse.policy import BLOCK, Policy
from skim.attention.blocksparse.triton_blocks import attend_sparse, block_means, block_scores, choose
from skim.attention.cpu.torch_backend import TorchBackend
from skim.attention.cuda import metadata
from skim.attention.cuda.backend import TritonBackend
from skim.attention.cuda.launch import BlockList, attend_tiles, decode_config
from skim.attention.cuda.metadata import CudaMetadata
from skim.attention.step import AttentionCall, Step
from tests.attention import oracles

if not INTERPRETED:
    pytestmark = pytest.mark.gpu

GROUP = 1 if INTERPRETED else 2  # query heads per key head in the largest cases


@pytest.fixture(params=[torch.float32, HALF], ids=["float32", "half"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


def random_list(case: Case, tiles: int, programs: int, size: int, seed: int) -> BlockList:
    """For each tile and program: some, all or none of its row's blocks."""
    rng = random.Random(seed)
    most = -(-max(row.length for row in case.rows) // size)
    blocks = torch.full(
        (tiles, programs, most), 10**6, dtype=torch.int32
    )  # entries past the count are not read
    counts = torch.zeros(tiles, programs, dtype=torch.int32)
    for tile in range(tiles):
        length = case.rows[tile].length if len(case.rows) == tiles else None
        for program in range(programs):
            if length is None:
                row = case.rows[0]
                length_here = row.context + min((tile + 1) * size, row.queries)
            else:
                length_here = length
            there = -(-length_here // size)
            kept = sorted(rng.sample(range(there), rng.choice([0, there, rng.randint(0, there)])))
            blocks[tile, program, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
            counts[tile, program] = len(kept)
    return BlockList(blocks.to(DEVICE), counts.to(DEVICE), size)


@pytest.mark.parametrize(
    ("size", "block_size", "sinks"), [(16, 16, False), (64, 16, True), (8, 32, False), (128, 1, True)]
)
def test_decode_over_chosen_blocks(size: int, block_size: int, sinks: bool, dtype: torch.dtype) -> None:
    """Every key head of a row has its own list. An empty list gives zeros."""
    case = Case([(299, 1), (0, 1), (129, 1)], group=3, block_size=block_size, dtype=dtype, seed=size)
    call = AttentionCall(0.125, sinks=torch.randn(case.heads, device=DEVICE) if sinks else None)
    known = case.write()
    chosen = random_list(case, 3, 2, size, seed=size)
    assert (chosen.counts == 0).any()
    out = torch.full_like(case.query, float("nan")).contiguous()
    config = decode_config(case.pool.layers[0], 3, dtype)
    attend_tiles(
        out,
        case.query,
        known.source(0),
        call,
        known.of(0),
        known.decode[None],
        config,
        pack=3,
        listed=chosen,
    )
    for index, row in enumerate(case.rows):
        own = slice(index, index + 1)
        listed = oracles.expand_list(chosen.blocks[own], chosen.counts[own], size, row.length)
        listed = listed[0].repeat_interleave(3, dim=0)[:, None]  # [heads, 1, keys]
        assert_close(out[own], case.expected(index, call, listed))


@pytest.mark.parametrize("context", [77] if INTERPRETED else [0, 128, 77])
def test_block_means_and_scores(context: int, dtype: torch.dtype) -> None:
    case = Case([(context, 300), (3, 5)], dim=96, dtype=dtype)
    known = case.write()
    key, query = case.storages()[0], case.query
    means = block_means(known, known.source(0), 0)
    expected = blocksparse.block_means(key[case.slots[0]].double())
    assert_close(means, expected)
    for sample in (1, 4):
        scores = block_scores(known, 0, query, means, 0.1, sample)
        twin = blocksparse.block_scores(query[:300], means.double(), context, 0.1, sample)
        for block in range(scores.shape[0]):
            seen = (context + min((block + 1) * BLOCK, 300) - 1) // BLOCK + 1
            assert_close(scores[block, :, :seen].to(dtype), twin[block, :, :seen])


@pytest.mark.parametrize("after", [0, 60, 10_000])
@pytest.mark.parametrize("alpha", [0.0, 0.3] if INTERPRETED else [0.0, 0.3, 1.0])
def test_the_choice_of_blocks(alpha: float, after: int) -> None:
    """A chunk that is followed by `after` more slots of its prompt."""
    context, queries = (700, 900) if not INTERPRETED else (500, 200)
    case = Case([(context, queries)], kv_heads=1)
    known = case.write()
    key = case.storages()[0]
    case.query += 0.5
    key[case.slots[0][BLOCK : 2 * BLOCK]] += 0.5  # the block that every query matches best
    policy, prompt = Policy(alpha, sinks=1, recent=2, dense=1), context + queries + after
    chosen = choose(known, known.source(0), 0, case.query, 1.0, policy, prompt=prompt)
    scores = block_scores(known, 0, case.query, block_means(known, known.source(0), 0), 1.0)
    kept = blocksparse.choose(scores, context, queries, policy, prompt)
    assert torch.equal(chosen.counts, kept.sum(dim=2))
    assert torch.equal(oracles.expand_list(chosen.blocks, chosen.counts, 1, kept.shape[2]), kept)
    everything = blocksparse.choose(scores, context, queries, replace(policy, alpha=0.0), prompt)
    assert torch.equal(kept, everything) == (alpha == 0.0)
    assert torch.equal(kept[-1], everything[-1]) == (alpha == 0.0 or after < BLOCK)
    assert kept[..., 1].all()


SPARSE = (
    [(77, 200, 64), (301, 1, 96), (150, 30, 8)]
    if INTERPRETED
    else [(0, 300, 128), (128, 256, 64), (77, 200, 96), (301, 1, 256), (150, 30, 8)]
)


def check_sparse(case: Case, known: CudaMetadata, chosen: BlockList) -> None:
    """Compare `attend_sparse` with the reference, for a case with one row."""
    [row] = case.rows
    call = AttentionCall(0.125)
    out = torch.full_like(case.query, float("nan")).contiguous()
    attend_sparse(out, case.query, known, known.source(0), 0, call, chosen)
    listed = oracles.expand_list(chosen.blocks, chosen.counts, BLOCK, row.length)
    listed = listed.repeat_interleave(BLOCK, dim=0)[: row.queries].transpose(0, 1)  # [heads, queries, keys]
    assert_close(out, case.expected(0, call, listed))


@pytest.mark.parametrize("in_one_piece", [False, True])
@pytest.mark.parametrize(("context", "queries", "dim"), SPARSE)
def test_sparse_prefill_over_random_blocks(
    context: int, queries: int, dim: int, in_one_piece: bool, dtype: torch.dtype
) -> None:
    case = Case([(context, queries)], dim=dim, dtype=dtype, seed=context, in_one_piece=in_one_piece)
    known = case.write()
    chosen = random_list(case, -(-queries // BLOCK), case.heads, BLOCK, seed=context)
    check_sparse(case, known, chosen)


@pytest.mark.parametrize("in_one_piece", [False, True])
def test_splits_of_a_short_chunk_end_at_block_edges(
    in_one_piece: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "processors", lambda _: 8)
    context, queries = (700, 300) if not INTERPRETED else (500, 140)
    case = Case([(context, queries)], group=GROUP, dtype=dtype, in_one_piece=in_one_piece)
    known = case.write()
    assert known.tiles([0], BLOCK).splits > 1
    tiles, most = -(-queries // BLOCK), -(-(context + queries) // BLOCK)
    every_other = torch.arange(0, most, 2, dtype=torch.int32, device=DEVICE)
    counts = [(context + min((tile + 1) * BLOCK, queries) - 1) // BLOCK // 2 + 1 for tile in range(tiles)]
    chosen = BlockList(
        every_other.expand(tiles, case.heads, -1).contiguous(),
        torch.tensor(counts, dtype=torch.int32, device=DEVICE)[:, None].repeat(1, case.heads),
        BLOCK,
    )
    check_sparse(case, known, chosen)


@pytest.mark.parametrize("context", [77] if INTERPRETED else [0, 77])
def test_sparse_prefill_with_every_block_is_dense(context: int, dtype: torch.dtype) -> None:
    case = Case([(9, 1), (context, 150 if INTERPRETED else 300)], dtype=dtype)
    call = AttentionCall(0.125, softcap=4.0, sinks=torch.randn(case.heads, device=DEVICE))
    known = case.write()
    chosen = choose(known, known.source(0), 1, case.query, 0.125, Policy(0.0), prompt=1000)
    out = torch.full_like(case.query, float("nan")).contiguous()
    attend_sparse(out, case.query, known, known.source(0), 1, call, chosen)
    assert_close(out[1:], case.expected(1, call))
    assert out[0].isnan().all()  # another row: not written


# -- the mode


def mixed(seed: int, dtype: torch.dtype, window: int | None = None) -> Case:
    """Sparse rows, with and without gaps, beside rows that read everything."""
    shapes = [(420, 150), (9, 1), (0, 520), (360, 60), (40, 60)]
    kinds = ["gaps", "slots", "slots", "backfilled", "slots"]
    case = Case(shapes, group=GROUP, dim=16, dtype=dtype, seed=seed, kinds=kinds, window=window)
    policy = Policy(0.6, sinks=1, recent=2, dense=1)
    case.rows = [
        row._replace(policy=policy if row.queries > 1 else None, prompt=row.length + after)
        for row, after in zip(case.rows, [700, 0, 0, 700, 0], strict=True)
    ]
    case.step = Step(case.pool, tuple(case.rows), TritonBackend())
    case.query += 1
    case.storages()[0][case.slots[0][BLOCK : 2 * BLOCK]] += 1  # block 1 scores high, so block 2 is skipped
    case.key[case.span(2)][:BLOCK] += 1  # block 0 scores high, so block 1 is skipped
    return case


def test_the_mode_equals_the_torch_backend(dtype: torch.dtype) -> None:
    case, call = mixed(1, dtype), AttentionCall(0.25, softcap=4.0 if dtype == HALF else None)
    out = case.attend(call)
    plain = Step(case.pool, tuple(case.rows), TorchBackend())
    expected = plain.attend(0, case.query, case.key, case.value, call)
    assert_close(out, expected.double())
    ours, theirs = case.step.backend.counter.stats(), plain.backend.counter.stats()
    assert ours == theirs
    assert ours.chunks == {"sparse": 2, "order": 1, "short": 1}
    assert ours.read < ours.visible
    dense = Step(case.pool, tuple(row._replace(policy=None) for row in case.rows), TorchBackend())
    everything = dense.attend(0, case.query, case.key, case.value, call)
    for index, row in enumerate(case.rows):
        span = case.span(index)
        chosen = index in (0, 2)
        assert torch.allclose(out[span], everything[span], rtol=0.05, atol=0.02) != chosen, (index, row)


def test_the_mode_with_sliding_windows_is_dense() -> None:
    case, call = mixed(2, torch.float32, window=70), AttentionCall(0.25, window=70)
    case.check(case.attend(call), call)
    stats = case.step.backend.counter.stats()
    assert (stats.chunks, stats.visible) == ({"window": 4}, 0)


def test_the_mode_with_every_block_is_dense(dtype: torch.dtype) -> None:
    case = mixed(3, dtype)
    case.rows = [row._replace(policy=row.policy and replace(row.policy, alpha=0.0)) for row in case.rows]
    case.step = Step(case.pool, tuple(case.rows), TritonBackend())
    call = AttentionCall(0.25, sinks=torch.randn(case.heads, device=DEVICE))
    case.check(case.attend(call), call)
    stats = case.step.backend.counter.stats()
    assert stats.chunks["sparse"] == 2
    assert stats.read == stats.visible
