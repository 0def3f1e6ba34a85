"""The native CPU backend: rows by compiled C kernels, everything else by the torch backend.

The decode kernels take rows whose one query reads a run of slots up to its own, with or without a sliding
window, in layers without a softcap. One reads float32 keys and values, the other codes. The prefill kernel
takes chunks that read all slots up to their own, over float32 keys and values. Kernels are compiled on the
machine they run on, and compared with the torch backend before they are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch

from skim.attention.backend import Backend
from skim.attention.blocksparse.counter import BlockCounter
from skim.attention.cpu.native_codes import decode_codes, load_kernel, reads_codes
from skim.attention.cpu.native_glance import CSummaries, Glances
from skim.attention.cpu.native_kernel import (
    LANES,
    MAX_HEADS,
    DecodeReads,
    Kernel,
    SlabTable,
    decode_plain,
    fits,
)
from skim.attention.cpu.native_prefill import ChunkReads, PrefillKernel, prefill_kernel
from skim.attention.cpu.torch_backend import TorchBackend, TorchMetadata, write
from skim.attention.reading import Reading, reading
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.memory.codec import CodedStore
from skim.memory.formats import AUTO
from skim.memory.pool import KVPool
from skim.memory.store import LayerShape, LayerStore, PlainStore
from skim.native.build import NativeUnavailable

TOLERANCE = 1e-4  # of the check: far above rounding errors, far below any mistake
CODES_TOLERANCE = 1e-2  # the same where a new token's code may be rounded the other way


def make_native(pool: KVPool) -> NativeBackend:
    """The native backend for this pool; NativeUnavailable if it cannot be built or differs from torch."""
    if pool.dtype != torch.float32:
        raise NativeUnavailable(f"the pool holds {pool.dtype}, and the kernel reads torch.float32")
    plain, coded = (
        sorted({replace(store.shape, window=None) for store in pool.stores if test(store)}, key=repr)
        for test in (reads_plain, reads_codes)
    )
    if not plain and not coded:
        raise NativeUnavailable(
            f"it reads no layer of this model with kv_cache_dtype {pool.kv_format}: head sizes must be "
            f"multiples of {LANES}"
        )
    with ThreadPoolExecutor(1) as thread:  # OpenMP keeps workers for every thread that has computed
        prefill = thread.submit(prefill_kernel).result() if plain else None
        backend = NativeBackend(Kernel() if plain else None, load_kernel() if coded else None, prefill)
        for shape in plain:
            thread.submit(check, backend, shape).result()
        for shape in coded:
            thread.submit(check, backend, shape, pool.kv_format).result()
    return backend


def make_prefill(pool: KVPool) -> Backend | None:
    """The backend for steps without decode rows, if its kernel reads this pool; None if torch must."""
    prefill = prefill_kernel() if any(map(reads_plain, pool.stores)) and pool.dtype == torch.float32 else None
    return None if prefill is None else NativeBackend(None, None, prefill)


def reads_plain(store: LayerStore) -> bool:
    return isinstance(store, PlainStore) and fits(store.shape)


def reads_by_kernel(store: LayerStore, call: AttentionCall) -> bool:
    """True if kernels over float32 keys and values can read a layer."""
    return reading(store, call) is Reading.PLAIN and call.softcap is None and reads_plain(store)


@dataclass
class Part:
    """Some rows of a step."""

    rows: list[int]
    step: Step | None  # of these rows; None if they are the whole step, which must not be referred to
    tokens: slice | torch.Tensor

    @classmethod
    def of(cls, step: Step, rows: list[int], fallback: Backend) -> Part:
        if len(rows) == len(step.rows):
            return cls(rows, None, slice(None))
        own = Step(step.pool, tuple(step.rows[i] for i in rows), fallback)
        return cls(rows, own, tokens_of(step, rows))


@dataclass
class Split:
    """A step's rows: those for a decode kernel, those for the prefill kernel, and those for torch."""

    decode: Part
    chunks: Part
    others: Part
    reads: dict[tuple[Kernel, int | None, int, tuple[int, int, int] | None], DecodeReads] = field(
        default_factory=dict
    )
    """By kernel, sliding window, layer group and, in layers with summaries, numbers of heads and size of
    keys."""
    chunk_reads: dict[tuple[int | None, int], ChunkReads] = field(default_factory=dict)
    """By sliding window and layer group."""

    @classmethod
    def of(cls, step: Step, windowed: bool, decodes: bool, prefill: bool, fallback: Backend) -> Split:
        """A decode kernel takes rows whose one query reads a run of slots up to its own."""
        rows = range(len(step.rows))
        decode = [
            i
            for i in rows
            if decodes
            and step.rows[i].queries == 1
            and (step.rows[i].in_order if windowed else step.rows[i].sees_all_before)
        ]
        chunks = [i for i in rows if prefill and is_plain_chunk(step.rows[i])]
        rest = [i for i in rows if i not in {*decode, *chunks}]
        own, prefilled, others = (Part.of(step, part, fallback) for part in (decode, chunks, rest))
        return cls(own, prefilled, others)


