"""The Triton kernels against reference attention in float64, on random steps.

On a CUDA device they are compiled (marker `gpu`). Without one, `test_triton_interpreted.py` runs this file in
a separate process under Triton's interpreter, on smaller shapes.
"""

# ruff: noqa: E402

from __future__ import annotations

import os
import random

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device or Triton's interpreter", allow_module_level=True)

from skim.attention.backend import choose_backend
from skim.attention.cpu.torch_backend import TorchBackend
from skim.attention.cuda import dense as triton_dense
from skim.attention.cuda import metadata
from skim.attention.cuda.backend import TritonBackend
from skim.attention.cuda.captured import CapturedTables
from skim.attention.cuda.metadata import (
    LEAST_CHUNK_SPLIT,
    LEAST_SPLIT,
    CudaMetadata,
    Tables,
)
from skim.attention.cuda.write import write_keys_values
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.memory.pool import KVPool
from skim.memory.store import LayerShape, PlainStore
from tests import tiny
from tests.attention import oracles
from tests.models import test_parity
from tests.pools import make_pool

if not INTERPRETED:
    pytestmark = pytest.mark.gpu

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter cannot multiply bfloat16
BOUNDS = {
    torch.float32: 1e-5,
    torch.float16: 3e-3,
    torch.bfloat16: 1e-2,
}  # relative error of the whole result; twice that for each vector


