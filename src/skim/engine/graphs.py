"""Steps as CUDA graphs: captured once per kind of step, then replayed as a whole.

Launching a step kernel by kernel takes the host tens of milliseconds, and a replay about one. Three kinds of
step are captured: decode rows, one chunk of a prompt, and rows that verify drafts. A kind is the number of
rows or of the chunk's tokens, rounded up to a bucket, and the backend's graph key. Everything that differs
between steps of a kind is in buffers that stay in place. Rows and tokens beyond those of the step are
padding: they write nothing, and their logits are not read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from skim.attention.backend import CapturableBackend
from skim.attention.step import Role, Step
from skim.decode.drafts import MOST, TOGETHER
from skim.memory.budget import is_out_of_memory
from skim.memory.pool import KVPool

log = logging.getLogger(__name__)


def buckets(most_rows: int) -> list[int]:
    """Row counts that graphs are captured for: close together where a padded row costs most."""
    counts = [1, 2, 4, *range(8, 64, 8), *range(64, most_rows + 32, 32)]
    return [count for count in counts if count < most_rows] + [most_rows]


CHUNKS = (64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
"""Tokens of captured chunks. Longer ones take the device longer than the host takes to launch them."""
APART = 2  # most chunks of a step that are launched one by one
VERIFYING = (1, 2, 4, TOGETHER // (MOST + 1))  # rows of captured steps that verify drafts


def launches(rows: Sequence[tuple[int, int]], decoding: Sequence[bool]) -> list[list[tuple[int, int]]]:
    """Divide the rows of a step, (order, tokens) each, into launches that can run as graphs.

    Decode rows of one token go first, then those that verify drafts, then each chunk. Rows that would not run
    as graphs stay together: then one launch costs less than two.
    """
    chunks = [row for row, decodes in zip(rows, decoding, strict=True) if not decodes]
    if len(chunks) > APART or any(tokens > CHUNKS[-1] for _, tokens in chunks):
        return [list(rows)]
    decodes = [row for row, decodes in zip(rows, decoding, strict=True) if decodes]
    single = [row for row in decodes if row[1] == 1]
    several = [row for row in decodes if row[1] > 1]
    return [part for part in (single, several, *([chunk] for chunk in chunks)) if part]


class Kind(NamedTuple):
    """Decode rows, one row of several queries, or rows that verify drafts."""

    rows: int
    queries: int = 1  # of each row, at most
    verifies: bool = False

    @property
    def is_chunk(self) -> bool:
        return self.queries > 1 and not self.verifies

    def __str__(self) -> str:
        if self.is_chunk:
            return f"a chunk of {self.queries} tokens"
        return f"{self.rows} {'verifying' if self.verifies else 'decode'} rows"


class Captured(NamedTuple):
    """The results of a step, on the device, valid until the next one."""

    logits: torch.Tensor  # [rows, vocab] after each row's last token; of verifying rows, after each token
    finite: torch.Tensor | None  # [1] of a chunk: True if its keys and values are finite
    mass: torch.Tensor | None = None  # [rows] as `Step.mass`; None if no row is fast


class _Buffers:
    """The inputs of graphs of one kind, and the graphs by the backend's key."""

    def __init__(self, pool: KVPool, backend: CapturableBackend, kind: Kind, most_slots: int) -> None:
        self.kind = kind
        self.backend = backend.graph_buffers(pool, kind.rows, most_slots, kind.queries)
        self.ids = torch.zeros(kind.rows * kind.queries, dtype=torch.long, device=pool.device)
        self.positions = torch.zeros_like(self.ids)
        self.last = torch.zeros(1, dtype=torch.long, device=pool.device)  # a chunk's last token
        self.live = torch.zeros_like(self.ids, dtype=torch.bool)  # a chunk's tokens; the others are padding
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def fill(self, ids: torch.Tensor, positions: torch.Tensor) -> None:
        count = len(ids)
        self.ids[:count].copy_(ids)
        self.positions[:count].copy_(positions)
        if self.kind.is_chunk:
            self.last.fill_(count - 1)
            self.live[:count].fill_(True)
            self.live[count:].fill_(False)

    def padded(self, step: Step, key: Hashable) -> Step:
        """The step with all tokens that the buffers hold."""
        if self.kind.queries > 1:
            row = step.rows[0]._replace(queries=self.kind.queries, positions=None)
            checked, live = ((0,), self.live) if self.kind.is_chunk else ((), None)
            step = Step(step.pool, (row,) * self.kind.rows, step.backend, checked=checked, live=live)
        step.metadata = self.backend.metadata(step, key)
        return step


