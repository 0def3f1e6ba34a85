"""The native prefill kernels' Python side: attention of chunks over float32 keys and values.

`native/prefill.h` says what they promise, `prefill_attention.c`, `prefill_pairs.c` and `prefill_tiles.c` how
they work. The third needs tile registers (AMX) and is the fastest. The second multiplies pairs of bfloat16
numbers (AVX-512 BF16) and serves only calls that may be rounded. C is given addresses; the objects here own
the memory. Twins in torch: `TorchBackend` for chunks of a step, `attend_piece` for a run of tokens over its
own keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, c_double, c_int64, c_uint, c_void_p
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skim.attention.plain import attend_plain, merge, visible
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.memory.store import LayerShape
from skim.native import build
from skim.native.build import NativeUnavailable

SOURCE, PAIRS, TILES = (
    build.SOURCES / name for name in ("prefill_attention.c", "prefill_pairs.c", "prefill_tiles.c")
)
LANES = 8  # head sizes are multiples of this
TOLERANCE = 1e-4  # of `check`: far above rounding errors, far below any mistake
ROUNDED_TOLERANCE = 5e-2  # the same where inputs are rounded to bfloat16


class CPlane(Structure):
    _fields_ = (("slabs", c_void_p), ("slot_stride", c_int64), ("head_stride", c_int64))


class CPrefill(Structure):
    _fields_ = (
        ("runs", c_void_p),
        ("chunks", c_void_p),
        ("chunk_count", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("keys", CPlane),
        ("values", CPlane),
        ("query", c_void_p),
        ("token_stride", c_int64),
        ("query_stride", c_int64),
        ("since", c_void_p),
        ("sinks", c_void_p),
        ("out", c_void_p),
        ("scale", c_double),
        ("scratch", c_void_p),
        ("rounded", c_int64),
        ("next_block", c_int64),
        ("next_thread", c_int64),
        ("panels", c_int64),
    )


class ChunkReads:
    """The slots that chunks read, in the layers of a group with the same sliding window."""

    def __init__(
        self,
        runs: Sequence[tuple[int, int, int]],
        chunks: Sequence[tuple[int, ...]],
        since: torch.Tensor | None,
    ) -> None:
        """runs: slab, start, count; chunks: the fields of `chunk_t`; since: the first slot of each token."""
        self.count = len(chunks)
        self.runs, self.chunks = (torch.tensor(table, device="cpu") for table in (runs, chunks))
        self.since = since
        self._scratch = np.empty(0, dtype=np.float32)  # only C reads and writes it

    @classmethod
    def of(cls, step: Step, rows: Sequence[int], window: int | None, group: int) -> ChunkReads:
        """Rows in order of their slots."""
        runs: list[tuple[int, int, int]] = []
        chunks = []
        starts = step.cumulative_lengths
        since = torch.zeros(starts[-1], dtype=torch.int32, device="cpu") if window is not None else None
        for index in rows:
            row = step.rows[index]
            first = row.first_slot(window)
            chunks.append((starts[index], row.queries, row.context, first, len(runs)))
            for run in step.pool.runs(row.table(group), first, row.length):
                runs.append((run.slab, run.start, len(run.slots)))
            if since is not None and window is not None:
                since[starts[index] : starts[index + 1]] = first_slots(row, window)
        return cls(runs, chunks, since)

    def scratch(self, floats: int) -> int:
        """The address of scratch space, shared by all layers. Its size depends on heads and threads only."""
        if self._scratch.size < floats:
            self._scratch = np.empty(floats, dtype=np.float32)
        return self._scratch.ctypes.data


def first_slots(row: Row, window: int) -> torch.Tensor:
    """The first slot that each query of a row reads through a sliding window. Positions increase."""
    if row.positions is None:
        return (torch.arange(row.context, row.length) - (window - 1)).clamp_(min=0)
    positions = torch.as_tensor(row.positions[: row.length])
    return torch.searchsorted(positions, positions[row.context :] - window, right=True)


class PrefillKernel:
    """The compiled functions of one source, or of two, and the OpenMP threads that they share with torch."""

    def __init__(self, source: Path = SOURCE, rounding: Path | None = None) -> None:
        """rounding: the source for calls whose inputs may be rounded, if it is another one."""
        self._team = build.team_launcher()
        self._exact = load_functions(source)
        self._rounding = self._exact if rounding is None else load_functions(rounding)

    def attend(
        self,
        reads: ChunkReads,
        shape: LayerShape,
        keys: CPlane,
        values: CPlane,
        query: torch.Tensor,
        call: AttentionCall,
        out: torch.Tensor,
    ) -> None:
        """Write the chunks' tokens of `out`. query and out: [tokens, heads, dim]; out is contiguous."""
        if query.stride(2) != 1:
            query = query.contiguous()
        sinks = None if call.sinks is None else call.sinks.float().contiguous()
        threads = torch.get_num_threads()
        scratch, attend = self._rounding if call.rounds else self._exact
        given = CPrefill(
            reads.runs.data_ptr(),
            reads.chunks.data_ptr(),
            reads.count,
            query.shape[1],
            shape.kv_heads,
            shape.key_dim,
            shape.value_dim,
            keys,
            values,
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            None if reads.since is None else reads.since.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
            call.scale,
            reads.scratch(threads * scratch(shape.key_dim, shape.value_dim)),
            call.rounds,
        )
        attend(given, self._team, threads)

    def attend_pool(
        self,
        reads: ChunkReads,
        shape: LayerShape,
        planes: tuple[int, int],
        query: torch.Tensor,
        call: AttentionCall,
        out: torch.Tensor,
    ) -> None:
        """Attend over a pool. planes: addresses of the slabs' keys and values."""
        keys, values = (
            CPlane(plane, shape.kv_heads * dim, dim)
            for plane, dim in zip(planes, (shape.key_dim, shape.value_dim), strict=True)
        )
        self.attend(reads, shape, keys, values, query, call, out)

    def attend_causal(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Causal attention of a run of tokens over its own keys. [heads, tokens, dim] -> the same"""
        key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (key, value))
        heads, tokens, _ = query.shape
        shape = LayerShape(key.shape[0], key.shape[2], value.shape[2])
        row = Row(Role.PREFILL, (), 0, tokens)
        since = None if call.window is None else first_slots(row, call.window).int()
        reads = ChunkReads([(0, 0, tokens)], [(0, tokens, 0, 0, 0)], since)
        slabs = [c_void_p(t.data_ptr()) for t in (key, value)]
        keys, values = (
            CPlane(addressof(slab), t.stride(1), t.stride(0))
            for slab, t in zip(slabs, (key, value), strict=True)
        )
        out = query.new_empty(tokens, heads, shape.value_dim)
        self.attend(reads, shape, keys, values, query.transpose(0, 1), call, out)
        return out.transpose(0, 1)


def load_functions(source: Path) -> tuple[Any, Any]:
    """A source's compiled functions: the size of scratch space, and attention."""
    library = build.load(source)
    if source == TILES and not library.skim_permitted():
        raise NativeUnavailable("the system does not let this process use tile registers (AMX)")
    scratch, attend = library.skim_prefill_scratch, library.skim_prefill
    scratch.argtypes = [c_int64, c_int64]
    scratch.restype = c_int64
    attend.argtypes = [POINTER(CPrefill), c_void_p, c_uint]
    attend.restype = None
    return scratch, attend


def kernel_for(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
) -> PrefillKernel | None:
    """The kernel, if it can attend over tensors [heads, tokens, dim] like these."""
    dims = key.shape[2] % LANES == 0 and value.shape[2] % LANES == 0
    plain = query.is_cpu and query.dtype == key.dtype == value.dtype == torch.float32
    return prefill_kernel() if plain and dims and call.softcap is None and query.shape[1] else None


@cache
def prefill_kernel() -> PrefillKernel | None:
    """The fastest compiled kernel that is available and agrees with torch, else None."""
    without = "chunks attend by torch; the native kernel is not available"
    return tile_kernel() or pair_kernel() or build.available(PrefillKernel, check, without)


def tile_kernel() -> PrefillKernel | None:
    """The kernel for tile registers, if the processor has them."""
    if not torch.cpu._is_amx_tile_supported():
        return None
    without = "chunks attend without tile registers; their kernel is not available"
    return build.available(partial(PrefillKernel, TILES), check, without)


def pair_kernel() -> PrefillKernel | None:
    """Two kernels: rounded calls go to pairs of bfloat16 numbers, if the processor multiplies these."""
    if not torch.cpu._is_avx512_bf16_supported():
        return None
    without = "rounded attention takes as long as precise attention; its kernel is not available"
    return build.available(partial(PrefillKernel, SOURCE, PAIRS), check, without)


def check(native: PrefillKernel) -> None:
    """Compare with torch, and verify that a NaN is propagated."""
    draw = torch.Generator().manual_seed(0)
    tokens, kv_heads, dim = 150, 2, 40
    query, key, value = (
        torch.randn(n, tokens, dim, generator=draw) for n in (3 * kv_heads, kv_heads, kv_heads)
    )
    ways = ((False, TOLERANCE), (True, ROUNDED_TOLERANCE))
    for window in (None, 70):
        call = AttentionCall(0.2, window=window, sinks=torch.randn(3 * kv_heads, generator=draw))
        places = torch.arange(tokens)
        theirs = merge([attend_plain(query, key, value, call, visible(places, places, window))], call.sinks)
        for rounds, tolerance in ways:
            ours = native.attend_causal(query, key, value, replace(call, rounds=rounds))
            if not torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance):
                raise NativeUnavailable("its results differ from torch's")
    query[1, 100, 0] = float("nan")
    for rounds, _ in ways:
        ours = native.attend_causal(query, key, value, AttentionCall(0.2, rounds=rounds))
        if not (ours[1, 100].isnan().all() and ours[0].isfinite().all()):
            raise NativeUnavailable("it loses a NaN")
