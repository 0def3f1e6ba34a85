"""Decode steps as CUDA graphs: captured once per kind of step, then replayed as a whole.

A kind is the number of rows, rounded up to a bucket, and the backend's graph key. Everything that differs
between steps of a kind is in buffers that stay in place. Rows beyond those of the step are padding: they
write nothing, and their logits are not read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

import torch

from skim.attention.backend import CapturableBackend
from skim.attention.step import Role, Step
from skim.memory.budget import is_out_of_memory
from skim.memory.pool import KVPool

log = logging.getLogger(__name__)


def buckets(most_rows: int) -> list[int]:
    """Row counts that graphs are captured for: close together where a padded row costs most."""
    counts = [1, 2, 4, *range(8, 64, 8), *range(64, most_rows + 32, 32)]
    return [count for count in counts if count < most_rows] + [most_rows]


class _Buffers:
    """The inputs of graphs for up to `rows` rows, and the graphs by the backend's key."""

    def __init__(self, pool: KVPool, backend: CapturableBackend, rows: int, most_slots: int) -> None:
        self.backend = backend.graph_buffers(pool, rows, most_slots)
        self.ids = torch.zeros(rows, dtype=torch.long, device=pool.device)
        self.positions = torch.zeros_like(self.ids)
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}


class DecodeGraphs:
    """Runs decode steps of a module over a pool. Used by one thread."""

    def __init__(
        self, module: Any, pool: KVPool, backend: CapturableBackend, *, most_rows: int, most_slots: int
    ) -> None:
        self._module = module
        self._pool = pool
        self._backend = backend
        self._most_slots = most_slots
        self._buckets = buckets(most_rows)
        self._buffers: dict[int, _Buffers] = {}
        self._logits: torch.Tensor | None = None  # [most_rows, vocab], shared by all graphs
        self._memory: Any = None  # the graphs' memory pool, shared: one graph runs at a time
        self._stream: Any = None  # the capture stream
        self._failed: dict[tuple[int, Hashable], str] = {}  # the reason for having no graph, by rows and key
        self._half_made: list[Any] = []  # kept alive: torch's allocator may still refer to them

    def refusal(self, step: Step) -> str | None:
        """The reason a step must run kernel by kernel, as a metric label; None if it may run as a graph."""
        if any(row.role is not Role.DECODE for row in step.rows):
            return "prefill"
        if len(step.rows) > self._buckets[-1]:
            return "rows"
        return self._backend.refuses_capture(step)

    def forward(self, step: Step, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, str]:
        """Logits of the step's rows, one token each, valid until the next call, and how they were computed.

        `graph` if a graph was replayed, `capture` if it was captured now, else the reason that there is none.
        """
        rows = len(step.rows)
        bucket = next(count for count in self._buckets if count >= rows)
        buffers = self._buffers.get(bucket)
        if buffers is None:
            buffers = _Buffers(self._pool, self._backend, bucket, self._most_slots)
            self._buffers[bucket] = buffers
        key = buffers.backend.refill(step)
        buffers.ids[:rows].copy_(ids)
        buffers.positions[:rows].copy_(positions)
        if key not in buffers.graphs:
            logits, path = self._run(buffers, key, step)
            return logits[:rows], path
        buffers.graphs[key].replay()
        assert self._logits is not None
        return self._logits[:rows], "graph"

    def _run(self, buffers: _Buffers, key: Hashable, step: Step) -> tuple[torch.Tensor, str]:
        """Run the step kernel by kernel for its result, and capture it for later steps."""
        step.metadata = buffers.backend.metadata(step, key)

        def run() -> torch.Tensor:
            output = self._module(
                input_ids=buffers.ids[None],
                position_ids=buffers.positions[None],
                use_cache=False,
                logits_to_keep=0,
                skim_step=step,
            )
            return output.logits[0]  # type: ignore[no-any-return]

        logits = run()
        kind = len(buffers.ids), key
        if kind in self._failed:
            return logits, self._failed[kind]
        start = time.perf_counter()
        try:
            if self._logits is None:
                self._logits = logits.new_empty(self._buckets[-1], logits.shape[1])
            target = self._logits[: kind[0]]
            buffers.graphs[key] = self._record(lambda: target.copy_(run()))
        except Exception as error:
            self._failed[kind] = "memory" if is_out_of_memory(error) else "failed"
            log.warning("decode steps of %d rows, key %s, run kernel by kernel: %s", *kind, error)
            return logits, self._failed[kind]
        log.debug("captured %d rows, key %s, in %.2f s", *kind, time.perf_counter() - start)
        return logits, "capture"

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