class StepGraphs:
    """Runs steps of a module over a pool. Used by one thread."""

    def __init__(
        self, module: Any, pool: KVPool, backend: CapturableBackend, *, most_rows: int, most_slots: int
    ) -> None:
        self._module = module
        self._pool = pool
        self._backend = backend
        self._most_slots = most_slots
        self._buckets = buckets(most_rows)
        self._buffers: dict[Kind, _Buffers] = {}
        self._results: Captured | None = None  # of [most_rows] rows, shared by all graphs
        self._memory: Any = None  # the graphs' memory pool, shared: one graph runs at a time
        self._stream: Any = None  # the capture stream
        self._failed: dict[tuple[Kind, Hashable], str] = {}  # the reason for having no graph
        self._half_made: list[Any] = []  # kept alive: torch's allocator may still refer to them

    def drop(self) -> None:
        """Forget all graphs: the weights have moved. Those that are needed are captured again."""
        for buffers in self._buffers.values():
            buffers.graphs.clear()
        self._memory = self._stream = None
        self._failed.clear()

    def refusal(self, step: Step, *, verifies: bool = False) -> str | None:
        """The reason a step must run kernel by kernel, as a metric label; None if it may run as a graph."""
        if verifies:
            longest = max(row.queries for row in step.rows)
            if len(step.rows) > VERIFYING[-1] or not 1 < longest <= MOST + 1:
                return "verify"
        elif any(row.role is not Role.DECODE for row in step.rows):
            if len(step.rows) > 1 or step.rows[0].policy is not None or step.rows[0].queries > CHUNKS[-1]:
                return "prefill"
        elif len(step.rows) > self._buckets[-1]:
            return "rows"
        return self._backend.refuses_capture(step)

    def forward(
        self, step: Step, ids: torch.Tensor, positions: torch.Tensor, *, verifies: bool = False
    ) -> tuple[Captured, str]:
        """The step's results, and how they were computed.

        With `verifies`, logits are wanted after every token of every row.
        `graph` if a graph was replayed, `capture` if it was captured now, else the reason that there is none.
        """
        rows = len(step.rows)
        if verifies:
            kind = Kind(next(count for count in VERIFYING if count >= rows), MOST + 1, verifies=True)
        elif step.rows[0].role is Role.DECODE:
            kind = Kind(next(count for count in self._buckets if count >= rows))
        else:
            kind = Kind(1, next(count for count in CHUNKS if count >= step.rows[0].queries))
        buffers = self._buffers.get(kind)
        if buffers is None:
            buffers = _Buffers(self._pool, self._backend, kind, self._most_slots)
            self._buffers[kind] = buffers
        key = buffers.backend.refill(step)
        buffers.fill(ids, positions)
        if key not in buffers.graphs:
            results, path = self._run(buffers, key, step)
        else:
            buffers.graphs[key].replay()
            assert self._results is not None
            results, path = self._results, "graph"
        finite = results.finite if kind.is_chunk else None
        mass = results.mass[:rows] if results.mass is not None and any(step.picks) else None
        return Captured(results.logits[: len(ids) if verifies else rows], finite, mass), path

    def _run(self, buffers: _Buffers, key: Hashable, step: Step) -> tuple[Captured, str]:
        """Run the step kernel by kernel for its result, and capture it for later steps."""
        kind = buffers.kind
        step = buffers.padded(step, key)

        def run() -> Captured:
            output = self._module(
                input_ids=buffers.ids[None],
                position_ids=buffers.positions[None],
                use_cache=False,
                logits_to_keep=buffers.last if kind.is_chunk else 0,
                skim_step=step,
            )
            return Captured(output.logits[0], step.finite, step.mass)

        results = run()
        if (kind, key) in self._failed:
            return results, self._failed[kind, key]
        start = time.perf_counter()
        try:
            if self._results is None:
                most = max(self._buckets[-1], TOGETHER if self._pool.summarized else 0)
                logits = results.logits.new_empty(most, results.logits.shape[1])
                finite = torch.zeros(1, dtype=torch.bool, device=logits.device)
                mass = torch.ones(len(logits), device=logits.device) if self._pool.summarized else None
                self._results = Captured(logits, finite, mass)
            kept = self._results

            def record() -> None:
                made = run()
                kept.logits[: len(made.logits)].copy_(made.logits)
                if made.finite is not None and kept.finite is not None:
                    kept.finite.copy_(made.finite)
                if made.mass is not None and kept.mass is not None:
                    kept.mass[: kind.rows].copy_(made.mass)

            buffers.graphs[key] = self._record(record)
        except Exception as error:
            self._failed[kind, key] = "memory" if is_out_of_memory(error) else "failed"
            log.warning("steps of %s, key %s, run kernel by kernel: %s", kind, key, error)
            return results, self._failed[kind, key]
        log.debug("captured %s, key %s, in %.2f s", kind, key, time.perf_counter() - start)
        return results, "capture"

    def _record(self, run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        """Capture without `torch.cuda.graph`, which collects garbage first and would stall running rows."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._pool.device)  # type: ignore[no-untyped-call]
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._half_made.append(graph)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(Exception):  # the first error is the one to report
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._half_made.pop()
        return graph
