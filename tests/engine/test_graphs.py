"""Steps as graphs, without a GPU: which steps are captured, and failed captures."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skim.attention.backend import CapturableBackend
from skim.attention.blocksparse.policy import Policy
from skim.attention.cpu.torch_backend import TorchBackend
from skim.attention.glance import Glance
from skim.attention.step import Role, Row, Step
from skim.decode.drafts import MOST
from skim.engine.graphs import CHUNKS, VERIFYING, StepGraphs, buckets, launches
from skim.memory.store import LayerShape
from tests.pools import make_pool

POOL = make_pool(LayerShape(1, 2, 2), block_size=4, blocks=64, slab_blocks=64)
LONG = 100  # the fake backend's graph key changes for rows with more slots


class Buffers:
    """The graph key is True if a row is long. Only the last refilled step has metadata."""

    def __init__(self, queries: int) -> None:
        self.filled: Step | None = None
        self.queries = queries

    def refill(self, step: Step) -> bool:
        self.filled = step
        return max(row.length for row in step.rows) > LONG

    def metadata(self, step: Step, key: Any) -> Any:
        assert self.filled is not None
        if self.queries == 1:
            assert step is self.filled
        else:  # padded
            assert step.rows[0].queries == self.queries
            assert step.rows[0].blocks == self.filled.rows[0].blocks
        return key


class GraphBackend(TorchBackend, CapturableBackend):
    def refuses_capture(self, step: Step) -> str | None:
        return "positions" if any(row.positions is not None for row in step.rows) else None

    def graph_buffers(self, pool: Any, rows: int, slots: int, queries: int) -> Buffers:
        return Buffers(queries)


BACKEND = GraphBackend()


def make_graphs(module: Any, most_rows: int = 8) -> StepGraphs:
    return StepGraphs(module, POOL, BACKEND, most_rows=most_rows, most_slots=256)


class Module:
    """A module whose logits are its token ids and positions. Keys and values are its ids; id 0 is NaN."""

    def __call__(
        self, input_ids: Any, position_ids: Any, logits_to_keep: Any, skim_step: Step, **_: Any
    ) -> Any:
        new = input_ids[0, :, None, None].float()
        new = torch.where(new == 0, torch.nan, new)
        skim_step.check(0, new, new)
        logits = torch.stack([input_ids, position_ids], dim=-1).float()
        return SimpleNamespace(
            logits=logits if isinstance(logits_to_keep, int) else logits[:, logits_to_keep]
        )


class Graph:
    def __init__(self, run: Callable[[], Any]) -> None:
        self.replay = run


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    made: list[Graph] = []

    def record(self: StepGraphs, run: Callable[[], Any]) -> Graph:
        run()
        made.append(Graph(run))
        return made[-1]

    monkeypatch.setattr(StepGraphs, "_record", record)
    return made


def decode(
    *lengths: int, positions: list[int] | None = None, ascending: bool = False, role: Role = Role.DECODE
) -> Step:
    rows = tuple(Row(role, list(range(-(-n // 4))), n - 1, 1, positions, ascending) for n in lengths)
    return Step(POOL, rows, BACKEND)


def chunk(context: int, queries: int, policy: Policy | None = None) -> Step:
    blocks = list(range(-(-(context + queries) // 4)))
    return Step(POOL, (Row(Role.PREFILL, blocks, context, queries, policy=policy),), BACKEND)


def run(graphs: StepGraphs, step: Step) -> tuple[list[list[float]], str]:
    count = len(step.rows)
    ids, places = torch.arange(10, 10 + count), torch.arange(20, 20 + count)
    computed, path = graphs.forward(step, ids, places)
    assert computed.finite is None
    return computed.logits.tolist(), path


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 64, 65, 100, 256])
def test_every_number_of_rows_has_a_bucket_that_wastes_little(most: int) -> None:
    found = buckets(most)
    assert found == sorted(set(found))
    assert found[-1] == most
    for rows in range(1, most + 1):
        bucket = next(count for count in found if count >= rows)
        assert bucket < rows + 32
        assert bucket <= 2 * rows


def test_a_kind_of_step_is_captured_once_and_then_run_as_a_graph(recorded: list[Graph]) -> None:
    module = Module()
    graphs = make_graphs(module)
    expected = [[10.0, 20.0], [11.0, 21.0], [12.0, 22.0]]
    assert run(graphs, decode(5, 9, 2)) == (expected, "capture")
    for lengths in ((6, 10, 3), (7, 11, 4)):
        assert run(graphs, decode(*lengths)) == (expected, "graph")
    assert run(graphs, decode(1, 1, 1, 1)) == ([*expected, [13.0, 23.0]], "graph")  # the same bucket
    assert len(recorded) == 1
    assert run(graphs, decode(1)) == (expected[:1], "capture")
    assert run(graphs, decode(LONG + 1)) == (expected[:1], "capture")  # another graph key
    assert run(graphs, decode(LONG + 2)) == (expected[:1], "graph")
    assert len(recorded) == 3


class MassModule(Module):
    """The mass of its rows is their positions."""

    def __call__(self, input_ids: Any, position_ids: Any, skim_step: Step, **options: Any) -> Any:
        if any(skim_step.picks):
            skim_step.mass = position_ids[0].float()
        return super().__call__(input_ids, position_ids, skim_step=skim_step, **options)


def test_the_mass_of_fast_rows_outlives_the_graph_that_computed_it(recorded: list[Graph]) -> None:
    shape = LayerShape(1, 2, 2)
    pool = make_pool(shape, block_size=4, blocks=64, slab_blocks=64, summaries=True)
    graphs = StepGraphs(MassModule(), pool, BACKEND, most_rows=8, most_slots=256)

    def mass(first: int, *rows: tuple[int, Glance | None]) -> list[float] | None:
        made = tuple(Row(Role.DECODE, list(range(-(-n // 4))), n - 1, 1, fast=fast) for n, fast in rows)
        step = Step(pool, made, BACKEND)
        places = torch.arange(first, first + len(rows))
        found = graphs.forward(step, torch.ones(len(rows)), places)[0].mass
        return None if found is None else found.tolist()

    assert mass(5, (9, None), (7, None)) is None
    fast = (LONG + 1, Glance(8, 1))  # another graph key
    assert mass(5, fast, (7, None)) == [5.0, 6.0]
    assert mass(8, fast, (9, None)) == [8.0, 9.0]
    assert mass(7, (9, None), (7, None)) is None
    assert mass(4, fast, fast, (7, None)) == [4.0, 5.0, 6.0]
    assert len(recorded) == 3


def test_prefill_steps_and_steps_with_too_many_rows_are_refused(recorded: list[Graph]) -> None:
    graphs = make_graphs(Module(), most_rows=2)
    assert graphs.refusal(decode(5, 9)) is None
    assert graphs.refusal(decode(5, 9, role=Role.PREFILL)) == "prefill"
    assert graphs.refusal(chunk(0, CHUNKS[-1])) is None
    assert graphs.refusal(chunk(0, CHUNKS[-1] + 1)) == "prefill"
    assert graphs.refusal(chunk(8, 8, policy=Policy(0.5))) == "prefill"
    assert graphs.refusal(decode(5, 9, 3)) == "rows"
    assert graphs.refusal(decode(3, positions=[5, 0, 9])) == "positions"  # the backend's reason


def test_a_chunk_runs_as_a_graph_of_its_bucket_and_padding_is_neither_read_nor_checked(
    recorded: list[Graph],
) -> None:
    graphs = make_graphs(Module())
    rng = random.Random(0)
    seen: set[int] = set()
    for _ in range(40):
        queries = rng.choice((1, rng.randrange(2, 70), rng.randrange(1, CHUNKS[-1] + 1)))
        bucket = next(count for count in CHUNKS if count >= queries)
        assert queries <= CHUNKS[0] or bucket < 1.5 * queries
        ids = torch.tensor([rng.randrange(1, 9) for _ in range(queries)])
        broken = rng.random() < 0.3
        if broken:
            ids[rng.randrange(queries)] = 0
        places = torch.arange(queries) + 7
        computed, path = graphs.forward(chunk(0, queries), ids, places)
        long = queries > LONG  # another graph key
        assert path == ("graph" if (bucket, long) in seen else "capture")
        seen.add((bucket, long))
        assert computed.logits.tolist() == [[float(ids[-1]), queries + 6.0]]
        assert computed.finite is not None
        assert computed.finite.tolist() == [not broken]
    assert len(recorded) == len(seen)
    assert run(graphs, decode(5))[1] == "capture"
    assert graphs.forward(chunk(0, 5), torch.ones(5), torch.ones(5))[1] == "graph"


def test_rows_that_verify_drafts_run_as_a_graph_with_logits_after_every_token(recorded: list[Graph]) -> None:
    pool = make_pool(LayerShape(1, 2, 2), block_size=4, blocks=64, slab_blocks=64, summaries=True)
    graphs = StepGraphs(Module(), pool, BACKEND, most_rows=2, most_slots=256)
    rng = random.Random(2)
    seen: set[int] = set()
    for _ in range(30):
        queries = [rng.randrange(2, MOST + 2) for _ in range(rng.randrange(1, VERIFYING[-1] + 1))]
        rows = tuple(Row(Role.PREFILL, list(range(20)), 40, count) for count in queries)
        step, tokens = Step(pool, rows, BACKEND), sum(queries)
        assert graphs.refusal(step, verifies=True) is None
        ids = torch.tensor([rng.randrange(1, 9) for _ in range(tokens)])
        computed, path = graphs.forward(step, ids, torch.arange(tokens), verifies=True)
        bucket = next(count for count in VERIFYING if count >= len(queries))
        assert path == ("graph" if bucket in seen else "capture")
        seen.add(bucket)
        assert computed.logits.tolist() == [[float(one), float(place)] for place, one in enumerate(ids)]
        assert computed.finite is None
    assert len(recorded) == len(seen) == len(VERIFYING)
    many = Step(POOL, rows[:1] * (VERIFYING[-1] + 1), BACKEND)
    assert graphs.refusal(many, verifies=True) == "verify"
    assert graphs.refusal(chunk(0, MOST + 2), verifies=True) == "verify"
    assert run(graphs, decode(5, 9))[1] == "capture"


def test_decode_rows_and_chunks_are_launched_apart_if_all_can_run_as_graphs() -> None:
    rng = random.Random(1)
    for _ in range(300):
        decoding = [rng.random() < 0.6 for _ in range(rng.randrange(1, 6))]
        rows = [
            (i, rng.choice((1, 1, 9)) if one else rng.choice((1, 100, 2048, 2049)))
            for i, one in enumerate(decoding)
        ]
        parts = launches(rows, decoding)
        assert sorted(row for part in parts for row in part) == rows
        chunks = [tokens for (_, tokens), one in zip(rows, decoding, strict=True) if not one]
        if len(chunks) <= 2 and max(chunks, default=0) <= CHUNKS[-1]:
            decodes = [tokens for (_, tokens), one in zip(rows, decoding, strict=True) if one]
            counts = [decodes.count(1), decodes.count(9), *[1] * len(chunks)]
            assert [len(part) for part in parts] == [count for count in counts if count]
            for part in parts:
                assert len({(decoding[order], decoding[order] and tokens) for order, tokens in part}) == 1
        else:
            assert parts == [rows]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(torch.OutOfMemoryError("CUDA out of memory"), "memory"), (RuntimeError("a sync"), "failed")],
)
def test_a_failed_capture_affects_only_its_kind_of_step(
    monkeypatch: pytest.MonkeyPatch, recorded: list[Graph], error: Exception, reason: str
) -> None:
    graphs = make_graphs(Module())
    assert run(graphs, decode(5))[1] == "capture"

    def fails(self: StepGraphs, run: Callable[[], Any]) -> Graph:
        raise error

    monkeypatch.setattr(StepGraphs, "_record", fails)
    expected = [[10.0, 20.0], [11.0, 21.0]]
    for _ in range(2):
        assert run(graphs, decode(5, 9)) == (expected, reason)
    assert run(graphs, decode(6))[1] == "graph"


def test_the_first_error_of_a_failed_capture_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending a broken capture raises too, with an error that does not mention memory."""

    class Broken:
        def capture_begin(self, **_: Any) -> None: ...

        def capture_end(self) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    class Stream:
        def wait_stream(self, _: Any) -> None: ...

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Broken)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    module = Module()
    graphs = make_graphs(module)
    calls = []

    def forward(**given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # the first call is the step itself
            raise torch.OutOfMemoryError("CUDA out of memory")
        return module(**given)

    graphs._module = forward
    assert run(graphs, decode(5)) == ([[10.0, 20.0]], "memory")
    assert len(calls) == 2