def is_plain_chunk(row: Row) -> bool:
    """True for several queries that read all slots up to their own, apart from sliding windows."""
    selects = row.policy is not None or row.fast is not None or row.evidence is not None
    return row.queries > 1 and row.in_order and not selects


def tokens_of(step: Step, rows: Sequence[int]) -> slice | torch.Tensor:
    """An index of the tokens of some rows, in order."""
    starts = step.cumulative_lengths
    if not rows or len(rows) == rows[-1] + 1 - rows[0]:
        return slice(starts[rows[0]], starts[rows[-1] + 1]) if rows else slice(0)
    return torch.cat([torch.arange(starts[i], starts[i + 1]) for i in rows])


class NativeMetadata(TorchMetadata):
    """The torch backend's metadata, for layers that no kernel takes, and the rows that kernels take."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.splits: dict[tuple[bool, bool, bool], Split] = {}
        """By whether the layer has a sliding window, and whether a decode and the prefill kernel take it."""


class NativeBackend(Backend):
    """Fast on the CPU with a float32 model; the torch backend does what the kernels do not take."""

    def __init__(
        self, plain: Kernel | None, codes: Kernel | None = None, prefill: PrefillKernel | None = None
    ) -> None:
        self._plain = plain
        self._codes = codes
        self._prefill = prefill
        self._torch = TorchBackend()
        self._tables: WeakKeyDictionary[KVPool, SlabTable] = WeakKeyDictionary()

    @property
    def counter(self) -> BlockCounter:  # type: ignore[override]
        return self._torch.counter

    @counter.setter
    def counter(self, counter: BlockCounter) -> None:
        self._torch.counter = counter

    def prepare(self, step: Step) -> NativeMetadata:
        return NativeMetadata(step)

    def store(self, step: Step, layer: int, key: torch.Tensor, value: torch.Tensor) -> bool:
        write(step.pool, step.metadata, layer, key, value)
        return True

    def attend(
        self,
        step: Step,
        layer: int,
        query: torch.Tensor,  # [tokens, query_heads, key_dim]
        key: torch.Tensor,  # [tokens, kv_heads, key_dim]
        value: torch.Tensor,  # [tokens, kv_heads, value_dim]
        call: AttentionCall,
    ) -> torch.Tensor:
        store = step.pool.stores[layer]
        heads = query.shape[1]
        kernel = self._kernel(store, call)
        alike = query.dtype == key.dtype == value.dtype == torch.float32
        prefill = self._prefill if reads_by_kernel(store, call) else None
        none = kernel is None and prefill is None
        if none or heads > MAX_HEADS or not alike or not query.is_cpu:
            return self._torch.attend(step, layer, query, key, value, call)
        splits = step.metadata.splits
        kind = call.window is not None, kernel is not None, prefill is not None
        if kind not in splits:
            splits[kind] = Split.of(step, *kind, self._torch)
        split: Split = splits[kind]
        if len(split.others.rows) == len(step.rows):
            return self._torch.attend(step, layer, query, key, value, call)
        out = query.new_empty(query.shape[0], heads, store.shape.value_dim)
        if split.others.rows:
            at, rest = split.others.tokens, split.others.step or step
            out[at] = self._torch.attend(rest, layer, query[at], key[at], value[at], call)
        if split.chunks.rows and prefill is not None:
            self._attend_chunks(prefill, split, step, layer, query, key, value, call, out)
        if split.decode.rows and kernel is not None:
            self._decode(kernel, split, step, layer, query, key, value, call, out)
        return out

    def _attend_chunks(
        self,
        kernel: PrefillKernel,
        split: Split,
        step: Step,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
        out: torch.Tensor,
    ) -> None:
        """Store the chunks' keys and values, and write their tokens of `out`."""
        store, chunks = step.pool.stores[layer], split.chunks
        write(step.pool, (chunks.step or step).metadata, layer, key[chunks.tokens], value[chunks.tokens])
        kind = call.window, step.pool.group_of[layer]
        if kind not in split.chunk_reads:
            split.chunk_reads[kind] = ChunkReads.of(step, chunks.rows, *kind)
        planes = self._table(step.pool).layers[layer]
        slabs = planes[PlainStore.KEY], planes[PlainStore.VALUE]
        kernel.attend_pool(split.chunk_reads[kind], store.shape, slabs, query, call, out)

    def _decode(
        self,
        kernel: Kernel,
        split: Split,
        step: Step,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
        out: torch.Tensor,
    ) -> None:
        """Store the decode rows' keys and values, and write their tokens of `out`."""
        store, own = step.pool.stores[layer], split.decode
        planes = self._table(step.pool).layers[layer]
        group, sizes, summaries = step.pool.group_of[layer], None, None
        if store.summarized:
            metadata: TorchMetadata = (own.step or step).metadata
            if metadata.filled(group):
                write(step.pool, metadata, layer, key[own.tokens], value[own.tokens])
            if any(step.rows[index].evidence or step.picks[index] for index in own.rows):
                sizes = query.shape[1], store.shape.kv_heads, store.shape.key_dim
                summaries = CSummaries.of(step.pool, layer, planes)
        kind = kernel, call.window, group, sizes
        reads = split.reads.get(kind)
        if reads is None:
            glances = Glances(step, own.rows, group, *sizes) if sizes is not None else None
            reads = DecodeReads(kernel, step, own.rows, call.window, group, glances)
            split.reads[kind] = reads
        if isinstance(store, CodedStore):
            decode_codes(kernel, reads, store, planes, query, key, value, call, out, summaries)
        else:
            decode_plain(kernel, reads, store.shape, planes, query, key, value, call, out, summaries)

    def _kernel(self, store: LayerStore, call: AttentionCall) -> Kernel | None:
        """The kernel for a layer; None if torch must read it."""
        if reads_by_kernel(store, call):
            return self._plain
        return self._codes if reading(store, call) is Reading.CODES and reads_codes(store) else None

    def _table(self, pool: KVPool) -> SlabTable:
        table = self._tables.get(pool)
        if table is None or table.slabs != len(pool.slabs):
            table = self._tables[pool] = SlabTable(pool)
        return table


