"""The native decode kernels' Python side: functions, structures, and the slots they read in a step.

`native/decode.h` says how they work. C is given addresses; the objects here own the memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, c_double, c_int64, c_uint, c_void_p
from pathlib import Path

import torch

from skim.attention.cpu.native_glance import CSummaries, Glances
from skim.attention.step import AttentionCall, Step
from skim.memory.pool import KVPool
from skim.memory.store import LayerShape, PlainStore
from skim.native import build

SOURCE = build.SOURCES / "decode_attention.c"
LANES = 8  # head sizes are multiples of this
MAX_CHUNKS = 64  # of a row
MAX_HEADS = 256


class CStep(Structure):
    _fields_ = (
        ("runs", c_void_p),
        ("rows", c_void_p),
        ("row_count", c_int64),
        ("chunks_at", c_void_p),
        ("unfinished", c_void_p),
        ("ready", c_void_p),
        ("pieces", c_void_p),
        ("piece_count", c_int64),
        ("next", c_int64),
        ("glances", c_void_p),
    )


class CTokens(Structure):
    _fields_ = (("data", c_void_p), ("token_stride", c_int64), ("head_stride", c_int64))

    @classmethod
    def of(cls, tensor: torch.Tensor) -> CTokens:
        token, head, _ = tensor.stride()
        return cls(tensor.data_ptr(), token, head)


class CLayer(Structure):
    _fields_ = (
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("query", CTokens),
        ("key", CTokens),
        ("value", CTokens),
        ("sinks", c_void_p),
        ("partials", c_void_p),
        ("out", c_void_p),
        ("scale", c_double),
        ("summaries", c_void_p),
    )


class Kernel:
    """The compiled functions of one source, and the OpenMP threads that they share with torch."""

    def __init__(self, source: Path | None = None, name: str = "skim_decode") -> None:
        self.team = build.team_launcher()
        library = build.load(source or SOURCE)
        self.count_chunks = library.skim_count_chunks
        self.count_chunks.argtypes = [POINTER(CStep), c_uint]
        self.count_chunks.restype = c_int64
        self._decode = getattr(library, name)
        self._decode.argtypes = [POINTER(CStep), c_void_p, c_void_p, c_uint]
        self._decode.restype = None

    def decode(self, step: CStep, layer: Structure, threads: int) -> None:
        """Store the new keys and values of one layer, and attend."""
        self._decode(step, ctypes.addressof(layer), self.team, threads)


def fits(shape: LayerShape) -> bool:
    """True if the kernel can read layers of this shape."""
    return shape.key_dim % LANES == 0 and shape.value_dim % LANES == 0


class DecodeReads:
    """The slots that kernels read for some rows of a step, in the layers of a group with the same sliding
    window."""

    def __init__(
        self,
        kernel: Kernel,
        step: Step,
        rows: Sequence[int],
        window: int | None,
        group: int = 0,
        glances: Glances | None = None,
    ) -> None:
        run_table: list[int] = []
        row_table: list[int] = []
        for index in rows:
            row = step.rows[index]
            first = row.first_slot(window)
            begin = len(run_table) // 3
            picks = step.picks[index] if glances is not None else None
            if picks is not None and glances is not None:
                slots = row.length - (picks.blocks - picks.reads) * step.pool.block_size
                for head in range(glances.kv_heads):  # kernels write the runs
                    runs_at = begin + head * picks.reads
                    row_table += (step.cumulative_lengths[index], runs_at, runs_at, slots, head + 1)
                run_table += (0,) * (3 * glances.kv_heads * picks.reads)
                continue
            for run in step.pool.runs(row.table(group), first, row.length):
                run_table += (run.slab, run.start, len(run.slots))
            row_table += (step.cumulative_lengths[index], begin, len(run_table) // 3, row.length - first, 0)
        self.threads = torch.get_num_threads()
        self.count = count = len(row_table) // 5
        self._glances = glances
        self._runs, self._rows = (torch.tensor(table, device="cpu") for table in (run_table, row_table))
        self._chunks_at = torch.empty(count + 1, dtype=torch.long, device="cpu")
        self._unfinished, self._ready = torch.empty(2, count, dtype=torch.long, device="cpu")
        self._pieces = torch.empty(count * (MAX_CHUNKS + 1), dtype=torch.long, device="cpu")
        self._partials = torch.empty(0, dtype=torch.float32, device="cpu")  # scratch space of all layers
        self._turned = self._partials
        self.step = CStep(
            self._runs.data_ptr(),
            self._rows.data_ptr(),
            count,
            self._chunks_at.data_ptr(),
            self._unfinished.data_ptr(),
            self._ready.data_ptr(),
            self._pieces.data_ptr(),
            0,
            0,
            ctypes.addressof(glances.array) if glances is not None else None,
        )
        self._chunks: int = kernel.count_chunks(self.step, self.threads)

    def partials(self, heads: int, value_dim: int) -> int:
        """The address of scratch space for the chunks' partial results."""
        need = self._chunks * heads * (2 + value_dim)
        if self._partials.numel() < need:
            self._partials = self._partials.new_empty(need)
        return self._partials.data_ptr()

    def turned(self, heads: int, dim: int) -> int:
        """The address of scratch space for the rows' queries and results in another basis."""
        need = self.count * heads * dim
        if self._turned.numel() < need:
            self._turned = self._turned.new_empty(need)
        return self._turned.data_ptr()


def decode_plain(
    kernel: Kernel,
    reads: DecodeReads,
    shape: LayerShape,
    planes: Mapping[str, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
    out: torch.Tensor,
    summaries: CSummaries | None = None,
) -> None:
    """Store the rows' new keys and values of one layer, attend, and write the rows' tokens of `out`."""
    heads = query.shape[1]
    query, key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (query, key, value))
    sinks = None if call.sinks is None else call.sinks.float().contiguous()
    layer = CLayer(
        heads,
        shape.kv_heads,
        shape.key_dim,
        shape.value_dim,
        planes[PlainStore.KEY],
        planes[PlainStore.VALUE],
        CTokens.of(query),
        CTokens.of(key),
        CTokens.of(value),
        None if sinks is None else sinks.data_ptr(),
        reads.partials(heads, shape.value_dim),
        out.data_ptr(),
        call.scale,
        None if summaries is None else ctypes.addressof(summaries),
    )
    kernel.decode(reads.step, layer, reads.threads)


class SlabTable:
    """The addresses of a pool's slabs, by layer and plane. Slabs never move, but more may be added."""

    def __init__(self, pool: KVPool) -> None:
        self.slabs = len(pool.slabs)
        array = c_void_p * self.slabs
        self._arrays = [
            {
                plane.name: array(*(slab.layers[layer].blocks[plane.name].data_ptr() for slab in pool.slabs))
                for plane in store.planes
            }
            for layer, store in enumerate(pool.stores)
        ]
        self.layers = [
            {name: ctypes.addressof(addresses) for name, addresses in arrays.items()}
            for arrays in self._arrays
        ]
