"""The CPU backends against reference attention over gathered keys, on random steps."""

from __future__ import annotations

import gc
import itertools
import random
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skim.attention.backend import Backend, choose_backend
from skim.attention.cpu.native import NativeBackend
from skim.attention.cpu.torch_backend import TorchBackend, group_runs
from skim.attention.plain import attend_plain, merge
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.memory.formats import CODED
from skim.memory.pool import KVPool
from skim.memory.runs import find_runs
from skim.memory.store import LayerShape
from tests.pools import make_pool, random_tokens, write_random


def gather(pool: KVPool, row: Row, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The row's first `length` keys and values, each slot found by itself. [kv_heads, length, dim]"""
    [store], size = pool.stores, pool.block_size
    slots = torch.tensor([row.blocks[i // size] * size + i % size for i in range(length)])
    slab, at = slots // (pool.slab_blocks * size), slots % (pool.slab_blocks * size)
    [shape] = pool.layers
    key, value = (torch.empty(length, shape.kv_heads, dim) for dim in (shape.key_dim, shape.value_dim))
    for index in slab.unique().tolist():
        here = slab == index
        key[here], value[here] = store.gather(pool.slabs[index].layers[0], at[here])
    return key.transpose(0, 1), value.transpose(0, 1)


def reference(
    row: Row, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
) -> torch.Tensor:
    """Reference: one softmax per query over the keys it may see, in float64. [queries, heads, dim]"""
    key, value = key.double(), value.double()  # [kv_heads, keys, dim]
    positions = list(row.positions if row.positions is not None else range(row.length))
    group = query.shape[1] // key.shape[0]
    key, value = key.repeat_interleave(group, dim=0), value.repeat_interleave(group, dim=0)
    out = []
    for slot, q in enumerate(query.double(), start=row.context):
        at = positions[slot]
        seen = [
            i
            for i, p in enumerate(positions[: slot + 1])
            if p <= at and (call.window is None or at - p < call.window)
        ]
        scores = torch.einsum("hd,hkd->hk", q, key[:, seen]) * call.scale
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if call.sinks is not None:
            scores = torch.cat([scores, call.sinks.double()[:, None]], dim=1)
        weights = torch.softmax(scores, dim=1)[:, : len(seen)]
        out.append(torch.einsum("hk,hkd->hd", weights, value[:, seen]))
    return torch.stack(out).float()


def random_positions(rng: random.Random, length: int, in_order: bool) -> list[int]:
    positions = sorted(rng.sample(range(3 * length), length))
    if not in_order:
        tail = positions.pop()
        rng.shuffle(positions)
        positions.append(tail)
    return positions


@pytest.fixture(scope="module", params=["torch", "native"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "torch":
        return TorchBackend()
    chosen = choose_backend(make_pool(LayerShape(1, 8, 8), 1, 1, 1))
    if not isinstance(chosen, NativeBackend):
        pytest.skip("the native kernel cannot be built here")
    return chosen


@pytest.mark.parametrize("seed", range(60))
def test_a_random_mixed_step_equals_the_reference(backend: Backend, seed: int) -> None:
    check_random_step(backend, seed, "auto")


@pytest.mark.parametrize("kv_format", CODED)
@pytest.mark.parametrize("seed", range(16))
def test_a_random_mixed_step_over_codes_equals_the_reference(
    backend: Backend, seed: int, kv_format: str
) -> None:
    """The reference reads all keys as they are stored, the chunks' own included."""
    check_random_step(backend, seed, kv_format)


def check_random_step(backend: Backend, seed: int, kv_format: str) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kv_heads = rng.choice([1, 2, 3])
    heads = kv_heads * rng.choice([1, 2, 4, 8])
    dim = rng.choice([16, 64])
    value_dim = rng.choice([dim, dim, dim, 24])
    block_size = rng.choice([1, 4, 16])
    lengths = [(rng.randint(0, 700), rng.choice([1, 1, 2, 17, 90])) for _ in range(rng.randint(1, 6))]
    need = [-(-(context + queries) // block_size) for context, queries in lengths]
    pool = make_pool(
        LayerShape(kv_heads, dim, value_dim),
        block_size,
        sum(need) + 3,
        rng.choice([3, 40, 10**6]),
        kv_format=kv_format,
    )
    order = list(range(pool.allocated))
    if rng.random() < 0.5:  # fragmented: neighbours in a sequence are not neighbours in the pool
        cuts = [order[i : i + 2] for i in range(0, len(order), 2)]
        rng.shuffle(cuts)
        order = [block for cut in cuts for block in cut]
    rows = []
    for (context, queries), count in zip(lengths, need, strict=True):
        blocks, order = order[:count], order[count:]
        kind = rng.choice(["slots", "slots", "gaps", "backfilled"])
        positions = None if kind == "slots" else random_positions(rng, context + queries, kind == "gaps")
        role = Role.DECODE if queries == 1 else Role.PREFILL
        known = kind == "gaps" and rng.random() < 0.8  # a hint: results must not depend on it
        rows.append(Row(role, blocks, context, queries, positions, known))
    call = AttentionCall(
        scale=dim**-0.5,
        window=rng.choice([None, None, 1, 30, 300]),
        softcap=rng.choice([None, None, 3.0]),
        sinks=torch.randn(heads) if rng.random() < 0.4 else None,
    )
    step = Step(pool, tuple(rows), backend)
    for row in rows:  # keys and values of earlier steps
        write_random(pool, row.blocks, row.context)
    tokens = step.cumulative_lengths[-1]
    query = torch.randn(tokens, heads, dim)
    key, value = torch.randn(tokens, kv_heads, dim), torch.randn(tokens, kv_heads, value_dim)

    out = step.attend(0, query, key, value, call)

    assert out.shape == (tokens, heads, value_dim)
    assert torch.isfinite(out).all()
    for index, row in enumerate(rows):
        span = slice(step.cumulative_lengths[index], step.cumulative_lengths[index + 1])
        keys, values = gather(pool, row, row.length)
        if kv_format == "auto":
            torch.testing.assert_close(keys[:, row.context :], key[span].transpose(0, 1))
            torch.testing.assert_close(values[:, row.context :], value[span].transpose(0, 1))
        expected = reference(row, query[span], keys, values, call)
        torch.testing.assert_close(out[span], expected, atol=2e-5, rtol=2e-5)


@given(
    gaps=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    queries=st.integers(1, 5),
    window=st.integers(1, 200),
)
def test_a_sliding_window_of_a_row_in_order_begins_at_its_first_slot(
    gaps: list[int], queries: int, window: int
) -> None:
    positions = list(itertools.accumulate(gaps))
    queries = min(queries, len(positions))
    context = len(positions) - queries
    row = Row(Role.PREFILL, [], context, queries, positions, ascending=True)
    first_query = positions[context]
    seen = [slot for slot, at in enumerate(positions) if at <= first_query and first_query - at < window]
    assert seen == list(range(row.first_slot(window), context + 1))
    assert row._replace(ascending=False).first_slot(window) == row.first_slot(None) == 0
    plain = Row(Role.PREFILL, [], context, queries)
    assert plain.first_slot(window) == plain._replace(positions=range(60), ascending=True).first_slot(window)


def test_long_single_queries_are_split_without_changing_the_result(backend: Backend) -> None:
    torch.manual_seed(0)
    pool = make_pool(LayerShape(3, 64, 64), 16, 200, 10**6)
    for context in (511, 512, 1023, 1024, 2500, 3000):
        row = Row(Role.DECODE, range(200), context, 1)
        step = Step(pool, (row,), backend)
        write_random(pool, range(200), context)
        query = torch.randn(1, 9, 64)
        out = step.attend(0, query, torch.randn(1, 3, 64), torch.randn(1, 3, 64), AttentionCall(0.125))
        expected = reference(row, query, *gather(pool, row, row.length), AttentionCall(0.125))
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_a_query_that_sees_no_key_of_a_piece_is_unaffected_by_it() -> None:
    query, key, value = torch.randn(2, 3, 8), torch.randn(2, 4, 8), torch.randn(2, 4, 8)
    nothing = attend_plain(query, key, value, AttentionCall(1.0), torch.zeros(3, 4, dtype=torch.bool))
    assert torch.equal(nothing.out, torch.zeros(1, 2, 3, 8))
    assert torch.isneginf(nothing.lse).all()
    seen = attend_plain(query, key, value, AttentionCall(1.0))
    torch.testing.assert_close(merge([nothing, seen]), seen.out[0])


def test_reads_cover_the_requested_slots_and_stay_inside_a_slab() -> None:
    rng = random.Random(1)
    for _ in range(300):
        size, per_slab = rng.choice([1, 4, 16, 64]), rng.choice([2, 5, 100])
        blocks = rng.sample(range(40), 12) if rng.random() < 0.5 else list(range(7, 19))
        end = rng.randint(1, 12 * size)
        first = rng.randint(0, end - 1)
        runs = find_runs(blocks, first, end, size, per_slab)
        assert [slot for run in runs for slot in run.slots] == list(range(first, end))
        found = {}
        for read in group_runs(runs, torch.device("cpu")):
            at = torch.arange(per_slab * size)[read.at].tolist()
            slots = [slot for part in read.slots for slot in part]
            found |= dict(zip(slots, [read.slab * per_slab * size + i for i in at], strict=True))
        assert found == {i: blocks[i // size] * size + i % size for i in range(first, end)}


def test_metadata_does_not_keep_its_step_alive(backend: Backend) -> None:
    """A step refers to its metadata. A reference back would keep the pool alive until the next collection."""
    pool = make_pool(LayerShape(3, 64, 64), 16, 8, 10**6)
    write_random(pool, range(8), 128)
    step = Step(pool, (Row(Role.PREFILL, range(4), 30, 5), Row(Role.DECODE, range(4, 8), 20, 1)), backend)
    step.attend(0, torch.randn(6, 9, 64), *random_tokens(pool, 6), AttentionCall(0.125))
    alive = weakref.ref(step)
    gc.disable()
    try:
        del step
        assert alive() is None
    finally:
        gc.enable()
