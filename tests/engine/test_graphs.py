"""Decode steps as graphs, without a GPU: which steps are captured, and failed captures."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skim.attention.backend import CapturableBackend
from skim.attention.cpu.torch_backend import TorchBackend
from skim.attention.step import Role, Row, Step
from skim.engine.graphs import DecodeGraphs, buckets
from skim.memory.store import LayerShape
from tests.pools import make_pool

POOL = make_pool(LayerShape(1, 2, 2), block_size=4, blocks=64, slab_blocks=64)
LONG = 100  # the fake backend's graph key changes for rows with more slots


class Buffers:
    """The graph key is True if a row is long. Only the last refilled step has metadata."""

    def __init__(self) -> None:
        self.filled: Step | None = None

    def refill(self, step: Step) -> bool:
        self.filled = step
        return max(row.length for row in step.rows) > LONG

    def metadata(self, step: Step, key: Any) -> Any:
        assert step is self.filled
        return key


class GraphBackend(TorchBackend, CapturableBackend):
    def refuses_capture(self, step: Step) -> str | None:
        return "positions" if any(row.positions is not None for row in step.rows) else None

    def graph_buffers(self, pool: Any, rows: int, slots: int) -> Buffers:
        return Buffers()


BACKEND = GraphBackend()


def make_graphs(module: Any, most_rows: int = 8) -> DecodeGraphs:
    return DecodeGraphs(module, POOL, BACKEND, most_rows=most_rows, most_slots=256)


class Module:
    """A module whose logits are its token ids and positions."""

    def __call__(self, input_ids: Any, position_ids: Any, **_: Any) -> Any:
        return SimpleNamespace(logits=torch.stack([input_ids, position_ids], dim=-1).float())


class Graph:
    def __init__(self, run: Callable[[], Any]) -> None:
        self.replay = run


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    made: list[Graph] = []

    def record(self: DecodeGraphs, run: Callable[[], Any]) -> Graph:
        run()
        made.append(Graph(run))
        return made[-1]

    monkeypatch.setattr(DecodeGraphs, "_record", record)
    return made


def decode(
    *lengths: int, positions: list[int] | None = None, ascending: bool = False, role: Role = Role.DECODE
) -> Step:
    rows = tuple(Row(role, list(range(-(-n // 4))), n - 1, 1, positions, ascending) for n in lengths)
    return Step(POOL, rows, BACKEND)


def run(graphs: DecodeGraphs, step: Step) -> tuple[list[list[float]], str]:
    count = len(step.rows)
    ids, places = torch.arange(10, 10 + count), torch.arange(20, 20 + count)
    logits, path = graphs.forward(step, ids, places)
    return logits.tolist(), path


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


def test_prefill_steps_and_steps_with_too_many_rows_are_refused(recorded: list[Graph]) -> None:
    graphs = make_graphs(Module(), most_rows=2)
    assert graphs.refusal(decode(5, 9)) is None
    assert graphs.refusal(decode(5, role=Role.PREFILL)) == "prefill"
    assert graphs.refusal(decode(5, 9, 3)) == "rows"
    assert graphs.refusal(decode(3, positions=[5, 0, 9])) == "positions"  # the backend's reason


@pytest.mark.parametrize(
    ("error", "reason"),
    [(torch.OutOfMemoryError("CUDA out of memory"), "memory"), (RuntimeError("a sync"), "failed")],
)
def test_a_failed_capture_affects_only_its_kind_of_step(
    monkeypatch: pytest.MonkeyPatch, recorded: list[Graph], error: Exception, reason: str
) -> None:
    graphs = make_graphs(Module())
    assert run(graphs, decode(5))[1] == "capture"

    def fails(self: DecodeGraphs, run: Callable[[], Any]) -> Graph:
        raise error

    monkeypatch.setattr(DecodeGraphs, "_record", fails)
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