def check(backend: Backend, shape: LayerShape, kv_format: str = AUTO) -> None:
    """Compare with the torch backend on a fragmented pool, and check that a NaN is propagated."""
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    blocks = 24
    pool = KVPool.of_blocks(
        [shape],
        blocks,
        block_size=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
        slab_blocks=10,
        kv_format=kv_format,
    )
    every = pool.allocate(blocks)
    order = torch.randperm(len(every), generator=generator).tolist()
    slots = pool.runs(every, 0, pool.token_capacity)
    heads = 3 * shape.kv_heads

    def keys_values(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        key = random(tokens, shape.kv_heads, shape.key_dim)
        return key, random(tokens, shape.kv_heads, shape.value_dim)

    pool.write(0, slots, *keys_values(pool.token_capacity))
    first = 0 if kv_format == AUTO else 13  # one code must not decide
    rows = tuple(
        Row(Role.DECODE, part, context, 1)
        for part, context in ((order[:1], first), (order[1:4], 40), (order[4:], 300))
    )
    query, sinks = random(3, heads, shape.key_dim), random(heads)
    key, value = keys_values(3)
    for call in (
        AttentionCall(shape.key_dim**-0.5),
        AttentionCall(shape.key_dim**-0.5, window=33, sinks=sinks),
    ):
        expected = Step(pool, rows, TorchBackend()).attend(0, query, key, value, call)
        got = Step(pool, rows, backend).attend(0, query, key, value, call)
        tolerance = TOLERANCE if kv_format == AUTO else CODES_TOLERANCE
        if not torch.allclose(got, expected, rtol=tolerance, atol=tolerance):
            raise NativeUnavailable(f"its results differ from torch's for {shape}")
    query[1, 0, 0] = float("nan")
    broken = Step(pool, rows, backend).attend(0, query, key, value, AttentionCall(1.0))
    if not (broken[1, 0].isnan().all() and broken[0].isfinite().all()):
        raise NativeUnavailable(f"it loses a NaN for {shape}")