class Case:
    """A step over one layer with random contents."""

    def __init__(
        self,
        rows: list[tuple[int, int]],  # context, queries
        *,
        kv_heads: int = 2,
        group: int = 2,
        dim: int = 64,
        value_dim: int | None = None,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        kinds: list[str] | None = None,  # kinds of positions: see `positions`
        in_one_piece: bool = False,
        window: int | None = None,
    ) -> None:
        torch.manual_seed(seed)
        rng = random.Random(seed)
        shape = LayerShape(kv_heads, dim, value_dim or dim, window)
        need = [-(-(context + queries) // block_size) for context, queries in rows]
        self.pool = make_pool(shape, block_size, sum(need) + 2, sum(need) + 2, dtype, DEVICE)
        order = list(range(1, sum(need) + 1))
        if not in_one_piece:
            rng.shuffle(order)
        self.rows: list[Row] = []
        for index, ((context, queries), count) in enumerate(zip(rows, need, strict=True)):
            blocks, order = order[:count], order[count:]
            kind = kinds[index] if kinds else "slots"
            last = kind != "last chunk" and queries == 1  # the last chunk of a prompt may have one token
            role = Role.DECODE if last else Role.PREFILL
            own = positions(rng, context + queries, kind)
            known = kind in ("gaps", "last chunk")
            self.rows.append(Row(role, blocks, context, queries, own, known))
        self.step = Step(self.pool, tuple(self.rows), TritonBackend())
        self.slots = [self.places(row) for row in self.rows]
        for row, places in zip(self.rows, self.slots, strict=True):
            for storage in self.storages():
                past = storage[places[: row.context]]
                storage[places[: row.context]] = torch.randn(past.shape, device=DEVICE).to(dtype)
        tokens = self.step.cumulative_lengths[-1]
        self.heads = heads = kv_heads * group

        def new(heads: int, dim: int) -> torch.Tensor:
            """A random tensor in transformers' layout: heads before tokens."""
            return torch.randn(heads, tokens, dim, device=DEVICE).to(dtype).transpose(0, 1)

        self.query, self.key = new(heads, dim), new(kv_heads, dim)
        self.value = new(kv_heads, value_dim or dim)

    def storages(self) -> tuple[torch.Tensor, torch.Tensor]:
        slots = self.pool.planes(0).slots
        return slots[PlainStore.KEY], slots[PlainStore.VALUE]

    def places(self, row: Row) -> torch.Tensor:
        size = self.pool.block_size
        return torch.tensor(
            [row.blocks[i // size] * size + i % size for i in range(row.length)], device=DEVICE
        )

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return self.step.attend(0, self.query, self.key, self.value, call)

    def write(self) -> CudaMetadata:
        """Write the new keys and values, without attention."""
        known: CudaMetadata = self.step.metadata
        write_keys_values(self.key, self.value, *self.storages(), known.of(0).slot_mapping)
        return known

    def span(self, index: int) -> slice:
        return slice(self.step.cumulative_lengths[index], self.step.cumulative_lengths[index + 1])

    def seen(self, index: int, window: int | None) -> torch.Tensor:
        """Mask of the keys that each query may read. [queries, keys]"""
        row = self.rows[index]
        at = torch.tensor(row.positions[: row.length] if row.positions is not None else range(row.length))
        distance = at[row.context :, None] - at[None, :]
        slots = torch.arange(row.length)
        seen = (slots[None, :] <= slots[row.context :, None]) & (distance >= 0)
        return (seen if window is None else seen & (distance < window)).to(DEVICE)

    def expected(self, index: int, call: AttentionCall, listed: torch.Tensor | None = None) -> torch.Tensor:
        """Reference result of row `index`. `listed` [heads, queries, keys] restricts the keys."""
        keys, values = (storage[self.slots[index]] for storage in self.storages())
        seen = self.seen(index, call.window).expand(self.heads, -1, -1)
        if listed is not None:
            seen = seen & listed
        return oracles.attend_listed(self.query[self.span(index)], keys, values, call, seen)

    def check(self, out: torch.Tensor, call: AttentionCall) -> None:
        for index, row in enumerate(self.rows):
            places = self.slots[index][row.context :]
            for storage, new in zip(self.storages(), (self.key, self.value), strict=True):
                assert torch.equal(storage[places], new[self.span(index)])
            assert_close(out[self.span(index)], self.expected(index, call))


KINDS = ["slots", "slots", "gaps", "unknown gaps", "last chunk", "backfilled"]


def positions(rng: random.Random, length: int, kind: str) -> list[int] | None:
    """Positions of a row. Only `backfilled` is out of order; `unknown gaps` are not declared ascending."""
    if kind == "slots":
        return None
    found = sorted(rng.sample(range(3 * length), length))
    if kind == "backfilled":
        last = found.pop()
        rng.shuffle(found)
        found.append(last)
    return found


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that `out` is finite and close by the norm, as a whole and for every vector."""
    assert out.shape == expected.shape
    assert torch.isfinite(out).all()
    bound = BOUNDS[out.dtype]
    error = (out.double() - expected).norm(dim=-1)
    size = expected.norm(dim=-1)
    assert error.norm() <= bound * size.norm()
    assert (error <= 2 * bound * size.clamp_min(1e-3 * size.max())).all()


@pytest.fixture(params=[torch.float32, HALF], ids=["float32", "half"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(8 if INTERPRETED else 40))
def test_a_random_mixed_step(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    if INTERPRETED:  # it has one processor and would not split rows
        count = rng.choice([1, 132])
        monkeypatch.setattr(metadata, "processors", lambda _: count)
    longest = 90 if INTERPRETED else 2000
    rows = [
        (rng.choice([0, rng.randint(0, longest)]), rng.choice([1, 1, 2, 7, 33, longest // 2]))
        for _ in range(rng.randint(1, 4))
    ]
    dim = rng.choice([16, 64, 96, 128, 256])
    window = rng.choice([None, None, 1, 30, 300])
    case = Case(
        rows,
        kv_heads=rng.choice([1, 2, 3]),
        group=rng.choice([1, 2, 3, 4, 7, 16]),
        dim=dim,
        value_dim=rng.choice([dim, dim, 64, 24]),
        block_size=rng.choice([1, 4, 16, 64]),
        dtype=rng.choice([torch.float32, HALF]),
        seed=seed,
        kinds=[rng.choice(KINDS) for _ in rows],
        window=window,
    )
    call = AttentionCall(
        scale=dim**-0.5,
        window=window,
        softcap=rng.choice([None, None, 3.0]),
        sinks=torch.randn(case.heads, device=DEVICE) if rng.random() < 0.4 else None,
    )
    case.check(case.attend(call), call)


@pytest.mark.parametrize("group", range(1, 17))
def test_every_number_of_query_heads_per_key_head(group: int) -> None:
    case = Case([(70, 1), (0, 1), (30, 3)], group=group, dtype=HALF, seed=group)
    call = AttentionCall(0.125, sinks=torch.randn(case.heads, device=DEVICE))
    case.check(case.attend(call), call)


@pytest.mark.parametrize(("group", "dim"), [(33, 256), (71, 64)])
def test_more_query_heads_per_key_head_than_a_tile_has(group: int, dim: int) -> None:
    case = Case([(5, 3), (20, 1)], kv_heads=1, group=group, dim=dim, dtype=torch.float32)
    call = AttentionCall(0.1)
    case.check(case.attend(call), call)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_head_sizes(dim: int, dtype: torch.dtype) -> None:
    rows = [(0, 37), (129, 1), (65, 18), (0, 1)] if INTERPRETED else [(0, 999), (3001, 1), (70, 131), (0, 1)]
    case = Case(rows, dim=dim, dtype=dtype)
    call = AttentionCall(dim**-0.5)
    case.check(case.attend(call), call)


@pytest.mark.parametrize("window", [None, 300])
def test_a_long_row_is_split(window: int | None, dtype: torch.dtype) -> None:
    lengths = [5 * LEAST_SPLIT + 5, LEAST_SPLIT, LEAST_SPLIT + 1, 1]
    if not INTERPRETED:
        lengths[0] = 40_001
    case = Case([(length - 1, 1) for length in lengths], kv_heads=1, group=4, dtype=dtype, window=window)
    call = AttentionCall(0.125, window=window, sinks=torch.randn(case.heads, device=DEVICE))
    assert case.step.metadata.decode[window].splits_within(lengths[0] if window is None else window) > 2
    case.check(case.attend(call), call)


def test_a_short_chunk_after_a_long_prefix_is_split(dtype: torch.dtype) -> None:
    context = 2 * LEAST_CHUNK_SPLIT + 77 if INTERPRETED else 30_011
    case = Case([(context, 3)], kv_heads=1, dtype=dtype, kinds=["backfilled" if INTERPRETED else "slots"])
    call = AttentionCall(0.125)
    if INTERPRETED:  # it runs one program at a time and would not split
        case.step.metadata._processors = 100
    case.check(case.attend(call), call)
    [tiles] = case.step.metadata._tiles.values()
    assert tiles.splits > 1


@pytest.mark.parametrize("window", [None, 150])
def test_tables_are_refilled_in_place(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph reads other rows at the same addresses. Padding is neither written nor read."""
    monkeypatch.setattr(metadata, "processors", lambda _: 132)  # so that the interpreter splits like a GPU
    case = Case([(299, 1), (40, 1), (7, 1)], kinds=["gaps", "slots", "gaps"], window=window)
    call = AttentionCall(0.125, window=window)
    tables = Tables(case.pool, rows=4, tokens=4, blocks=64)
    pad = torch.zeros(4 - 3, case.heads, 64, device=DEVICE)
    query = torch.cat([case.query, pad])
    key, value = (torch.cat([t, pad[:, :2]]) for t in (case.key, case.value))
    before = [storage.clone() for storage in case.storages()]
    tables.fill(case.step)
    assert tables.splits == 5
    with pytest.raises(AssertionError, match="4 splits, but 5 are needed"):
        CudaMetadata(case.step, tables, splits=4)
    captured = case.step.metadata = CudaMetadata(case.step, tables, splits=8)

    def run() -> torch.Tensor:
        return case.step.attend(0, query, key, value, call)

    if INTERPRETED:
        out = run()
    else:
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        for storage, was in zip(case.storages(), before, strict=True):
            storage.copy_(was)
        graph.replay()
    case.check(out[:3], call)
    written = torch.cat([places[-1:] for places in case.slots])
    for storage, was in zip(case.storages(), before, strict=True):
        others = torch.ones(len(storage), dtype=torch.bool, device=DEVICE)
        others[written] = False
        assert torch.equal(storage[others].nan_to_num(7.0), was[others].nan_to_num(7.0))

    # Two of the same sequences, one token later.
    later = [
        row._replace(
            context=row.context + 1, positions=row.positions and [*row.positions, row.positions[-1] + 3]
        )
        for row in case.rows[:2]
    ]
    case.rows = later
    case.step = Step(case.pool, tuple(later), case.step.backend)
    case.step.metadata = captured
    case.slots = [case.places(row) for row in later]
    tables.fill(case.step)
    out = run() if INTERPRETED else (graph.replay(), out)[1]
    case.key, case.value, case.query = key, value, query
    case.check(out[:2], call)


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("processors", [2, 132])  # without splits, and with
def test_a_captured_chunk_serves_chunks_of_other_lengths(
    window: int | None, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tiles, padding and buffers for every length. Padding is neither written nor read."""
    monkeypatch.setattr(metadata, "processors", lambda _: processors)
    call = AttentionCall(0.125, window=window)
    case = Case([(700, 60)], kv_heads=1 if INTERPRETED else 2, window=window)
    pool, block_table = case.pool, case.rows[0].blocks
    captured = CapturedTables(pool, rows=1, slots=1000, queries=64)
    padded = case.rows[0]._replace(queries=64)
    tensors = {
        heads: torch.empty(64, heads, 64, device=DEVICE) for heads in (case.heads, pool.layers[0].kv_heads)
    }
    query, key = tensors.values()
    value = torch.empty_like(key)
    known: CudaMetadata | None = None
    graph = None
    for context, queries in ((700, 60), (0, 64), (300, 1), (699, 17)):
        row = case.rows[0]._replace(context=context, queries=queries)
        case.rows = [row]
        step = case.step = Step(pool, (row,), TritonBackend())
        case.slots = [case.places(row)]
        assert captured.refill(step) is None
        for tensor in (query, key, value):
            tensor.copy_(torch.randn(tensor.shape))
            tensor[queries:] = float("nan")
        before = [storage.clone() for storage in case.storages()]
        if known is None:
            whole = Step(pool, (padded,), step.backend)
            known = whole.metadata = captured.metadata(whole, None)
            out = whole.attend(0, query, key, value, call)
            if not INTERPRETED:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    out = whole.attend(0, query, key, value, call)
                graph.replay()
        elif graph is not None:
            graph.replay()
        else:
            out = whole.attend(0, query, key, value, call)
        case.query, case.key, case.value = query[:queries], key[:queries], value[:queries]
        case.check(out[:queries], call)
        written = case.slots[0][context:]
        for storage, was in zip(case.storages(), before, strict=True):
            others = torch.ones(len(storage), dtype=torch.bool, device=DEVICE)
            others[written] = False
            assert torch.equal(storage[others].nan_to_num(7.0), was[others].nan_to_num(7.0))
    assert block_table == case.rows[0].blocks


def test_a_graph_for_coarsely_split_windows_serves_rows_that_need_more_splits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Captured for rows with coarse splits, run for one with finer and therefore more splits."""
    monkeypatch.setattr(metadata, "processors", lambda _: 4)
    case = Case([(599, 1)] * 4, kv_heads=1, window=200)
    call = AttentionCall(0.125, window=200)
    tables = Tables(case.pool, rows=4, tokens=4, blocks=200)
    tables.fill(case.step)
    coarse = tables.split_size[200]
    captured = case.step.metadata = CudaMetadata(case.step, tables, splits=4)
    case.check(case.attend(call), call)
    row = case.rows[0]._replace(context=229)
    case.step = Step(case.pool, (row,), case.step.backend)
    case.step.metadata = captured
    tables.fill(case.step)
    assert tables.split_size[200] < coarse
    out = case.attend(call)
    case.rows, case.slots = [row], [case.places(row)]
    case.query, case.key, case.value = case.query[:1], case.key[:1], case.value[:1]
    case.check(out[:1], call)


@pytest.mark.parametrize("beside", [[], [(30, 5)]])
def test_a_row_out_of_order_is_read_whole_despite_a_sliding_window(
    beside: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "processors", lambda _: 2)
    kinds = ["backfilled", "gaps", "gaps"][: 2 + len(beside)]
    case = Case([(503, 1), (400, 1), *beside], kinds=kinds, window=100)
    call = AttentionCall(0.125, window=100)
    case.check(case.attend(call), call)


def test_a_sliding_window_that_the_pool_does_not_know_is_an_error() -> None:
    case = Case([(30, 1)], window=16)
    with pytest.raises(AssertionError, match="layer 0 has a sliding window of 8, not 16"):
        case.attend(AttentionCall(0.125, window=8))


def test_a_nan_is_kept_and_stays_in_its_row() -> None:
    case = Case([(299, 1), (20, 1), (0, 9)], group=1)
    case.query[0, 0, 3] = float("nan")
    out = case.attend(AttentionCall(0.125))
    assert out[0, 0].isnan().all()
    assert out[0, 1].isfinite().all()
    assert out[1:].isfinite().all()
    case = Case([(600, 1), (20, 1)], group=1)
    case.storages()[0][case.slots[0][555]] = float("nan")
    out = case.attend(AttentionCall(0.125))
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_large_scores_do_not_overflow() -> None:
    case = Case([(299, 1), (5, 40)])
    call = AttentionCall(30.0)
    out = case.attend(call)
    assert torch.isfinite(out).all()
    for index in range(2):
        torch.testing.assert_close(
            out[case.span(index)].double(), case.expected(index, call), atol=1e-2, rtol=1e-2
        )


@pytest.fixture
def low_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make 20 queries a long chunk under the interpreter, which is slow."""
    if INTERPRETED:
        monkeypatch.setattr(triton_dense, "LEAST_QUERIES", 20)
        monkeypatch.setattr(triton_dense, "PREFIX_STEP", 32)


@pytest.mark.usefixtures("low_thresholds")
@pytest.mark.parametrize("in_one_piece", [True, False])
def test_long_chunks_use_torch_for_their_dense_parts(
    in_one_piece: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    rows = [(0, 33), (50, 1), (71, 25), (31, 24)] if INTERPRETED else [(0, 4100), (50, 1), (9001, 4097)]
    case = Case(rows, group=4, dim=64, dtype=dtype, in_one_piece=in_one_piece)
    asked = []
    for name in ("attend_causal", "attend_all"):
        own = getattr(triton_dense, name)
        monkeypatch.setattr(
            triton_dense, name, lambda *args, own=own, name=name: (asked.append(name), own(*args))[1]
        )
    call = AttentionCall(0.125)
    case.check(case.attend(call), call)
    assert [name for name in asked if name == "attend_causal"] == ["attend_causal"]
    assert "attend_all" in asked


def test_pools_that_the_kernels_cannot_read() -> None:
    def pool(dtype: torch.dtype = torch.bfloat16, dim: int = 64, slabs: int = 1) -> KVPool:
        return KVPool.of_blocks(
            [LayerShape(1, dim, dim)],
            8,
            block_size=16,
            dtype=dtype,
            device=DEVICE,
            slab_blocks=8 // slabs,
        )

    assert TritonBackend.refuses(pool()) is None
    assert "slabs" in (TritonBackend.refuses(pool(slabs=2)) or "")
    assert "512" in (TritonBackend.refuses(pool(dim=512)) or "")
    assert "float64" in (TritonBackend.refuses(pool(dtype=torch.float64)) or "")
    if not INTERPRETED:
        assert isinstance(choose_backend(pool()), TritonBackend)
        assert isinstance(choose_backend(pool(dim=512)), TorchBackend)


class ParityCase(test_parity.Case):
    """A tiny model on the device, with its pool in one slab."""

    def memory(self, block_size: int = 8) -> test_parity.MemoryManager:
        pool = KVPool(
            self.layers,
            block_size=block_size,
            budget_bytes=2**24,
            dtype=torch.float32,
            device=DEVICE,
            slab_bytes=2**24,
        )
        return test_parity.MemoryManager(pool)


@pytest.mark.parametrize("family", ["gpt_oss"] if INTERPRETED else tiny.CONFIGS)
def test_whole_models_match_the_logits_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_parity, "TorchBackend", TritonBackend)
    with torch.device(DEVICE):
        case = ParityCase(*(tiny.build(family).to(DEVICE) for _ in range(2)), longest=150)
        test_parity.test_a_subset_of_a_prompt_at_its_original_positions(case, "backfilled", native=False)
        if not INTERPRETED:
            test_parity.test_a_subset_of_a_prompt_at_its_original_positions(case, "in order", native=False)
            test_parity.test_one_shot_prefill(case)
            test_parity.test_mixed_batch_of_prefill_chunks_and_decode_rows(case)
            test_parity.test_chunked_prefill(case)
            for shared in (40, 43):
                test_parity.test_prefill_after_a_shared_prefix(case, shared)
