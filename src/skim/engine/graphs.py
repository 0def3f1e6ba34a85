"""Decode steps as CUDA graphs: what is launched kernel by kernel once is launched as a whole ever after.

A graph is captured when a step of its kind first comes: by the number of rows, rounded up to a bucket, and by
how many programs share a row's keys. Everything that differs between steps lies in buffers that stay where
they are. Rows beyond those of the step are padding: they write nothing, and nobody looks at their logits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from skim.attention.cuda.metadata import MOST_SPLITS, Plan, Tables, needs_positions
from skim.attention.step import Role, Step
from skim.memory.budget import is_out_of_memory
from skim.memory.pool import KVPool

log = logging.getLogger(__name__)

SPLITS = (1, 2, 4, 8, 16, 32, 64, MOST_SPLITS)


def buckets(most_rows: int) -> list[int]:
    """Row counts that graphs are captured for: close together where a padded row costs most."""
    counts = [1, 2, 4, *range(8, 64, 8), *range(64, most_rows + 32, 32)]
    return [count for count in counts if count < most_rows] + [most_rows]


class _Buffers:
    """What graphs for up to `rows` rows read, and the graphs, by splits."""

    def __init__(self, pool: KVPool, rows: int, most_slots: int) -> None:
        blocks = rows * -(-most_slots // pool.block_size)
        self.tables = Tables(pool, rows, tokens=rows, blocks=blocks)
        self.ids = torch.zeros(rows, dtype=torch.long, device=pool.device)
        self.positions = torch.zeros_like(self.ids)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}


class DecodeGraphs:
    """Runs decode steps of a module over a pool. Used by one thread."""

    def __init__(self, module: Any, pool: KVPool, *, most_rows: int, most_slots: int) -> None:
        self._module = module
        self._pool = pool
        self._most_slots = most_slots
        self._buckets = buckets(most_rows)
        self._buffers: dict[int, _Buffers] = {}
        self._logits: torch.Tensor | None = None  # [most_rows, vocab], of all graphs
        self._memory: Any = None  # what graphs compute in, shared by all: one runs at a time
        self._stream: Any = None  # that graphs are captured on
        self._windowed = any(shape.window is not None for shape in pool.layers)
        self._failed: dict[tuple[int, int], str] = {}  # why there is no graph, by rows and splits
        self._half_made: list[Any] = []  # kept: torch's allocator may still refer to them

    def refusal(self, step: Step) -> str | None:
        """Why a step must be run kernel by kernel, if it must."""
        if any(row.role is not Role.DECODE for row in step.rows):
            return "prefill"
        if len(step.rows) > self._buckets[-1]:
            return "rows"
        if self._windowed and any(needs_positions(row, windowed=True) for row in step.rows):
            return "positions"  # of slots, which are not in the buffers
        return None

    def forward(self, step: Step, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, str]:
        """Logits of the step's rows, one token each, valid until the next call, and how they came about.

        `graph` if one was run, `capture` if it was the first of its kind, else why there is no graph for it.
        """
        rows = len(step.rows)
        bucket = next(count for count in self._buckets if count >= rows)
        buffers = self._buffers.get(bucket)
        if buffers is None:
            buffers = self._buffers[bucket] = _Buffers(self._pool, bucket, self._most_slots)
        buffers.tables.fill(step)
        buffers.ids[:rows].copy_(ids)
        buffers.positions[:rows].copy_(positions)
        splits = next(count for count in SPLITS if count >= buffers.tables.splits)
        if splits not in buffers.graphs:
            logits, path = self._run(buffers, splits, step)
            return logits[:rows], path
        buffers.graphs[splits].replay()
        assert self._logits is not None
        return self._logits[:rows], "graph"

    def _run(self, buffers: _Buffers, splits: int, step: Step) -> tuple[torch.Tensor, str]:
        """Run the step kernel by kernel, which is its result, and capture it for those that follow."""
        step.notes[Plan] = Plan(step, buffers.tables, splits)

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
        kind = len(buffers.ids), splits
        if kind in self._failed:
            return logits, self._failed[kind]
        begun = time.perf_counter()
        try:
            if self._logits is None:
                self._logits = logits.new_empty(self._buckets[-1], logits.shape[1])
            target = self._logits[: kind[0]]
            buffers.graphs[splits] = self._record(lambda: target.copy_(run()))
        except Exception as error:
            self._failed[kind] = "memory" if is_out_of_memory(error) else "failed"
            log.warning("decode steps of %d rows, %d splits are run kernel by kernel: %s", *kind, error)
            return logits, self._failed[kind]
        log.debug("captured %d rows, %d splits in %.2f s", *kind, time.perf_counter() - begun)
        return logits, "capture"

    def _record(self, run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        """Without `torch.cuda.graph`, which collects garbage first: rows that are being served would wait."""
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
                with suppress(Exception):  # what went wrong first says why
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._half_made.pop()
        return graph
