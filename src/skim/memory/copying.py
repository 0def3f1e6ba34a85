"""Copies of a prefix's keys and values between the pool and flat buffers on the host.

On CUDA nothing here waits for the device. A copy out of the pool is collected on the device and crosses to
pinned memory on a second stream, while the next step runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from skim.memory.formats import FORMATS, make_stores
from skim.memory.pool import KVPool
from skim.memory.runs import Run
from skim.memory.segment import Format, Segment, data_bytes, format_of, saved_planes, views
from skim.memory.store import LayerStore, PlainStore, Planes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FEW_RUNS = 4  # copied one by one; more of them by index


@dataclass(frozen=True)
class HostCopy:
    """Bytes on the host, complete after `wait`."""

    data: torch.Tensor
    done: Any = None  # a CUDA event

    def wait(self) -> torch.Tensor:
        if self.done is not None:
            self.done.synchronize()
        return self.data


class Copier:
    """Copies slots of one pool. Used by the engine's thread, except `allocate`."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.kind = kind_of(pool)
        self.form: Format = format_of(pool.stores, pool.dtype)
        self._stream: Any = None
        if pool.device.type == "cuda":
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]

    def allocate(self, size: int) -> torch.Tensor:
        """A flat buffer on the host, pinned if the pool is on a GPU."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)

    def read(self, tables: Sequence[Sequence[int]], first: int, end: int) -> HostCopy:
        """Copy the slots `first : end` of a sequence out of the pool, given a block table of each group."""
        pool, tokens = self.pool, end - first
        size = data_bytes(self.form, tokens)
        runs = [pool.runs(table, first, end) for table in tables]
        if self._stream is None:
            data = self.allocate(size)
            self._collect(runs, views(self.form, data, tokens))
            return HostCopy(data)
        staged = torch.empty(size, dtype=torch.uint8, device=pool.device)
        self._collect(runs, views(self.form, staged, tokens))
        self._stream.wait_stream(torch.cuda.current_stream(pool.device))
        with torch.cuda.stream(self._stream):
            data = self.allocate(size)
            data.copy_(staged, non_blocking=True)
            done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        staged.record_stream(self._stream)
        return HostCopy(data, done)

    def write(
        self, tables: Sequence[Sequence[int]], slots: range, data: torch.Tensor, segment: Segment
    ) -> None:
        """Copy some slots of a segment, read from its file, into the same slots of a sequence."""
        pool = self.pool
        if self._stream is not None:
            data = data.to(pool.device, non_blocking=True)
        whole = views(segment.form, data, segment.tokens)
        rows = slice(slots.start - segment.first, slots.stop - segment.first)
        runs = [pool.runs(table, slots.start, slots.stop) for table in tables]
        if segment.form == self.form and segment.kind == self.kind and not self._converts:
            self._spread(runs, whole, rows)
            for layer in range(len(pool.stores)):
                pool.summarize(layer, runs[pool.group_of[layer]])
            return
        for layer, store in enumerate(stores_of(segment, pool)):
            planes = Planes.over({plane.name: whole[f"{layer}.{plane.name}"] for plane in store.planes})
            key, value = store.gather(planes, rows)
            pool.write(layer, runs[pool.group_of[layer]], key.to(pool.dtype), value.to(pool.dtype))

    @property
    def _converts(self) -> bool:
        """True if the pool's planes are not saved as they are."""
        return any(p.per_block and not p.derived for store in self.pool.stores for p in store.planes)

    def _collect(self, groups: Sequence[Sequence[Run]], target: dict[str, torch.Tensor]) -> None:
        pool, first = self.pool, groups[0][0].slots.start
        if self._converts:
            for layer in range(len(pool.stores)):
                key, value = pool.gather(layer, groups[pool.group_of[layer]])
                target[f"{layer}.{PlainStore.KEY}"].copy_(key)
                target[f"{layer}.{PlainStore.VALUE}"].copy_(value)
            return
        indices = [self._index(runs) for runs in groups]
        for layer, store in enumerate(pool.stores):
            runs, index = groups[pool.group_of[layer]], indices[pool.group_of[layer]]
            for plane in saved_planes(store, pool.dtype):
                to = target[f"{layer}.{plane.name}"]
                if index is not None:
                    held = pool.slabs[runs[0].slab].layers[layer].slots[plane.name]
                    source, to = _words(held, to)
                    torch.index_select(source, 0, index, out=to)
                    continue
                for run, source in self._each(runs, layer, plane.name):
                    to[run.slots.start - first : run.slots.stop - first].copy_(source)

    def _spread(self, groups: Sequence[Sequence[Run]], whole: dict[str, torch.Tensor], rows: slice) -> None:
        pool, first = self.pool, groups[0][0].slots.start
        indices = [self._index(runs) for runs in groups]
        for layer, store in enumerate(pool.stores):
            runs, index = groups[pool.group_of[layer]], indices[pool.group_of[layer]]
            for plane in saved_planes(store, pool.dtype):
                source = whole[f"{layer}.{plane.name}"][rows]
                if index is not None:
                    target = pool.slabs[runs[0].slab].layers[layer].slots[plane.name]
                    target, source = _words(target, source)
                    target.index_copy_(0, index, source)
                    continue
                for run, target in self._each(runs, layer, plane.name):
                    target.copy_(source[run.slots.start - first : run.slots.stop - first])

    def _each(self, runs: Sequence[Run], layer: int, name: str) -> list[tuple[Run, torch.Tensor]]:
        slabs = self.pool.slabs
        return [
            (run, slabs[run.slab].layers[layer].slots[name][run.start : run.start + len(run.slots)])
            for run in runs
        ]

    def _index(self, runs: Sequence[Run]) -> torch.Tensor | None:
        """The slots of many runs in one slab; None if they are few, or in several."""
        if len(runs) <= FEW_RUNS or len({run.slab for run in runs}) > 1:
            return None
        parts = [torch.arange(run.start, run.start + len(run.slots)) for run in runs]
        return torch.cat(parts).to(self.pool.device, non_blocking=True)


def _words(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors of the same rows as rows of the largest whole numbers that they all consist of.

    [rows, words] Copies by index exist for these in every case, and large ones are faster.
    """
    flat = [tensor.reshape(len(tensor), -1).view(torch.uint8) for tensor in tensors]
    common = math.gcd(flat[0].shape[1], *(int(tensor.storage_offset()) for tensor in flat))
    word = next(t for t in (torch.int64, torch.int32, torch.int16, torch.uint8) if not common % t.itemsize)
    return [tensor.view(word) for tensor in flat]


def kind_of(pool: KVPool) -> str:
    """The pool's KV format and dtype by name, such as `auto float32`."""
    return f"{pool.kv_format} {str(pool.dtype).removeprefix('torch.')}"


def stores_of(segment: Segment, pool: KVPool) -> Sequence[LayerStore]:
    """Stores that read a segment of another format."""
    kv_format, _, dtype = segment.kind.partition(" ")
    stores: Sequence[LayerStore] = ()
    if kv_format in FORMATS and dtype in DTYPES:
        stores = make_stores(pool.layers, DTYPES[dtype], kv_format)
    if set(format_of(stores, pool.dtype)) != set(segment.form):
        raise ValueError(f"its KV format {segment.kind!r} does not fit the model")
    return stores
