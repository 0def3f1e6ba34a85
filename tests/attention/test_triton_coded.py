"""The Triton kernels over quantized keys and values, against the torch backend on the same pool.

Runs like `test_triton.py`: compiled on a CUDA device, otherwise under Triton's interpreter.
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

from skim.attention.blocksparse.policy import Policy
from skim.attention.cpu.torch_backend import TorchBackend
from skim.attention.cuda import dense as triton_dense
from skim.attention.cuda import metadata
from skim.attention.cuda.backend import TritonBackend
from skim.attention.cuda.captured import CapturedTables
from skim.attention.cuda.coded_write import turn_back, write_codes
from skim.attention.cuda.metadata import LEAST_SPLIT, CudaMetadata, Tables
from skim.attention.cuda.restore import restore_row
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.memory.basis import Basis, hadamard
from skim.memory.codec import CodedStore
from skim.memory.formats import CODED
from skim.memory.pool import KVPool
from skim.memory.store import LayerShape, Planes
from tests.attention.oracles import attend_listed
from tests.attention.test_triton import KINDS, positions
from tests.pools import make_pool, random_tokens, write_random

if not INTERPRETED:
    pytestmark = pytest.mark.gpu

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter cannot multiply bfloat16
TWIN = {torch.float32: 2e-4, torch.float16: 6e-3, torch.bfloat16: 2e-2}
"""Relative error against the torch backend, which reads the same codes."""
EXACT = {"int8": 1e-2, "k8v4": 4e-2, "int4": 6e-2, "fp8": 4e-2}
"""Relative error against attention over the numbers that were written."""


def own_basis(shape: LayerShape, dim: int) -> Basis:
    """A rotation that differs between heads."""
    signs = torch.randint(0, 2, (shape.kv_heads, dim, 1)) * 2.0 - 1
    forth = torch.stack([hadamard(dim)[torch.randperm(dim)] for _ in range(shape.kv_heads)]) * signs
    return Basis(forth, forth.transpose(1, 2)).to(DEVICE)


class Case:
    """A step over one coded layer, with a second pool of the same contents for the torch backend."""

    def __init__(
        self,
        rows: list[tuple[int, int]],  # context, queries
        kv_format: str,
        *,
        kv_heads: int = 2,
        group: int = 2,
        dim: int = 64,
        value_dim: int | None = None,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        kinds: list[str] | None = None,
        policy: Policy | None = None,
        after: int = 0,  # slots of the prompt after the chunk
        by_head: bool = False,  # each head has a rotation of its own
    ) -> None:
        torch.manual_seed(seed)
        rng = random.Random(seed)
        self.shape = LayerShape(kv_heads, dim, value_dim or dim)
        need = [-(-(context + queries) // block_size) for context, queries in rows]
        self.pools = [
            make_pool(self.shape, block_size, sum(need) + 2, sum(need) + 2, dtype, DEVICE, kv_format)
            for _ in range(2)
        ]
        self.pool, self.twin = self.pools
        if by_head:
            bases = own_basis(self.shape, dim), own_basis(self.shape, value_dim or dim)
            for pool in self.pools:
                coded(pool)._bases[DEVICE] = bases
        order = list(range(1, sum(need) + 1))
        rng.shuffle(order)
        self.rows: list[Row] = []
        for index, ((context, queries), count) in enumerate(zip(rows, need, strict=True)):
            blocks, order = order[:count], order[count:]
            kind = kinds[index] if kinds else "slots"
            role = Role.DECODE if kind != "last chunk" and queries == 1 else Role.PREFILL
            at = positions(rng, context + queries, "backfilled" if kind == "late chunk" else kind)
            if kind == "late chunk":
                role = Role.PREFILL
            known = kind in ("gaps", "last chunk")
            prompt = context + queries + after
            self.rows.append(Row(role, blocks, context, queries, at, known, policy, prompt))
            write_random(self.pool, blocks, context)
        self.copy()
        self.step = Step(self.pool, tuple(self.rows), TritonBackend())
        tokens = self.step.cumulative_lengths[-1]
        self.heads = kv_heads * group
        self.query = torch.randn(self.heads, tokens, dim, device=DEVICE).to(dtype).transpose(0, 1)
        self.key, self.value = random_tokens(self.pool, tokens)

    def copy(self) -> None:
        """Give the twin's pool the same contents."""
        for mine, others in zip(*(pool.planes(0).blocks.values() for pool in self.pools), strict=True):
            others.copy_(mine)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return self.step.attend(0, self.query, self.key, self.value, call)

    def expected(self, call: AttentionCall) -> torch.Tensor:
        """The torch backend's result. It writes the same tokens into its own pool."""
        step = Step(self.twin, tuple(self.rows), TorchBackend())
        return step.attend(0, self.query, self.key, self.value, call)

    def check(self, call: AttentionCall) -> None:
        out = self.attend(call)
        self.expected(call)
        self.check_codes()
        self.copy()  # a code that was rounded the other way must not count again
        coded(self.twin).write = lambda *_: None  # type: ignore[method-assign]
        assert_close(out, self.expected(call))

    def check_codes(self) -> None:
        """Both pools restore the same numbers, up to few codes that were rounded the other way."""
        slots = self.written()
        both = (coded(pool).gather(pool.planes(0), slots) for pool in self.pools)
        for mine, others in zip(*both, strict=True):
            assert torch.isfinite(mine).all()
            assert (mine.double() - others.double()).norm() < 5e-3 * others.double().norm()

    def written(self) -> torch.Tensor:
        size = self.pool.block_size
        slots = [
            row.blocks[at // size] * size + at % size
            for row in self.rows
            for at in range(row.context, row.length)
        ]
        return torch.tensor(slots, device=DEVICE)


def coded(pool: KVPool) -> CodedStore:
    [store] = pool.stores
    assert isinstance(store, CodedStore)
    return store


def assert_close(out: torch.Tensor, expected: torch.Tensor, bound: float | None = None) -> None:
    assert out.shape == expected.shape
    assert torch.isfinite(out).all()
    error = (out.double() - expected.double()).norm(dim=-1)
    size = expected.double().norm(dim=-1)
    bound = TWIN[out.dtype] if bound is None else bound
    assert error.norm() <= bound * size.norm()
    assert (error <= 4 * bound * size.clamp_min(1e-2 * size.max())).all()


@pytest.mark.parametrize("kv_format", CODED)
@pytest.mark.parametrize("seed", range(4 if INTERPRETED else 40))
def test_a_random_mixed_step(seed: int, kv_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(f"{seed} {kv_format}")
    if INTERPRETED:  # it has one processor and would not split rows
        count = rng.choice([1, 132])
        monkeypatch.setattr(metadata, "processors", lambda _: count)
    longest = 150 if INTERPRETED else 4000
    rows = [
        (rng.choice([0, rng.randint(0, longest)]), rng.choice([1, 1, 2, 17]))
        for _ in range(rng.randint(1, 3 if INTERPRETED else 4))
    ]
    dim = rng.choice([16, 64, 96, 128] if INTERPRETED else [16, 64, 96, 128, 256])
    case = Case(
        rows,
        kv_format,
        kv_heads=rng.choice([1, 2] if INTERPRETED else [1, 2, 3]),
        group=rng.choice([1, 2, 3, 4, 7] if INTERPRETED else [1, 2, 3, 4, 7, 16]),
        dim=dim,
        value_dim=rng.choice([dim, dim, 64, 24, 128]),
        block_size=rng.choice([1, 4, 16, 64]),
        dtype=rng.choice([torch.float32, HALF]),
        seed=seed,
        kinds=[rng.choice([*KINDS, "late chunk"]) for _ in rows],
        by_head=rng.random() < 0.5,
    )
    call = AttentionCall(
        scale=dim**-0.5,
        softcap=rng.choice([None, None, 3.0]),
        sinks=torch.randn(case.heads, device=DEVICE) if rng.random() < 0.4 else None,
    )
    case.check(call)


@pytest.mark.parametrize("kv_format", CODED)
def test_relative_error_against_what_was_written(kv_format: str) -> None:
    """Decode over random tokens, and the whole prompt in one chunk, against float64.

    Like those of models, values have means. Of values without any, four bits lose 9% whatever reads them.
    """
    tokens, call = (200 if INTERPRETED else 4000), AttentionCall(128**-0.5)
    case = Case([(0, tokens)], kv_format, dim=128, group=4, kv_heads=1, dtype=HALF)
    case.value += torch.randn(1, 1, 128, device=DEVICE).to(HALF)
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=DEVICE).tril().expand(case.heads, -1, -1)
    expected = attend_listed(case.query, case.key, case.value, call, seen)
    whole = case.attend(call)
    assert (whole - expected).norm() <= EXACT[kv_format] * expected.norm()
    [row] = case.rows
    last = row._replace(context=tokens - 1, queries=1, role=Role.DECODE)
    step = Step(case.pool, (last,), TritonBackend())
    out = step.attend(0, case.query[-1:], case.key[-1:], case.value[-1:], call)
    assert (out - expected[-1:]).norm() <= EXACT[kv_format] * expected[-1:].norm()
    assert_close(out, whole[-1:], TWIN[HALF])  # however it was computed


@pytest.mark.parametrize("kv_format", CODED)
def test_a_long_row_is_split(kv_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "processors", lambda _: 132)
    lengths = [5 * LEAST_SPLIT + 5, LEAST_SPLIT, LEAST_SPLIT + 1, 1]
    if not INTERPRETED:
        lengths[0] = 40_001
    case = Case([(n - 1, 1) for n in lengths], kv_format, kv_heads=1, group=4, dim=128, dtype=HALF)
    assert case.step.metadata.decode[None].splits > 2
    case.check(AttentionCall(0.1))


@pytest.mark.parametrize("kv_format", CODED)
def test_the_codes_of_new_tokens_are_those_of_the_codec(kv_format: str) -> None:
    """Nearly all bits are equal: the last bit of a rotated number may decide how its code is rounded."""
    case = Case([(7, 70), (3, 1)], kv_format, dim=128, value_dim=64, kv_heads=3)
    case.attend(AttentionCall(0.1))
    case.expected(AttentionCall(0.1))
    slots = case.written()
    others = torch.ones(case.pool.token_capacity, dtype=torch.bool, device=DEVICE)
    others[slots] = False
    for name, mine in case.pool.planes(0).slots.items():
        twin = case.twin.planes(0).slots[name]
        assert (mine[slots] != twin[slots]).double().mean() < 2e-3
        assert torch.equal(*(t[others].double().nan_to_num(7.0) for t in (mine, twin)))  # not written
    case.check_codes()


@pytest.mark.parametrize("kv_format", CODED)
def test_zeros_and_broken_numbers(kv_format: str) -> None:
    """A NaN or an infinity stays in its row, and is not hidden; zeros stay zeros."""
    case = Case([(99, 1), (20, 1), (9, 2)], kv_format, group=1, dim=32)
    case.value[:] = 0.0
    out = case.attend(AttentionCall(0.125))
    assert out.isfinite().all()
    restored = coded(case.pool).gather(case.pool.planes(0), case.written())[1]
    assert (restored == 0).all()
    for number in (float("nan"), float("-inf")):
        for broken in (case.key, case.value):
            old = broken[0].clone()
            broken[0, 0, 3] = number
            out = case.attend(AttentionCall(0.125))
            assert not out[0, 0].isfinite().any()
            assert out[0, 1].isfinite().all()
            assert out[1:].isfinite().all()
            broken[0] = old


@pytest.mark.parametrize("kv_format", CODED)
def test_tables_are_refilled_in_place(kv_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph reads other rows at the same addresses. Padding is neither written nor read."""
    monkeypatch.setattr(metadata, "processors", lambda _: 132)
    case = Case([(299, 1), (40, 1), (7, 1)], kv_format, kinds=["gaps", "slots", "gaps"], dtype=HALF)
    call = AttentionCall(0.125)
    tables = Tables(case.pool, rows=4, tokens=4, blocks=64)
    tables.fill(case.step)
    captured = case.step.metadata = CudaMetadata(case.step, tables, splits=8)
    query, key, value = (torch.cat([t, t[:1] * 3]) for t in (case.query, case.key, case.value))

    def run() -> torch.Tensor:
        return case.step.attend(0, query, key, value, call)

    if INTERPRETED:
        out = run()
    else:
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        graph.replay()
    assert_close(out[:3], case.expected(call))
    later = [
        row._replace(
            context=row.context + 1, positions=row.positions and [*row.positions, row.positions[-1] + 3]
        )
        for row in case.rows[:2]
    ]
    case.rows = later
    case.step = Step(case.pool, tuple(later), case.step.backend)
    case.step.metadata = captured
    tables.fill(case.step)
    out = run() if INTERPRETED else (graph.replay(), out)[1]
    case.query, case.key, case.value = query[:2], key[:2], value[:2]
    assert_close(out[:2], case.expected(call))
    case.check_codes()


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_captured_chunk_serves_chunks_of_other_lengths(kv_format: str, softcap: float | None) -> None:
    """The same scratch memory and padding for every length. Padding is neither written nor read."""
    call = AttentionCall(0.125, softcap=softcap)
    case = Case([(200, 30)], kv_format, group=3)
    [row] = case.rows
    captured = CapturedTables(case.pool, rows=1, slots=300, queries=32)
    whole = Step(case.pool, (row._replace(queries=32),), case.step.backend)
    query, key, value = (torch.empty(32, h, 64, device=DEVICE) for h in (case.heads, 2, 2))
    graph = None
    for context, queries in ((200, 30), (0, 32), (100, 1), (199, 17)):
        case.rows = [row._replace(context=context, queries=queries)]
        assert captured.refill(Step(case.pool, tuple(case.rows), case.step.backend)) is None
        for tensor in (query, key, value):
            tensor.copy_(torch.randn(tensor.shape))
            tensor[queries:] = float("nan")
        case.copy()
        if graph is None:
            whole.metadata = captured.metadata(whole, None)
            out = whole.attend(0, query, key, value, call)
        if not INTERPRETED and graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = whole.attend(0, query, key, value, call)
        if graph is not None:
            graph.replay()
        case.query, case.key, case.value = query[:queries], key[:queries], value[:queries]
        assert_close(out[:queries], case.expected(call), 2e-3)
        case.check_codes()


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kv_format", CODED)
def test_restoring_a_row(kv_format: str, plain: bool) -> None:
    """One row of a step into scratch memory, like the store's own reads."""
    case = Case([(40, 1), (101, 1)], kv_format, dim=96, value_dim=128, kv_heads=3, by_head=True)
    case.attend(AttentionCall(0.1))
    known: CudaMetadata = case.step.metadata
    store, planes = coded(case.pool), case.pool.planes(0)
    size = case.pool.block_size
    found = restore_row(store, planes, known.of(0).rows, known.tables.blocks, 1, 110, size, plain)
    places = [case.rows[1].blocks[i // size] * size + i % size for i in range(102)]
    twin = (store.gather if plain else store.read)(planes, torch.tensor(places, device=DEVICE))
    for mine, others in zip(found, twin, strict=True):
        torch.testing.assert_close(mine[:102], others, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("by_head", [False, True])
def test_turns(by_head: bool) -> None:
    """Queries and results, like the store's own turns."""
    case = Case([(0, 80)], "int8", dim=96, value_dim=64, kv_heads=3, group=2, by_head=by_head)
    store: CodedStore = coded(case.pool)
    planes: Planes = case.pool.planes(0)
    slots = case.step.metadata.of(0).slot_mapping
    turned = write_codes(store, planes, case.query, case.key, case.value, slots)
    torch.testing.assert_close(turned, store.turn_query(case.query), atol=1e-4, rtol=1e-4)
    out = torch.randn(80, 6, 64, device=DEVICE)
    expected = store.turn_out(out)
    turn_back(store, out)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
def test_long_chunks_use_torch_for_their_dense_parts(kv_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(triton_dense, "LEAST_QUERIES", 20)
        monkeypatch.setattr(triton_dense, "PREFIX_STEP", 32)
    rows = [(0, 33), (50, 1), (71, 25)] if INTERPRETED else [(0, 4100), (50, 1), (9001, 4097)]
    asked = []
    for name in ("attend_causal", "attend_all"):
        own = getattr(triton_dense, name)
        monkeypatch.setattr(
            triton_dense, name, lambda *args, own=own, name=name: (asked.append(name), own(*args))[1]
        )
    case = Case(rows, kv_format, group=4, dtype=torch.float32 if INTERPRETED else HALF)
    case.check(AttentionCall(0.125))
    assert asked == ["attend_causal", "attend_all"]


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
def test_sparse_prefill(kv_format: str) -> None:
    """Blocks are chosen by the keys as stored, like the torch backend chooses them."""
    rows = [(500, 140), (20, 1)] if INTERPRETED else [(1700, 900), (20, 1)]
    policy = Policy(0.9, sinks=1, recent=2, dense=1)
    case = Case(rows, kv_format, kv_heads=1, policy=policy, after=1000)
    case.check(AttentionCall(0.5))
    stats = case.step.backend.counter.stats()
    assert stats.chunks == {"sparse": 1}
    assert stats.read < stats.visible
